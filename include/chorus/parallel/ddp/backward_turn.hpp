#pragma once
/// What is sent over one communicator in a backward pass, by several nets or by operators, too: in which order.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <memory>
#include <vector>

namespace chorus::detail {

/// One net's part in the backward passes of this thread. As long as buckets fill at the same time on all ranks, so do
/// those of several nets. Where ranks may use different parameters of one of them, nets would send in another order on
/// each rank, and mistake each other's gradients for their own: there the one that begins later sends at its end, which
/// is behind the first one's. So does a net whose operators have collectives of their own.
class BackwardTurn {
 public:
  BackwardTurn() = default;
  BackwardTurn(const BackwardTurn&) = delete;
  BackwardTurn& operator=(const BackwardTurn&) = delete;
  ~BackwardTurn() { end(); }

  /// `varies`: what this net uses may differ from rank to rank. `operators_send`: its operators, in this pass.
  void begin(const void* communicator, bool varies, bool operators_send) {
    end();
    auto& others = under_way();
    const auto goes_first = [&](const std::weak_ptr<const Pass>& known) {
      const auto other = known.lock();
      return other && other->communicator == communicator && (varies || other->varies);
    };
    waits_ = (varies && operators_send) || std::any_of(others.begin(), others.end(), goes_first);
    *own_ = {communicator, varies};
    others.push_back(own_);
  }
  void end() {
    std::erase_if(under_way(), [this](const auto& known) { return known.expired() || known.lock() == own_; });
  }
  /// Whether buckets may not leave before the end.
  bool waits() const { return waits_; }

 private:
  struct Pass {
    const void* communicator = nullptr;
    bool varies = false;
  };
  // A net whose pass broke off may be destroyed by another thread.
  static std::vector<std::weak_ptr<const Pass>>& under_way() {
    thread_local std::vector<std::weak_ptr<const Pass>> all;
    return all;
  }

  const std::shared_ptr<Pass> own_ = std::make_shared<Pass>();
  bool waits_ = false;
};

}  // namespace chorus::detail
