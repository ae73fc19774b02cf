#pragma once
/// `CallBook`: what an engine knows of its calls: their numbers, the newest of them, the first failure, an abort.

#include <algorithm>
#include <array>
#include <chorus/comm/abort_reason.hpp>
#include <chorus/comm/envelope.hpp>
#include <chorus/comm/in_order.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/environment.hpp>
#include <cstdio>
#include <mutex>

namespace chorus::inline CHORUS_ABI::comm {

/// `begin` and `end` are called by one thread at a time; the rest from any.
class CallBook {
 public:
  explicit CallBook(int rank) : rank_(rank) {}

  /// Numbers a call and writes it down.
  Envelope begin(const Call& call) {
    Envelope envelope{.op = call.op, .dtype = call.reduction.dtype, .count = call.count};
    const auto peer = static_cast<std::size_t>(call.peer);
    if (call.op == Op::message) {
      envelope.sequence = call.receives ? received_[peer]++ : sent_[peer]++;
    } else {
      envelope.detail = static_cast<std::uint8_t>(call.op == Op::broadcast ? call.peer
                                                                           : static_cast<int>(call.reduction.op));
      envelope.sequence = collectives_++;
    }
    const std::lock_guard lock(mutex_);
    entries_[calls_++ % entries_.size()] = {envelope, call.peer, call.receives, call.bucket, Entry::runs, Clock::now()};
    return envelope;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    close(Entry::done);
  }

  /// How the newest call failed: `rank 1: all_reduce #7 (sum of 10 F32), gradient bucket 2: why`; where the group was
  /// aborted, that is why. The first failure is the one that later calls fail with, too.
  [[gnu::cold]] Failure fail(std::string_view why, bool timed_out = false) {
    const std::lock_guard lock(mutex_);
    close(Entry::failed);
    const auto what =
        cat("rank ", rank_, ": ", text(newest()), ": ", aborted_ ? "aborted: " : "",
            aborted_           ? std::string_view(aborted_.why())
            : failure_.empty() ? why
                               : std::string_view(cat("this communicator has failed before: ", failure_)));
    if (failure_.empty()) {
      failure_ = what;
      dump();
    }
    return {what, timed_out && !aborted_};
  }

  /// Whether calls can only fail.
  bool broken() const { return aborted_ || !failure_.empty(); }
  bool abort(std::string_view why) noexcept { return aborted_.set(why); }
  const AbortReason& aborted() const { return aborted_; }

  std::string record() const {
    const std::lock_guard lock(mutex_);
    return lines();
  }
  /// How long calls have run in all.
  std::chrono::nanoseconds busy() const {
    const std::lock_guard lock(mutex_);
    return busy_;
  }

 private:
  struct Entry {
    Envelope envelope;
    int peer = 0;
    bool receives = false;
    int bucket = -1;
    enum { runs, done, failed } state = runs;
    Clock::time_point begun{}, ended{};
  };

  const Entry& newest() const { return entries_[(calls_ - 1) % entries_.size()]; }
  void close(decltype(Entry::state) state) {
    auto& entry = entries_[(calls_ - 1) % entries_.size()];
    entry.state = state;
    entry.ended = Clock::now();
    busy_ += entry.ended - entry.begun;
  }

  static std::string text(const Entry& entry) {
    const auto direction = entry.envelope.op != Op::message ? "" : entry.receives ? "receiving " : "sending ";
    auto out = cat(direction, entry.envelope);
    if (entry.bucket >= 0) out += cat(", gradient bucket ", entry.bucket);
    return out;
  }

  [[gnu::cold]] std::string lines() const {
    const auto microseconds = [](Clock::duration time) {
      return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
    };
    std::string out;
    for (auto i = calls_ - std::min<std::uint64_t>(calls_, entries_.size()); i < calls_; ++i) {
      const auto& entry = entries_[i % entries_.size()];
      out += cat("rank ", rank_, ": call ", i, ": ", text(entry));
      if (entry.envelope.op == Op::message) out += cat(entry.receives ? " from rank " : " to rank ", entry.peer);
      out += cat(", at ", microseconds(entry.begun - born_), " us");
      if (entry.state == Entry::runs) {
        out += cat(", under way for ", microseconds(Clock::now() - entry.begun), " us\n");
      } else {
        out += cat(entry.state == Entry::done ? ", took " : ", failed after ", microseconds(entry.ended - entry.begun),
                   " us\n");
      }
    }
    return out;
  }

  [[gnu::cold]] void dump() const {
    const char* where = chorus::detail::env("CHORUS_FLIGHT_RECORDER");
    if (where == nullptr) return;
    const auto text = lines();
    const bool to_stderr = std::string_view(where) == "stderr";
    std::FILE* const file = to_stderr ? stderr : std::fopen(cat(where, ".rank", rank_).c_str(), "w");
    if (file == nullptr) return;
    std::fwrite(text.data(), 1, text.size(), file);
    to_stderr ? std::fflush(file) : std::fclose(file);
  }

  const int rank_;
  const Clock::time_point born_ = Clock::now();
  AbortReason aborted_;
  std::string failure_;
  std::uint32_t collectives_ = 0;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // messages, per peer
  mutable std::mutex mutex_;
  std::array<Entry, 64> entries_;  // the newest calls, in turn
  std::uint64_t calls_ = 0;
  std::chrono::nanoseconds busy_{0};
};

}  // namespace chorus::inline CHORUS_ABI::comm
