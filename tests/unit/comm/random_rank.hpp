#pragma once
/// Makes drawn calls as one rank, and checks the results, the memory around them, and that inputs are unchanged.

#include <unistd.h>

#include <bit>
#include <chorus/comm/split.hpp>
#include <csignal>
#include <optional>
#include <stdexcept>
#include <thread>

#include "nccl_carrier.hpp"
#include "random_results.hpp"

namespace test::calls {

/// One rank of a program. Throws Wrong if a result is wrong, and the errors of its communicators.
class Rank {
 public:
  struct Wrong : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  struct OwnError : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  Rank(const Program& program, const ch::comm::World& world)
      : p_(program),
        backend_(backend_of(program.carrier)),
        all_{ch::comm::connect(world, {.backend = backend_}), ranks_of(world.size)} {
    take_place(all_);
    if (!p_.colors.empty()) {
      const auto r = static_cast<std::size_t>(world.rank);
      const auto place = ch::comm::split(all_.c, world, p_.colors[r], p_.keys[r]);
      group_.emplace(Group{ch::comm::connect(place, {.backend = backend_}), place.members});
      take_place(*group_);
    }
  }

  /// Returns the same text on all ranks.
  std::string run() {
    for (std::size_t i = 0; i < p_.batches.size(); ++i) run(i);
    for (auto* group : {group_ ? &*group_ : nullptr, &all_}) finish(group);
    return ch::cat("ended with ", all_.sums);
  }

 private:
  struct Group {
    ch::comm::AnyCommunicator c;
    std::vector<int> members;  ///< ranks of the job
    std::uint64_t sums = 0;    ///< hash of all results that are equal on all ranks
  };
  /// A running call.
  struct Running {
    Call call;
    Habits habits;
    std::size_t mine = 0, whole = 0;  ///< where its data begins in the memory
    std::size_t mine_bytes = 0, whole_bytes = 0;
    bool spoilt = false;
    ch::comm::Work work;
    std::shared_ptr<std::vector<std::byte>> result;
  };

  /// Over NCCL: chooses whether the host is the compute stream or the stream runs late.
  void take_place(const Group& group) {
    auto* const nccl = NcclCarrier::behind(group.c);
    if (nccl == nullptr) return;
    nccl->device->host_computes = p_.seed % 2 == 0;
    nccl->device->holds = [this](const void* memory) {
      return std::less_equal<const void*>()(lent_.get(), memory) &&
             std::less<const void*>()(memory, lent_.get() + lent_bytes_);
    };
  }

  static std::vector<int> ranks_of(int size) {
    std::vector<int> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  static ch::comm::Backend backend_of(Carrier carrier) {
    using ch::comm::Backend;
    constexpr Backend all[] = {Backend::shm,  Backend::tcp, Backend::thread, Backend::hierarchical,
                               Backend::gloo, Backend::mpi, Backend::nccl};
    return all[static_cast<std::size_t>(carrier)];
  }

  Group& group_of(const Call& call) { return call.in_group ? *group_ : all_; }
  int me() const { return all_.c.rank(); }

  /// The call with this group's ranks; none if this rank takes no part.
  std::optional<Call> own(Call call) {
    const int n = group_of(call).c.size(), place = group_of(call).c.rank();
    call.root %= n;
    call.to %= n;
    if (call.op != Op::message) return call;
    if (call.to == call.root) call.to = (call.to + 1) % n;
    const bool takes_part = n > 1 && (place == call.root || place == call.to);
    return takes_part ? std::optional(call) : std::nullopt;
  }

  void run(std::size_t number) {
    const auto& batch = p_.batches[number];
    std::vector<Running> running(batch.calls.size());
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < batch.calls.size(); ++i) {
      const auto call = own(batch.calls[i]);
      if (!call) continue;
      running[i].call = *call;
      running[i].habits = habits(p_, *call, me());
      order.push_back(i);
    }
    const bool errs = p_.fault != Fault::none && me() == p_.faulty_rank && number == p_.faulty_batch;
    if (errs) spoil(running, order);
    lay_out(running, order);
    for (const auto i : order) {
      auto& r = running[i];
      if (r.habits.pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(r.habits.pause));
      std::thread other;
      if (errs && i == p_.faulty_call) other = go_wrong();
      struct Joined {
        std::thread& thread;
        ~Joined() {
          if (thread.joinable()) thread.join();
        }
      } joined{other};
      start(r);
      if (!r.call.later) take(r);
    }
    for (const auto i : batch.waits)
      if (running[i].call.later && std::find(order.begin(), order.end(), i) != order.end()) {
        auto& r = running[i];
        if (r.habits.waits == 1)
          while (!r.work.done()) std::this_thread::yield();
        if (r.habits.waits == 2) r.work = {};  // its destructor waits as well; the next call would throw its error
        if (r.habits.waits != 2) r.work.wait();
        if (r.habits.waits == 2 && p_.fault != Fault::none) r.spoilt = true;
        take(r);
      }
    for (const auto* group : {&all_, group_ ? &*group_ : nullptr})
      if (auto* const nccl = group != nullptr ? NcclCarrier::behind(group->c) : nullptr) nccl->synchronize();
    for (const auto i : order) {
      const auto wrong = running[i].spoilt || spoilt_ ? "" : judge(running[i]);
      if (!wrong.empty()) throw Wrong(ch::cat("wrong: call ", number, ".", i, ": ", wrong));
    }
    for (auto& region : regions_) {
      const auto size = region.shadow.size();
      if (spoilt_ || size == 0 || std::memcmp(region.data, region.shadow.data(), size) == 0) continue;
      std::size_t at = 0;
      while (region.data[at] == region.shadow[at]) ++at;
      throw Wrong(ch::cat("wrong: batch ", number, ": byte ", at, " of ", size, " was written"));
    }
  }

