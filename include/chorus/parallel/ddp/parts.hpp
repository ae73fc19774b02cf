#pragma once
/// Hooks that give each rank the averages of its own part of each bucket only.

#include <algorithm>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/ddp/hook_calls.hpp>
#include <chorus/parallel/ddp/learned_order.hpp>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace chorus::ddp {

/// Elements [begin, end).
struct Elements {
  std::size_t begin, end;
};
/// Rank `rank`'s part of a bucket of `count` elements: one of `ranks` equal parts in order; the last rank also gets the
/// remainder.
constexpr Elements part_of(std::size_t count, std::size_t rank, std::size_t ranks) {
  const std::size_t each = count / ranks;
  return {rank * each, rank + 1 == ranks ? count : (rank + 1) * each};
}

/// How a pass's gradients are averaged: by the hook, or as whole averages if parts don't suffice.
enum class Averaging { by_hook, whole };

template <Device D, class Hook, class Communicator>
requires HookTraits<Hook, D, Communicator>::in_parts struct HookCalls<D, Hook, Communicator> {
  Hook hook;
  Averaging averaging = Averaging::by_hook;

  void start(const Core<D, Communicator>& core, Bucket& bucket) {
    if (core.sums) return core.sums->start(bucket);
    as_hooks_see(core, bucket, [&](const auto& view) {
      bucket.work =
          averaging == Averaging::whole ? AllReduce{}.start(view, core.ranks) : hook.start(view, core.ranks);
    });
  }
  void wait_for(const Core<D, Communicator>& core, std::span<Bucket> buckets) {
    if (core.sums) {
      for (Bucket& bucket : buckets) core.sums->finish(bucket);
      return;
    }
    if (averaging == Averaging::by_hook) return resume_until_done(hook, core, buckets);
    for (Bucket& bucket : buckets) bucket.work.wait();
  }
};

/// Hides gradients averaged in parts: after backward their parameters have no gradient, and reading one is an error, so
/// that no code takes the rest, this rank's own gradients, for an average. An optimizer that knows this rank's part
/// sees them while it steps.
template <Device D, class Communicator>
class GradientParts final : public Extension<D> {
 public:
  GradientParts(Core<D, Communicator>& core, Averaging& averaging) : core_(core), averaging_(averaging) {}

  void buckets_will_change() override { refuse_if_waiting("parameters can't be frozen or thawed"); }
  void gradient_arrived(std::size_t) override {
    if (!core_.sync) refuse_if_waiting("another backward pass can't begin");
  }
  void backward_begins() override {
    refuse_if_waiting("another backward pass can't begin");
    const auto* const order = core_.template find<LearnedOrder<D, Communicator>>();
    const bool places_change = order != nullptr && !order->learned();  // after this pass
    averaging_ = places_change ? Averaging::whole : Averaging::by_hook;
  }
  // Hides the gradients.
  void pass_ended() override {
    for (std::size_t i = 0; i < core_.entries(); ++i)
      if (core_.buckets.sends(i) && core_.parameter(i).grad_arrived()) hidden_.push_back(i);
    set_arrived(false);
    waits_for_step_ = true;
  }

  /// Calls `f` while the parameters have their gradients.
  void show(const std::function<void()>& f) {
    const struct Scope {
      GradientParts& parts;
      explicit Scope(GradientParts& all) : parts(all) { parts.set_arrived(true); }
      ~Scope() { parts.set_arrived(false); }
    } scope(*this);
    f();
  }
  /// The gradients have been used.
  void forget() {
    for (const std::size_t i : hidden_) core_.parameter(i).set_grad_in_parts(false);
    hidden_.clear();
    waits_for_step_ = false;
  }

 private:
  // Throws if `what` would lose gradients that no step has used.
  void refuse_if_waiting(const char* what) const {
    check<UsageError>(!waits_for_step_, "DistributedDataParallel: ", what,
                      " before the ShardedOptimizer has used the last averages (step) or dropped them (zero_grad); run "
                      "several passes for one step under no_sync");
  }
  void set_arrived(bool arrived) {
    for (const std::size_t i : hidden_) {
      core_.parameter(i).set_grad_arrived(arrived);
      core_.parameter(i).set_grad_in_parts(!arrived);
    }
  }

  Core<D, Communicator>& core_;
  Averaging& averaging_;
  std::vector<std::size_t> hidden_;  // entries
  bool waits_for_step_ = false;
};

}  // namespace chorus::ddp
