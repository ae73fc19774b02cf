#pragma once
/// An optimizer that steps each parameter during backward, as soon as its average arrives (FusedOptimizer).

#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>

namespace chorus::ddp {

template <Device D, class Communicator>
class StepInBackward final : public Extension<D> {
 public:
  /// `at_the_end`: steps after backward, because parameters may be unused or a hook communicates again after a bucket
  /// returns: all ranks must make these calls in one order.
  StepInBackward(Core<D, Communicator>& core, bool at_the_end) : core_(core), at_the_end_(at_the_end) {}

  /// Throws UsageError if another optimizer is set.
  void set(std::function<void(const ParameterOn<D>&)> step) {
    check<UsageError>(!step || !step_,
                      "DistributedDataParallel: another optimizer steps this net in backward: destroy it first");
    step_ = std::move(step);
  }

  void gradient_arrived(std::size_t) override {
    if (!step_ || at_the_end_ || !core_.sync) return;
    while (Bucket* const bucket = core_.buckets.next_on_its_way()) {
      if (!bucket->work.done()) return;
      finalize_buckets(*bucket);
    }
  }
  void backward_ended() override {
    if (!step_ || at_the_end_) return;
    core_.send_full();
    while (Bucket* const bucket = core_.buckets.next_on_its_way()) finalize_buckets(*bucket);
  }
  void averaged() override {
    if (!step_) return;
    for (std::size_t i = 0; i < core_.entries(); ++i) {
      const bool own = !core_.is_shared(i) && core_.parameter(i).wants_grad();  // not shared
      const bool sent = at_the_end_ && core_.buckets.sends(i);
      if ((own || sent) && core_.parameter(i).grad_arrived()) step_(core_.parameter(i));
    }
  }

 private:
  void finalize_buckets(Bucket& bucket) {
    core_.finalize_buckets(std::span(&bucket, 1));
    for (const std::size_t i : bucket.parameters) step_(core_.parameter(i));
  }

  Core<D, Communicator>& core_;
  const bool at_the_end_;
  std::function<void(const ParameterOn<D>&)> step_;
};

}  // namespace chorus::ddp
