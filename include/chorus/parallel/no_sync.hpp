#pragma once
/// The scope in which a distributed policy accumulates gradients locally.

#include <chorus/core/config.hpp>
#include <utility>

namespace chorus {

/// Made by a policy's `no_sync()`.
class NoSync {
 public:
  /// For one process: gradients accumulate anyway.
  NoSync() = default;
  explicit NoSync(bool& sync) : sync_(&sync), before_(std::exchange(sync, false)) {}
  ~NoSync() {
    if (sync_ != nullptr) *sync_ = before_;
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  bool* sync_ = nullptr;
  bool before_ = true;
};

}  // namespace chorus
