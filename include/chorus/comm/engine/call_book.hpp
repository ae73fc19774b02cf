#pragma once
/// `CallBook`: what an engine knows of its calls: their numbers, the newest of them, the first failure, an abort.

#include <array>
#include <chorus/comm/engine/abort_reason.hpp>
#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/comm/engine/in_order.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::comm {

/// `run` is called by one thread at a time; the rest from any.
class CallBook {
 public:
  /// `members`: see World.
  explicit CallBook(int rank, const std::vector<int>& members = {}) : rank_(rank), recorder_(rank, {}, members) {}

  /// Runs one call, `body(envelope)`. Returns how it failed: by what `body` throws, or because calls can only fail.
  /// The first failure of this rank's own is told to the others, by `tell(text)`.
  template <class Body, class Tell>
  Failure run(const Call& call, const Body& body, const Tell& tell) {
    const Envelope envelope = begin(call);
    std::string why;
    bool timed_out = false;
    if (!broken()) try {
        body(envelope);
        end();
        return {};
      } catch (const LinkTimeout& error) {
        why = error.what(), timed_out = true;
      } catch (const TimeoutError& error) {
        why = error.what(), timed_out = true;
      } catch (const std::exception& error) {
        why = error.what();
      }
    const bool first = !broken();
    const auto failure = fail(why, timed_out);
    if (first) tell(failure.what);
    return failure;
  }

  /// Which algorithm serves the newest call.
  void note(Algorithm algorithm) {
    const std::lock_guard lock(mutex_);
    recorder_.note(recorder_.newest(), algorithm);
  }
  /// Whether calls can only fail.
  bool broken() const { return aborted_ || !failure_.empty(); }
  bool abort(std::string_view why) noexcept { return aborted_.set(why); }
  const AbortReason& aborted() const { return aborted_; }

  std::string record() const {
    const std::lock_guard lock(mutex_);
    return recorder_.lines();
  }
  /// How long calls have run in all.
  std::chrono::nanoseconds busy() const {
    const std::lock_guard lock(mutex_);
    return busy_;
  }

 private:
  /// Numbers a call and writes it down.
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
    recorder_.begin({.envelope = envelope, .bucket = call.bucket, .peer = call.peer, .receives = call.receives});
    return envelope;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    busy_ += recorder_.end(recorder_.newest());
  }

  /// How the newest call failed: `rank 1: all_reduce #7 (sum of 10 F32), gradient bucket 2: why`; where the group was
  /// aborted, that is why. The first failure is the one that later calls fail with, too.
  [[gnu::cold]] Failure fail(std::string_view why, bool timed_out = false) {
    const std::lock_guard lock(mutex_);
    busy_ += recorder_.end(recorder_.newest(), true);
    const auto what =
        cat("rank ", rank_, ": ", recorder_.call(recorder_.newest()).text(), ": ", aborted_ ? "aborted: " : "",
            aborted_           ? std::string_view(aborted_.why())
            : failure_.empty() ? why
                               : std::string_view(cat("this communicator has failed before: ", failure_)));
    if (failure_.empty()) {
      failure_ = what;
      recorder_.dump();
    }
    return {what, timed_out && !aborted_};
  }

  const int rank_;
  AbortReason aborted_;
  std::string failure_;
  std::uint32_t collectives_ = 0;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // messages, per peer
  mutable std::mutex mutex_;
  FlightRecorder recorder_;
  std::chrono::nanoseconds busy_{0};
};

}  // namespace chorus::comm
