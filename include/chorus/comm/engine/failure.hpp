#pragma once
/// How a communicator fails: `Failure`, and `AbortReason`.

#include <atomic>
#include <chorus/core/error.hpp>
#include <string>
#include <string_view>

namespace chorus::comm {

/// What this thread's last call has failed with. A rank with several groups tells it to those that have not failed.
inline thread_local std::string last_failure;
/// What a rank whose program unwinds tells the others: its last failure, or that there was none. It allocates nothing.
inline std::string_view why_it_unwinds() {
  return last_failure.empty() ? "it threw an exception in the middle of a step" : std::string_view(last_failure);
}

/// An error for several threads, each of which throws its own copy. Empty: no error.
struct Failure {
  std::string what;
  bool timed_out = false;

  explicit operator bool() const { return !what.empty(); }
  [[noreturn]] void raise() const {
    last_failure = what;
    if (timed_out) throw TimeoutError(what);
    throw CommError(what);
  }
};

/// The reason for aborting a communicator, set once and read from any thread.
class AbortReason {
 public:
  /// Keeps the first reason; false for later ones.
  bool set(std::string_view why) noexcept {
    int none = 0;
    if (!state_.compare_exchange_strong(none, writing)) return false;
    try {
      why_ = why;
    } catch (...) {
      // Without memory the reason is lost, but the abort holds.
    }
    state_.store(written);
    return true;
  }
  explicit operator bool() const { return state_.load(std::memory_order_acquire) == written; }
  /// The reason; requires that it is set.
  const std::string& why() const { return why_; }

 private:
  enum { writing = 1, written = 2 };
  std::atomic<int> state_{0};
  std::string why_;
};

}  // namespace chorus::comm
