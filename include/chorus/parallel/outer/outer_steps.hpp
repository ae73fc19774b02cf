#pragma once
/// The part that outer optimizers of LocalSgd share: differences of parameters, their messages, and the outer step.

#include <algorithm>
#include <array>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/optim/state_tensor.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/tensor/memory.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

/// The numbers of an outer optimizer: see Nesterov and Streaming.
struct OuterSchedule {
  double lr, momentum;
  int overlap = 0;
  double alpha = 0;
};

namespace detail {

/// Differences travel as they are, in an all-reduce: each of n ranks sends 2 (n - 1) / n of their bytes.
struct WholeNumbers {
  static constexpr int parts = 1;

  /// Starts data := the sum of weight * data over the ranks. Each call of the returned function waits for a part of the
  /// exchange and starts the next one; it returns whether that was the last. All ranks call it as often.
  template <class T, Device D, class Communicator>
  static std::function<bool()> start(D, std::span<T> data, double weight, Communicator& communicator) {
    const auto work = std::make_shared<comm::Work>(communicator.all_reduce_async(
        data, comm::ReduceOp::sum, {.scale = weight, .traffic = trace::Traffic::parameters}));
    return [work] { return work->wait(), true; };
  }
};

/// The steps of one rank under an outer optimizer. Parameters lie in `Outer::fragments` fragments, cut between
/// parameters, of about equal bytes. In turn, each fragment x has its moment:
///
///   delta = theta - x                           theta: the outer parameters, the same on all ranks
///   delta = sum of weight * delta over ranks    while the next `overlap` steps are made
///   v = momentum * v + delta
///   theta -= lr * (delta + momentum * v)        Nesterov's momentum as in PyTorch's SGD
///   x = alpha * x + (1 - alpha) * theta
///
/// Only parameters that a rank may have stepped since their last moment take part. If no rank has seen samples since,
/// theta becomes the average. Where LocalSteps keeps only which parameters have been stepped, this keeps theta and v.
template <Device D, class Communicator, class Outer>
class OuterSteps {
  using Flat = nn::FlatParameters<D>;
  using Message = typename Outer::Message;
  static constexpr auto count = static_cast<std::size_t>(Outer::fragments);
  static_assert(Outer::fragments >= 1, "LocalSgd: expected at least 1 fragment");

 public:
  static constexpr int fragments = Outer::fragments;
  int steps = 0;  ///< since the last moment

  /// Throws UsageError for options out of range, a period that the fragments don't divide, and fewer parameters than
  /// fragments.
  OuterSteps(const Outer& outer, const Flat& flat, Communicator& communicator, int period)
      : schedule_(outer.schedule()), flat_(flat), communicator_(communicator) {
    const auto& [lr, momentum, overlap, alpha] = schedule_;
    check<UsageError>(std::isfinite(lr) && lr > 0, "LocalSgd: expected an outer lr above 0, got ", lr);
    check<UsageError>(momentum >= 0 && momentum < 1, "LocalSgd: expected an outer momentum in [0, 1), got ", momentum);
    check<UsageError>(alpha >= 0 && alpha < 1, "LocalSgd: expected an alpha in [0, 1), got ", alpha);
    check<UsageError>(period % fragments == 0, "LocalSgd: expected a period that ", fragments,
                      " fragments divide, got ", period, " steps");
    check<UsageError>(overlap >= 0 && overlap < period / fragments, "LocalSgd: expected an overlap of 0 to ",
                      period / fragments - 1, " steps, which ends before the next fragment's message, got ", overlap);
    cut();
  }

  /// For the comparison of all ranks' options.
  std::string text() const {
    return cat(", outer lr ", schedule_.lr, ", momentum ", schedule_.momentum, ", fragments ", fragments, ", overlap ",
               schedule_.overlap, ", alpha ", schedule_.alpha);
  }

