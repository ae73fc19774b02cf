#pragma once
/// Option `broadcast_buffers`, of models that have buffers, such as batch norm's running statistics.

#include <chorus/parallel/ddp/extension.hpp>
#include <functional>
#include <utility>

namespace chorus::ddp {

/// Before each forward pass that will average gradients, all ranks take rank 0's buffers, if a layer of the model is in
/// training.
template <Device D, class Communicator>
class BufferSharing final : public Extension<D> {
 public:
  /// Callbacks of the policy: whether a layer is in training or passes in training have changed buffers; whether the
  /// call is within `join`; a broadcast from a rank.
  struct Policy {
    std::function<bool()> trains, joining;
    std::function<void(int root)> broadcast;
    /// For passes over the whole batch: rank 0 sends its buffers after the pass, so that all ranks evaluate with them.
    bool after_forward = false;
  };

  BufferSharing(Core<D, Communicator>& core, Policy policy) : core_(core), policy_(std::move(policy)) {}

  void forward_begins(ForwardPass& pass) override { pass.sends_buffers = sends_ = core_.sync && policy_.trains(); }
  void ready_for_forward() override {
    const bool in_pass_of_others = core_.contribution != Contribution::samples;
    if (in_pass_of_others ? core_.shares.active_pass().sends_buffers : sends_ && !policy_.after_forward)
      policy_.broadcast(policy_.joining() ? core_.shares.first_active() : 0);
  }
  void forward_ended() override {
    if (sends_ && policy_.after_forward) policy_.broadcast(0);
  }

 private:
  Core<D, Communicator>& core_;
  Policy policy_;
  bool sends_ = false;
};

}  // namespace chorus::ddp
