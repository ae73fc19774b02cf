#pragma once
/// Buffers, such as batch norm's running statistics: option `broadcast_buffers`, and a hook in its place.

#include <chorus/parallel/ddp/extension.hpp>
#include <functional>
#include <span>
#include <utility>

namespace chorus::ddp {

/// Before each forward pass that will average gradients, of a model of which a layer is in training, and before they
/// evaluate, all ranks take rank 0's buffers, or call the user's function, then or after the pass.
template <Device D, class Communicator>
class BufferSharing final : public Extension<D> {
 public:
  using Share = std::function<void(std::span<const nn::NamedBuffer<D>> buffers, Communicator& communicator)>;
  /// What the policy has: whether a layer is in training or passes in training have changed buffers, whether within
  /// `join`, a broadcast from a rank.
  struct Policy {
    std::function<bool()> trains, joining;
    std::function<void(int root)> broadcast;
    std::function<std::span<const nn::NamedBuffer<D>>()> buffers;
    /// Where each pass is the whole batch's, rank 0's are sent after it: so all ranks evaluate with the same ones.
    bool after_forward = false;
  };

  BufferSharing(Core<D, Communicator>& core, Policy policy) : core_(core), policy_(std::move(policy)) {}

  void set_hook(Share share, BufferCommHookLocation location) {
    share_ = std::move(share);
    location_ = location;
  }

  /// Passes in training have changed buffers, and ranks are about to evaluate.
  void share_now() {
    if (share_) {
      if (!calls_hook_ || location_ == BufferCommHookLocation::pre_forward) share_(policy_.buffers(), core_.ranks);
    } else if (core_.options.broadcast_buffers) {
      policy_.broadcast(0);
    }
  }
  bool shares() const { return share_ || core_.options.broadcast_buffers; }

  void forward_begins(ForwardPass& pass) override {
    const bool shares = core_.sync && policy_.trains();
    calls_hook_ = shares && share_ && !policy_.joining();
    broadcasts_ = shares && !calls_hook_ && core_.options.broadcast_buffers;
    pass.sends_buffers = broadcasts_;
  }
  void ready_for_forward() override {
    const bool in_pass_of_others = core_.brings != Brings::samples;
    if (in_pass_of_others ? core_.shares.active_pass().sends_buffers : broadcasts_ && !policy_.after_forward)
      policy_.broadcast(policy_.joining() ? core_.shares.first_active() : 0);
    if (!in_pass_of_others) call_hook(BufferCommHookLocation::pre_forward);
  }
  void forward_ended() override {
    if (broadcasts_ && policy_.after_forward) policy_.broadcast(0);
    call_hook(BufferCommHookLocation::post_forward);
  }

 private:
  void call_hook(BufferCommHookLocation now) {
    if (calls_hook_ && now == location_) share_(policy_.buffers(), core_.ranks);
  }

  Core<D, Communicator>& core_;
  Policy policy_;
  Share share_;
  BufferCommHookLocation location_ = BufferCommHookLocation::pre_forward;
  bool calls_hook_ = false, broadcasts_ = false;
};

}  // namespace chorus::ddp