  /// A forward pass begins. A message whose time has come is applied; if a fragment is `due`, `moment()` sends it.
  /// Records that all parameters that want gradients may be stepped.
  template <class Shared, class Moment>
  void begin_pass(const Flat&, const Shared&, bool due, const Moment& moment) {
    if (Message::parts > 1 && on_its_way_ && 2 * steps >= schedule_.overlap && !std::exchange(second_, true))
      for (auto& finish : finish_) finish();
    if (on_its_way_ && steps >= schedule_.overlap) apply(schedule_.alpha);
    if (due) moment();
    remember();
    for (std::size_t i = 0; i < stepped_.size(); ++i)
      if (flat_.entries()[i].parameter().wants_grad()) stepped_[i] = 1;
  }

  /// A moment begins: an earlier message is applied first.
  void arrive() {
    if (on_its_way_) apply(schedule_.alpha);
    remember();
  }
  /// The samples since the last moment of the fragment that is due; `samples`: since the last one of any. NaN if that
  /// is.
  double seen(double samples) {
    if (std::isnan(samples)) return samples;
    seen_[next_] = samples;
    double sum = 0;
    for (const double each : seen_) sum += each;
    return sum;
  }
  /// The facts of a moment.
  struct Moment {
    bool samples;   ///< a rank has seen some since the fragment's last moment
    bool now;       ///< nothing overlaps
    bool together;  ///< all ranks shall have theta afterwards
  };
  /// The moment of the fragment that is due: sends its differences, times `weight`; the weights sum to 1. If a call
  /// fails, parameters are theta.
  void send(double weight, const Moment& moment) {
    runs_ = runs(firsts_[next_], firsts_[next_ + 1], [this](std::size_t i) { return stepped_[i] != 0; });
    std::fill(stepped_.begin() + at(firsts_[next_]), stepped_.begin() + at(firsts_[next_ + 1]), std::uint8_t{0});
    next_ = (next_ + 1) % count;
    if (runs_.empty()) return;
    allocate(velocity_, schedule_.momentum > 0, trace::Memory::optimizer);
    in_place_ = schedule_.overlap == 0 && schedule_.alpha == 0;
    if (!in_place_ && message_.bytes() < bytes_of(runs_)) {
      const MemoryScope scope(trace::Memory::buckets);
      message_ = Storage<D>(device(), bytes_of(runs_));
    }
    by_samples_ = moment.samples;
    on_its_way_ = true;
    second_ = false;
    try {
      for_runs([&]<class T>(const Run& run, T* x, T* theta, T*, T* delta) {
        const auto n = static_cast<Index>(run.count);
        if (delta != x) copy_bytes(device(), delta, device(), x, run.count * sizeof(T));
        kernels::scale(device(), n, T{-1}, delta);
        kernels::axpy(device(), n, T{1}, theta, delta);
        finish_.push_back(Message::start(device(), std::span<T>(delta, run.count), weight, communicator_));
      });
      if (moment.now || schedule_.overlap == 0) apply(moment.together ? 0 : schedule_.alpha);
    } catch (...) {
      finish_.clear();  // waits for what uses the memory
      on_its_way_ = false;
      if (in_place_) for_runs([&](const Run& run, auto* x, auto* theta, auto*, auto*) { copy(x, theta, run.count); });
      throw;
    }
  }
  /// All ranks have theta, and the program may write parameters: they are the next theta.
  void come_together() { remembers_ = false; }

