#pragma once
/// Several nets whose backward passes or operators communicate at the same time over one communicator.

#include <algorithm>
#include <chorus/parallel/ddp/extension.hpp>
#include <memory>
#include <vector>

namespace chorus::ddp {

/// A net's turn among the backward passes of this thread. If buckets fill at the same time on all ranks, so do those of
/// several nets, and all ranks send in one order. If ranks may use different parameters of a net, each rank would send
/// in another order and mix up the nets' gradients: then the net that begins later sends at its end, which comes after
/// the first net's. A net whose operators have collectives does so, too.
class SendingOrder {
 public:
  SendingOrder() = default;
  SendingOrder(const SendingOrder&) = delete;
  SendingOrder& operator=(const SendingOrder&) = delete;
  ~SendingOrder() { end(); }

  /// `varies`: ranks may use different parameters. `operators_send`: its operators have collectives in this pass.
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
  /// Whether buckets must stay until the end of backward.
  bool waits() const { return waits_; }

 private:
  struct Pass {
    const void* communicator = nullptr;
    bool varies = false;
  };
  // A weak pointer, because a net whose pass broke off may be destroyed by another thread.
  static std::vector<std::weak_ptr<const Pass>>& under_way() {
    thread_local std::vector<std::weak_ptr<const Pass>> all;
    return all;
  }

  const std::shared_ptr<Pass> own_ = std::make_shared<Pass>();
  bool waits_ = false;
};

template <Device D, class Communicator>
class SeveralNets final : public Extension<D> {
 public:
  /// `operators_send`: whether the model's operators have collectives in backward; known after forward.
  SeveralNets(Core<D, Communicator>& core, const bool& operators_send) : core_(core), operators_send_(operators_send) {}

  void backward_begins() override {
    const bool varies = core_.options.find_unused_parameters || core_.options.static_graph;
    order_.begin(&core_.ranks, varies, operators_send_);
    if (order_.waits()) core_.buckets.hold();
  }
  void backward_ended() override {
    if (order_.waits()) core_.buckets.release();
  }
  void averaged() override { order_.end(); }

 private:
  Core<D, Communicator>& core_;
  const bool& operators_send_;
  SendingOrder order_;
};

}  // namespace chorus::ddp
