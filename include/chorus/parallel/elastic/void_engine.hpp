#pragma once
/// `VoidEngine`: calls of an epoch's communicator. When a rank is lost, they lose their effect: the program's step runs
/// out, and is not counted.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::elastic {

/// From the first CommError on, calls move nothing and return at once. Other exceptions pass.
class VoidEngine final : public comm::Engine, public std::enable_shared_from_this<VoidEngine> {
 public:
  explicit VoidEngine(comm::AnyCommunicator epoch)
      : Engine(epoch.rank(), epoch.size(), epoch.engine().members), epoch_(std::move(epoch)) {}

  /// Whether a call has failed, and why.
  bool lost() const { return !why_.empty(); }
  const std::string& why() const { return why_; }
  /// While it is away, calls are void, too, although the group is whole: the program is not where the others are.
  void set_away(bool away) { away_ = away; }
  bool is_away() const { return away_; }
  bool is_void() const { return away_ || lost(); }
  /// Others may have lost somebody while this rank made no call.
  void look() {
    if (lost()) return;
    if (const auto trouble = epoch_.engine().trouble(); !trouble.empty()) lose(trouble);
  }
  void lose(std::string_view why) noexcept {
    if (lost()) return;
    try {
      why_ = why.empty() ? "a call failed" : why;
    } catch (...) {
      why_ = "?";  // fits a string without memory of its own
    }
    epoch_.abort(why_);
  }

  void now(const comm::Call& call) override {
    if (!is_void()) {
      const std::vector<std::byte> own = small_input(call);
      try {
        return epoch_.engine().now(call);
      } catch (const CommError& error) {
        lose(error.what());
      }
      return fill(call, own.empty() ? nullptr : own.data());
    }
    fill(call, static_cast<const std::byte*>(call.in));
  }
  comm::Work later(const comm::Call& call) override {
    if (!is_void()) {
      try {
        return {std::make_shared<Later>(shared_from_this(), epoch_.engine().later(call)), 0};
      } catch (const CommError& error) {
        lose(error.what());
      }
    }
    fill(call, nullptr);
    return {};
  }
  void abort(std::string_view why) noexcept override { lose(why); }
  std::string_view name() const override { return epoch_.backend(); }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return epoch_.allocate(bytes); }
  std::chrono::nanoseconds busy() const override { return epoch_.busy(); }
  comm::Clock::time_point time() const override { return epoch_.time(); }
  std::string record() const override { return epoch_.flight_record(); }
  comm::Algorithm all_reduce() const override { return epoch_.engine().all_reduce(); }
  std::string trouble() override { return is_void() ? std::string() : epoch_.engine().trouble(); }

 private:
  /// Numbers that may be counts or flags, on which the program's way depends.
  static constexpr std::size_t few_bytes = 64 << 10;

  struct Later final : comm::Progress {
    Later(std::shared_ptr<VoidEngine> owner, comm::Work started) : engine(std::move(owner)), work(std::move(started)) {}
    void wait(std::uint64_t) override {
      try {
        work.wait();
      } catch (const CommError& error) {
        engine->lose(error.what());
      }
    }
    bool done(std::uint64_t) override { return work.done(); }
    std::shared_ptr<VoidEngine> engine;
    comm::Work work;
  };

  std::size_t parts_in(const comm::Call& call) const {
    return call.op == comm::Op::reduce_scatter ? static_cast<std::size_t>(size) : 1;
  }
  /// A copy of the input, which the call may overwrite before it fails.
  std::vector<std::byte> small_input(const comm::Call& call) const {
    const auto bytes = call.count * call.reduction.element * parts_in(call);
    if (call.in == nullptr || bytes > few_bytes) return {};
    const auto* const from = static_cast<const std::byte*>(call.in);
    return {from, from + bytes};
  }
  /// The result of a void call: gathered numbers and the largest or smallest are as if all ranks had `own`, this rank's
  /// input, so that what ranks compare is equal; sums are 0, as of a batch without samples. Zeros if `own` is null.
  void fill(const comm::Call& call, const std::byte* own) const {
    if (call.out == nullptr || call.count == 0) return;
    auto* const out = static_cast<std::byte*>(call.out);
    const auto bytes = call.count * call.reduction.element, ranks = static_cast<std::size_t>(size);
    const bool gathers = call.op == comm::Op::all_gather;
    const bool sums = (call.op == comm::Op::all_reduce || call.op == comm::Op::reduce_scatter) &&
                      call.reduction.op == comm::ReduceOp::sum;
    if (own == nullptr || sums || bytes * parts_in(call) > few_bytes) {
      std::memset(out, 0, gathers ? bytes * ranks : bytes);
    } else if (gathers) {
      const std::vector<std::byte> mine(own, own + bytes);  // `own` may be its place in `out`
      for (std::size_t r = 0; r < ranks; ++r) std::memcpy(out + r * bytes, mine.data(), bytes);
    } else {
      if (call.op == comm::Op::reduce_scatter) own += static_cast<std::size_t>(rank) * bytes;
      if (out != own) std::memcpy(out, own, bytes);
    }
  }

  comm::AnyCommunicator epoch_;
  std::string why_;
  bool away_ = false;
};

}  // namespace chorus::elastic