  // Memory: one block of the program's own and one of the communicator's, used from the start in every batch.

  static constexpr std::byte guard{0xA5}, scribble{0x5A};
  struct Region {
    std::byte* data = nullptr;
    std::vector<std::byte> shadow;  ///< the expected contents
  };

  /// Runs `work` on a call's data, or enqueues it on the stream of the call.
  void work_on(const Running& r, std::function<void()> work) {
    auto* const nccl = NcclCarrier::behind(group_of(r.call).c);
    if (nccl != nullptr && r.habits.lent)
      nccl->compute(std::move(work));
    else
      work();
  }
  Region& region_of(const Running& r) { return regions_[r.habits.lent && lent_ ? 1 : 0]; }
  template <class T>
  std::span<T> span_at(const Running& r, std::size_t begin, std::size_t bytes) {
    return {reinterpret_cast<T*>(region_of(r).data + begin), bytes / sizeof(T)};
  }

  void lay_out(std::vector<Running>& running, const std::vector<std::size_t>& order) {
    std::size_t end = 0;
    bool fresh = false;
    const auto place = [&](std::size_t bytes, std::size_t element, std::size_t skip) {
      const auto begin = (end + 64 + 63) / 64 * 64 + skip * element;
      end = begin + bytes;
      return begin;
    };
    for (const auto i : order) {
      auto& r = running[i];
      const auto element = ch::size_of(r.call.dtype), n = static_cast<std::size_t>(group_of(r.call).c.size());
      const bool data = r.call.op != Op::barrier && r.call.op != Op::monitored_barrier;
      const bool parts = r.call.op == Op::all_gather || r.call.op == Op::reduce_scatter;
      r.mine_bytes = data ? r.call.count * element : 0;
      r.whole_bytes = parts ? n * r.mine_bytes : 0;
      r.whole = place(r.whole_bytes, element, r.habits.skip);
      r.mine = parts && r.call.in_place ? r.whole + static_cast<std::size_t>(group_of(r.call).c.rank()) * r.mine_bytes
                                        : place(r.mine_bytes, element, r.habits.skip / 2);
      fresh = fresh || r.habits.fresh;
    }
    end += 64;
    if (fresh || end > lent_bytes_) {
      lent_.reset();
      lent_bytes_ = std::bit_ceil(end);  // so that new memory often has the old size
      lent_ = all_.c.allocate(lent_bytes_);
      if (p_.carrier == Carrier::nccl)
        lent_ = std::shared_ptr<std::byte>(new std::byte[lent_bytes_], std::default_delete<std::byte[]>());
      if (!lent_ && p_.carrier == Carrier::shm) throw Wrong("wrong: no memory to lend");
    }
    memory_.resize(std::max(memory_.size(), end));
    regions_[0].data = memory_.data();
    regions_[1].data = lent_.get();
    for (auto& region : regions_) {
      if (region.data == nullptr) continue;
      std::fill_n(region.data, end, guard);
      region.shadow.assign(end, guard);
    }
    for (const auto i : order) {
      auto& r = running[i];
      with_type(r.call.dtype, [&]<class T>() {
        const bool scatters = r.call.op == Op::reduce_scatter;
        const auto begin = scatters ? r.whole : r.mine, count = (scatters ? r.whole_bytes : r.mine_bytes) / sizeof(T);
        Numbers<T> numbers(count);
        for (std::size_t k = 0; k < count; ++k) numbers[k] = number<T>(r.call.key, me(), k, p_.special_in(r.call));
        chorus::comm::detail::copy_bytes(region_of(r).shadow.data() + begin, numbers.bytes(), count * sizeof(T));
        work_on(r, [numbers, to = region_of(r).data + begin, memory = lent_] {
          chorus::comm::detail::copy_bytes(to, numbers.bytes(), numbers.size() * sizeof(T));
        });
      });
    }
  }

  void write_over(const Running& r, std::size_t begin, std::size_t bytes) {
    std::fill_n(region_of(r).shadow.begin() + static_cast<std::ptrdiff_t>(begin), bytes, scribble);
    work_on(r, [to = region_of(r).data + begin, bytes, memory = lent_] { std::fill_n(to, bytes, scribble); });
  }

  // One call.

  void start(Running& r) {
    const double scale = r.call.scales[static_cast<std::size_t>(me())];
    with_type(r.call.dtype, [&]<class T>() {
      r.work = make(group_of(r.call).c, r.call, span_at<T>(r, r.mine, r.mine_bytes),
                    span_at<T>(r, r.whole, r.whole_bytes), scale);
    });
  }

