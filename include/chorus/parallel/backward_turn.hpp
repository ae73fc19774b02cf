#pragma once
/// What is sent over one communicator in a backward pass, by several nets or by operators, too: in which order.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

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
    waits_ = (varies && operators_send) || std::any_of(others.begin(), others.end(), [&](const BackwardTurn* other) {
      return other->communicator_ == communicator && (varies || other->varies_);
    });
    communicator_ = communicator;
    varies_ = varies;
    others.push_back(this);
  }
  void end() {
    std::erase_if(under_way(), [this](const BackwardTurn* one) { return one == this; });
  }
  /// Whether buckets may not leave before the end.
  bool waits() const { return waits_; }

 private:
  static std::vector<const BackwardTurn*>& under_way() {
    thread_local std::vector<const BackwardTurn*> all;
    return all;
  }

  const void* communicator_ = nullptr;
  bool varies_ = false, waits_ = false;
};

}  // namespace chorus::inline CHORUS_ABI::detail
