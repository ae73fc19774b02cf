#pragma once
/// `QueuedEngine`: an engine that runs its calls one after another, blocking ones in the caller's thread, asynchronous
/// ones in a thread of its own.

#include <unistd.h>

#include <array>
#include <chorus/comm/engine/engine.hpp>
#include <chorus/comm/engine/failure.hpp>
#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/comm/engine/in_order.hpp>
#include <chorus/comm/engine/traced_call.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/core/trace.hpp>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm {

/// Numbers and records the calls, and keeps the first failure: later calls fail with it, too.
class QueuedEngine : public Engine {
 public:
  void now(const Call& call) final {
    const trace::Span waits(trace::Lane::wait, "wait", comm::name(call.op));
    calls_->now(call);
  }
  Work later(const Call& call) final { return {calls_, calls_->later(call)}; }
  void abort(std::string_view why) noexcept final {
    if (aborted_.set(why)) give_up(aborted_.why());
  }
  std::string_view name() const final { return name_; }
  std::chrono::nanoseconds busy() const final {
    const std::lock_guard lock(mutex_);
    return busy_;
  }
  std::string record() const final {
    const std::lock_guard lock(mutex_);
    return recorder_.lines();
  }

 protected:
  QueuedEngine(int me, int ranks, const std::vector<int>& names, std::string_view what, std::string axis = {})
      : Engine(me, ranks, names), name_(what), axis_(std::move(axis)), recorder_(me, {}, names) {}

  /// Executes one call, or throws the reason. One thread at a time.
  virtual void run(const Call& call, const Envelope& envelope) = 0;
  /// Tells the other ranks that this one aborts; soon after, the running call fails. From any thread.
  virtual void give_up(const std::string& why) noexcept = 0;
  /// Called after a failed call, in its thread.
  virtual void has_failed() noexcept {}

  /// Finishes all calls. The destructor of a class that overrides `run` must call it first.
  void stop() {
    if (getpid() == process_)
      calls_->stop();
    else
      new auto(calls_);  // a forked child has no such thread and would wait for ever
  }

  InOrder& calls() const { return *calls_; }
  /// The algorithm of the running call.
  void note(Algorithm algorithm) {
    const std::lock_guard lock(mutex_);
    recorder_.note(recorder_.newest(), algorithm);
  }
  bool aborted() const { return bool(aborted_); }
  /// Whether calls can only fail.
  bool broken() const { return aborted_ || !failure_.empty(); }

 private:
  /// Runs a call and returns its failure. Tells the other ranks this rank's first failure.
  Failure carry_out(const Call& call) {
    const Envelope envelope = begin(call);
    auto* const listener = trace::listening();
    const auto begun = listener != nullptr ? listener->now() : 0;
    std::string why;
    bool timed_out = false;
    if (!broken()) try {
        run(call, envelope);
        const std::lock_guard lock(mutex_);
        busy_ += recorder_.end(recorder_.newest());
        if (listener != nullptr) [[unlikely]]
          tell(*listener, call, begun, listener->now());
        return {};
      } catch (const std::exception& error) {
        why = error.what();
        timed_out = dynamic_cast<const TimeoutError*>(&error) || dynamic_cast<const LinkTimeout*>(&error);
      }
    const bool first = !broken();
    const auto failure = note_failure(why, timed_out);
    if (first) give_up(failure.what);
    has_failed();
    return failure;
  }

  /// Numbers and records a call.
  Envelope begin(const Call& call) {
    Envelope envelope{.op = call.op, .dtype = call.reduction.dtype, .count = call.count};
    const auto peer = static_cast<std::size_t>(call.peer);
    if (call.op == Op::message) {
      envelope.sequence = call.receives ? received_[peer]++ : sent_[peer]++;
    } else {
      envelope.detail =
          static_cast<std::uint8_t>(call.op == Op::broadcast ? call.peer : static_cast<int>(call.reduction.op));
      envelope.sequence = collectives_++;
    }
    const std::lock_guard lock(mutex_);
    recorder_.begin({.envelope = envelope,
                     .bucket = call.bucket,
                     .unit = call.unit,
                     .peer = call.peer,
                     .receives = call.receives,
                     .part_of = call.part_of});
    return envelope;
  }

  [[gnu::cold]] void tell(trace::Listener& listener, const Call& call, std::int64_t begun, std::int64_t ended) const {
    const TracedCall traced(recorder_.call(recorder_.newest()), call.traffic, call.count * call.reduction.element,
                            members);
    listener.span({rank_in_job(), call.lane(), "comm", traced.name, begun, ended, traced.args});
  }

  /// The failure of the newest call: `rank 1: all_reduce #7 (sum of 10 F32), gradient bucket 2: why`; if the group was
  /// aborted, the reason for that.
  [[gnu::cold]] Failure note_failure(std::string_view why, bool timed_out) {
    const std::lock_guard lock(mutex_);
    busy_ += recorder_.end(recorder_.newest(), true);
    const auto what =
        cat("rank ", rank_in_job(), ": ", recorder_.call(recorder_.newest()).text(),
            axis_.empty() ? "" : " on the axis ", axis_, ": ", aborted_ ? "aborted: " : "",
            aborted_           ? std::string_view(aborted_.why())
            : failure_.empty() ? why
                               : std::string_view(cat("this communicator has failed before: ", failure_)));
    if (failure_.empty()) {
      failure_ = what;
      recorder_.dump();
    }
    return {what, timed_out && !aborted_};
  }

  const int process_ = getpid();
  const std::string_view name_;
  const std::string axis_;
  AbortReason aborted_;
  std::string failure_;
  std::uint32_t collectives_ = 0;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // messages, per peer
  mutable std::mutex mutex_;
  FlightRecorder recorder_;
  std::chrono::nanoseconds busy_{0};
  std::shared_ptr<InOrder> calls_ =  // Works share it
      std::make_shared<InOrder>([this](const Call& call) { return carry_out(call); });
};

}  // namespace chorus::comm