  /// Copies the result of a finished call, and overwrites its memory at once.
  void take(Running& r) {
    const bool gathers = r.call.op == Op::all_gather, scatters = r.call.op == Op::reduce_scatter;
    const bool sends = r.call.op == Op::message && group_of(r.call).c.rank() == r.call.root;
    const auto out = gathers ? r.whole : r.mine, bytes = sends ? 0 : gathers ? r.whole_bytes : r.mine_bytes;
    r.result = std::make_shared<std::vector<std::byte>>();
    work_on(r, [result = r.result, from = region_of(r).data + out, bytes, memory = lent_] {
      result->assign(from, from + bytes);
    });
    write_over(r, out, bytes);
    if (r.habits.scribbles && scatters) write_over(r, r.whole, r.whole_bytes);
    if (r.habits.scribbles && (gathers || sends)) write_over(r, r.mine, r.mine_bytes);
  }

  /// What is wrong with a result, or "".
  std::string judge(const Running& r) {
    if (!r.result || r.result->empty()) return "";
    auto& group = group_of(r.call);
    if (r.call.op == Op::all_reduce)
      group.sums = group.sums * 31 +
                   std::hash<std::string_view>()({reinterpret_cast<const char*>(r.result->data()), r.result->size()});
    const auto wrong = with_type(
        r.call.dtype, [&]<class T>() { return calls::judge<T>(p_, r.call, group.members, group.c.rank(), *r.result); });
    return wrong.empty() ? "" : ch::cat(ch::comm::name(r.call.op), " ", r.call.how, " of ", r.call.dtype, ": ", wrong);
  }
  /// Checks that all links are empty, and that all ranks had the same sums.
  void finish(Group* group) {
    if (group == nullptr) return;
    auto& c = group->c;
    for (int from = 0; from < c.size(); ++from)
      for (int to = 0; to < c.size(); ++to) {
        std::vector<int> note(3, from);
        if (from != to && c.rank() == from) c.send(std::span(note), to);
        if (from == to || c.rank() != to) continue;
        c.recv(std::span(note), from);
        if (note != std::vector<int>(3, from)) throw Wrong("wrong: the last messages");
      }
    std::vector<std::uint64_t> sums(static_cast<std::size_t>(c.size()));
    c.all_gather(std::span(&group->sums, 1), std::span(sums));
    for (const auto one : sums)
      if (one != group->sums && !spoilt_ && p_.fault == Fault::none) throw Wrong("wrong: ranks have different sums");
  }

  // Faults.

  void spoil(std::vector<Running>& running, std::vector<std::size_t>& order) {
    spoilt_ = true;
    const auto position = std::find(order.begin(), order.end(), p_.faulty_call);
    auto& call = running[p_.faulty_call].call;
    const int n = group_of(call).c.size();
    switch (p_.fault) {
      case Fault::other_op:
        call.op = call.op == Op::all_reduce ? Op::all_gather : Op::all_reduce;
        break;
      case Fault::other_count:
        call.count = call.count % 2 == 0 ? call.count + 1 : call.count / 2;
        break;
      case Fault::other_type:
        call.dtype = static_cast<DType>((static_cast<int>(call.dtype) + 1) % 13);
        call.scales.assign(call.scales.size(), 1.0);
        break;
      case Fault::other_root:
        call.root = (call.root + 1) % n;
        call.how = call.how == ReduceOp::sum ? ReduceOp::max : ReduceOp::sum;
        break;
      case Fault::leaves_out:
        order.erase(position);
        break;
      case Fault::swaps:
        std::iter_swap(position, position + 1);
        break;
      default:
        break;
    }
  }

  /// Makes the fault of the next call.
  std::thread go_wrong() {
    const auto in = std::chrono::microseconds(Draw(p_.seed).below(3000));
    auto& c = group_of(p_.batches[p_.faulty_batch].calls[p_.faulty_call]).c;
    if (p_.fault == Fault::throws) throw OwnError("an error of its own");
    if (p_.fault == Fault::aborts) c.abort("it has enough");
    if (p_.fault == Fault::aborts_meanwhile)
      return std::thread([&c, in] { std::this_thread::sleep_for(in), c.abort("it has enough"); });
    if (p_.fault == Fault::stops) {
      if (fork() == 0) {
        sleep(2);
        kill(getppid(), SIGCONT);
        _exit(0);
      }
      return std::thread([in] { std::this_thread::sleep_for(in), kill(getpid(), SIGSTOP); });
    }
    if (p_.fault == Fault::is_killed)
      return std::thread([in] { std::this_thread::sleep_for(in), kill(getpid(), SIGKILL); });
    return {};
  }

  const Program& p_;
  const ch::comm::Backend backend_;
  std::shared_ptr<std::byte> lent_;
  std::size_t lent_bytes_ = 0;
  std::vector<std::byte> memory_;
  std::array<Region, 2> regions_;
  Group all_;
  std::optional<Group> group_;
  bool spoilt_ = false;
};

}  // namespace test::calls