  /// For checkpoints and ranks that have run out of batches: see LocalSteps.
  std::vector<std::string> names(const Flat&) const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < stepped_.size(); ++i)
      if (stepped_[i] != 0) all.push_back(flat_.entries()[i].named.name);
    return all;
  }
  void set(const Flat&, std::span<const std::string> names) {
    for (std::size_t i = 0; i < stepped_.size(); ++i)
      stepped_[i] = std::find(names.begin(), names.end(), flat_.entries()[i].named.name) != names.end() ? 1 : 0;
  }
  void unite(const Flat&, Communicator& communicator) {
    communicator.all_reduce(std::span(stepped_), comm::ReduceOp::max, {});
  }

  /// Numbers for a checkpoint: the fragment that is due, flags, and samples by moment.
  static constexpr std::size_t kept_numbers = 2 + count;
  void kept(std::span<double> numbers) const {
    numbers[0] = static_cast<double>(next_);
    numbers[1] = (remembers_ ? 1 : 0) + (on_its_way_ ? 2 : 0) + (by_samples_ ? 4 : 0);
    std::copy(seen_.begin(), seen_.end(), numbers.begin() + 2);
  }
  static bool can_keep(std::span<const double> numbers) {
    const auto whole_below = [](double x, double end) { return x >= 0 && x < end && x == std::floor(x); };
    return whole_below(numbers[0], static_cast<double>(count)) && whole_below(numbers[1], 8) &&
           std::all_of(numbers.begin() + 2, numbers.end(), [](double x) { return x >= 0 && x < 0x1p53; });
  }
  /// After `set_state`.
  void keep(std::span<const double> numbers) {
    const auto flags = static_cast<unsigned>(numbers[1]);
    next_ = static_cast<std::size_t>(numbers[0]);
    remembers_ = (flags & 1U) != 0 && has_theta_;
    on_its_way_ = (flags & 2U) != 0 && remembers_ && !runs_.empty();
    by_samples_ = (flags & 4U) != 0;
    std::copy(numbers.begin() + 2, numbers.end(), seen_.begin());
  }
  /// Tensors for a checkpoint, the same on all ranks: `outer.NAME` (theta), `velocity.NAME` (v) and, of the fragment on
  /// its way, `message.NAME`, whose sum all ranks wait for here. `full`: names and shapes of all that there may be.
  std::vector<optim::StateTensor> state(bool full) {
    if (!full) complete();
    std::vector<optim::StateTensor> all;
    const auto& entries = flat_.entries();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto& parameter = entries[i].parameter();
      const auto extents = parameter.extents();
      const auto add = [&](std::string_view kind, void* data) {
        if (full || data != nullptr)
          all.push_back(
              {cat(kind, '.', entries[i].named.name), parameter.dtype(), {extents.begin(), extents.end()}, data});
      };
      add("outer", remembers_ ? place(theta_, entries[i]) : nullptr);
      add("velocity", place(velocity_, entries[i]));
      add("message", on_its_way_ ? in_message(entries[i]) : nullptr);
    }
    return all;
  }
  /// Takes such tensors, which are in the host's memory.
  void set_state(const std::vector<optim::StateTensor>& tensors) {
    complete();
    on_its_way_ = in_place_ = false;
    allocate(theta_, true, trace::Memory::optimizer);
    for (const auto& group : velocity_) zero_bytes(device(), group.data(), group.bytes());
    const auto& entries = flat_.entries();
    const auto find = [&](std::string_view kind, std::size_t i) -> const optim::StateTensor* {
      for (const auto& tensor : tensors)
        if (tensor.name == cat(kind, '.', entries[i].named.name)) return &tensor;
      return nullptr;
    };
    const auto take = [&](std::string_view kind, std::size_t i, void* to) {
      const auto* const tensor = find(kind, i);
      if (tensor != nullptr && to != nullptr)
        copy_bytes(device(), to, Cpu{}, tensor->data, entries[i].parameter().size_bytes());
      return tensor != nullptr;
    };
    runs_ = runs(0, entries.size(), [&](std::size_t i) { return find("message", i) != nullptr; });
    if (!runs_.empty()) message_ = Storage<D>(device(), bytes_of(runs_));
    has_theta_ = true;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      has_theta_ = take("outer", i, place(theta_, entries[i])) && has_theta_;
      if (find("velocity", i) != nullptr) allocate(velocity_, schedule_.momentum > 0, trace::Memory::optimizer);
      take("velocity", i, place(velocity_, entries[i]));
      take("message", i, in_message(entries[i]));
    }
  }

 private:
  using Entry = typename Flat::Entry;
  // Numbers of a group that lie together; `place`: their first byte in the message.
  struct Run {
    std::size_t group, begin, count, place;
  };

  static std::ptrdiff_t at(std::size_t i) { return static_cast<std::ptrdiff_t>(i); }
  D device() const { return flat_.entries().front().parameter().where(); }
  std::size_t bytes_of(const Entry& entry) const { return entry.count * size_of(flat_.groups()[entry.group].dtype); }
  std::size_t bytes_of(const std::vector<Run>& runs) const {
    return runs.empty() ? 0 : runs.back().place + runs.back().count * size_of(flat_.groups()[runs.back().group].dtype);
  }

  void cut() {
    const auto& entries = flat_.entries();
    check<UsageError>(entries.size() >= count, "LocalSgd: expected at most a fragment for each of ", entries.size(),
                      " parameters, got ", count);
    std::size_t all = 0, before = 0, i = 0;
    for (const auto& entry : entries) all += bytes_of(entry);
    for (std::size_t fragment = 1; fragment < count; ++fragment) {
      do before += bytes_of(entries[i++]);  // up to the cut that is nearest
      while (i < entries.size() - (count - fragment) &&
             (2 * before + bytes_of(entries[i])) * count <= 2 * all * fragment);
      firsts_[fragment] = i;
    }
    firsts_[count] = entries.size();
    stepped_.resize(entries.size());
  }

  template <class Counts>
  std::vector<Run> runs(std::size_t first, std::size_t last, const Counts& counts) const {
    constexpr std::size_t alignment = 64;
    std::vector<Run> all;
    for (std::size_t i = first; i < last; ++i) {
      const auto& entry = flat_.entries()[i];
      if (!counts(i)) continue;
      if (!all.empty() && all.back().group == entry.group && all.back().begin + all.back().count == entry.begin)
        all.back().count += entry.count;
      else
        all.push_back({entry.group, entry.begin, entry.count, (bytes_of(all) + alignment - 1) / alignment * alignment});
    }
    return all;
  }
  // Calls `f(run, x, theta, v, delta)`; v is null without momentum.
  template <class F>
  void for_runs(const F& f) {
    for (const Run& run : runs_) {
      const auto& group = flat_.groups()[run.group];
      ddp::with_type("LocalSgd: parameters of an outer optimizer", group.dtype, group.value(run.begin),
                     [&]<class T>(T* x) {
                       const auto in = [&](const std::vector<Storage<D>>& all) {
                         return all.empty() ? nullptr : static_cast<T*>(all[run.group].data()) + run.begin;
                       };
                       auto* const message = static_cast<std::byte*>(message_.data());
                       f(run, x, in(theta_), in(velocity_),
                         in_place_ ? x : static_cast<T*>(static_cast<void*>(message + run.place)));
                     });
      for (const auto& entry : flat_.entries())
        if (contains(run, entry)) entry.parameter().touch();
    }
  }
  static bool contains(const Run& run, const Entry& entry) {
    return entry.group == run.group && entry.begin >= run.begin && entry.begin < run.begin + run.count;
  }
  template <class T>
  void copy(T* to, const T* from, std::size_t numbers) const {
    copy_bytes(device(), to, device(), from, numbers * sizeof(T));
  }
  void* place(const std::vector<Storage<D>>& all, const Entry& entry) const {
    if (all.empty()) return nullptr;
    return static_cast<std::byte*>(all[entry.group].data()) +
           entry.begin * size_of(flat_.groups()[entry.group].dtype);
  }
  void* in_message(const Entry& entry) const {
    for (const Run& run : runs_)
      if (contains(run, entry))
        return static_cast<std::byte*>(message_.data()) + run.place +
               (entry.begin - run.begin) * size_of(flat_.groups()[entry.group].dtype);
    return nullptr;
  }
  void allocate(std::vector<Storage<D>>& all, bool wanted, trace::Memory kind) const {
    if (!wanted || !all.empty()) return;
    const MemoryScope scope(kind);
    for (const auto& group : flat_.groups()) {
      all.emplace_back(device(), group.count * size_of(group.dtype));
      zero_bytes(device(), all.back().data(), all.back().bytes());
    }
  }

  // Theta becomes the parameters, unless it is known. Ranks that went apart without theta, in another policy's
  // checkpoint, take their average first.
  void remember() {
    if (std::exchange(remembers_, true)) return;
    allocate(theta_, true, trace::Memory::optimizer);
    runs_ = runs(0, stepped_.size(), [this](std::size_t i) { return stepped_[i] != 0; });
    for (const Run& run : runs_) {
      const auto& group = flat_.groups()[run.group];
      ddp::with_type("LocalSgd: parameters", group.dtype, group.value(run.begin), [&]<class T>(T* x) {
        communicator_.all_reduce(std::span<T>(x, run.count), comm::ReduceOp::sum,
                                 {.scale = 1.0 / communicator_.size(), .traffic = trace::Traffic::parameters});
      });
      for (const auto& entry : flat_.entries())
        if (contains(run, entry)) entry.parameter().touch();
    }
    std::fill(stepped_.begin(), stepped_.end(), std::uint8_t{0});
    for (std::size_t g = 0; g < theta_.size(); ++g)
      copy_bytes(device(), theta_[g].data(), device(), flat_.groups()[g].value(0),
                 flat_.groups()[g].count * size_of(flat_.groups()[g].dtype));
  }

  // Waits until the message has its sum.
  void complete() {
    for (auto& finish : std::exchange(finish_, {}))
      while (!finish()) {
      }
  }
  void apply(double alpha) {
    complete();
    const double lr = by_samples_ ? schedule_.lr : 1, momentum = by_samples_ ? schedule_.momentum : 0;
    for_runs([&]<class T>(const Run& run, T* x, T* theta, T* v, T* delta) {
      const auto n = static_cast<Index>(run.count);
      if (momentum > 0) {
        kernels::scale(device(), n, static_cast<T>(momentum), v);
        kernels::axpy(device(), n, T{1}, delta, v);
        kernels::axpy(device(), n, static_cast<T>(momentum), v, delta);
      }
      kernels::axpy(device(), n, static_cast<T>(-lr), delta, theta);
      if (alpha == 0) return copy(x, theta, run.count);
      kernels::scale(device(), n, static_cast<T>(alpha), x);
      kernels::axpy(device(), n, static_cast<T>(1 - alpha), theta, x);
    });
    on_its_way_ = false;
    if (alpha == 0) return;
    for (std::size_t i = 0; i < stepped_.size(); ++i)  // ranks are still apart
      for (const Run& run : runs_)
        if (contains(run, flat_.entries()[i])) stepped_[i] = 1;
  }

  const OuterSchedule schedule_;
  const Flat& flat_;
  Communicator& communicator_;
  std::array<std::size_t, count + 1> firsts_{};  // the first entry of each fragment, and the number of all
  std::array<double, count> seen_{};             // samples up to each fragment's moment, since the one before
  std::vector<std::uint8_t> stepped_;            // by entry: since its last moment
  std::vector<Storage<D>> theta_, velocity_;     // by group
  Storage<D> message_;                           // unless in place
  bool in_place_ = false;                        // differences lie where the parameters do
  std::vector<Run> runs_;                        // of the fragment that was sent last
  std::size_t next_ = 0;                         // the fragment that is due
  bool remembers_ = false;                       // theta is set
  bool has_theta_ = false;                       // the last checkpoint had all of it
  bool on_its_way_ = false;                      // a message has been sent and not applied
  bool second_ = false;                          // its second part has been started, if it has any
  bool by_samples_ = true;                       // a rank had seen samples
  std::vector<std::function<bool()>> finish_;    // last: it waits for what uses the memory
};

}  // namespace detail
}  // namespace chorus
