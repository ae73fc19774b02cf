#pragma once
/// `AbortReason`: why a communicator was given up, set once and read from any thread.

#include <atomic>
#include <string>
#include <string_view>

#include <chorus/core/config.hpp>

namespace chorus::comm {

class AbortReason {
 public:
  /// Keeps the first reason; false for later ones.
  bool set(std::string_view why) noexcept {
    int none = 0;
    if (!state_.compare_exchange_strong(none, writing)) return false;
    try {
      why_ = why;
    } catch (...) {
      // Without memory there is no reason, but the abort stands.
    }
    state_.store(written);
    return true;
  }
  explicit operator bool() const { return state_.load(std::memory_order_acquire) == written; }
  /// Of a reason that is set.
  const std::string& why() const { return why_; }

 private:
  enum { writing = 1, written = 2 };
  std::atomic<int> state_{0};
  std::string why_;
};

}  // namespace chorus::comm
