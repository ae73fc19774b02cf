#pragma once
/// Hooks after which each rank has the averages of its own part of each bucket alone.

#include <algorithm>
#include <chorus/parallel/ddp/hook_calls.hpp>
#include <chorus/parallel/ddp/learned_order.hpp>
#include <chorus/parallel/ddp/shared_gradients.hpp>
#include <chorus/parallel/hooks/all_reduce.hpp>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace chorus::ddp {

/// Elements [begin, end).
struct Elements {
  std::size_t begin, end;
};
/// Rank `rank`'s part of a bucket of `count` elements: the n-th one of n equal parts; the last rank's has what is left
/// over, too.
constexpr Elements part_of(std::size_t count, std::size_t rank, std::size_t ranks) {
  const std::size_t each = count / ranks;
  return {rank * each, rank + 1 == ranks ? count : (rank + 1) * each};
}

/// What becomes of a backward pass's gradients: what the hook does; whole averages, where parts are not enough;
/// nothing, for other ranks reach them, and the optimizer averages as it steps.
enum class Averaging { by_hook, whole, by_optimizer };

template <Device D, class Hook, class Communicator>
requires HookTraits<Hook, D, Communicator>::in_parts struct HookCalls<D, Hook, Communicator> {
  Hook hook;
  Averaging averaging = Averaging::by_hook;

  void start(const Core<D, Communicator>& core, Bucket& bucket) {
    bucket.work = {};
    as_hooks_see(core, bucket, [&](const auto& view) {
      if (averaging == Averaging::whole) bucket.work = AllReduce{}.start(view, core.ranks);
      if (averaging == Averaging::by_hook) bucket.work = hook.start(view, core.ranks);
    });
  }
  void wait_for(const Core<D, Communicator>& core, std::span<Bucket> buckets) {
    if (averaging == Averaging::by_hook) return resume_until_done(hook, core, buckets);
    for (Bucket& bucket : buckets) bucket.work.wait();
  }
};

/// Keeps such gradients out of sight: after a backward pass their parameters have none, and who asks for them is told, so
/// that nobody takes the rest, which is this rank's own, for an average. An optimizer that knows which part is its own sees them for a while.
/// Where ranks reach each other's gradients, averages may be left to that optimizer's step: until then they are not
/// averaged.
template <Device D, class Communicator>
class GradientParts final : public Extension<D> {
 public:
  GradientParts(Core<D, Communicator>& core, Averaging& averaging) : core_(core), averaging_(averaging) {
    check<UsageError>(
        !core.options.skip_all_reduce_unused_params,
        "DistributedDataParallel: skip_all_reduce_unused_params makes buckets anew after a backward pass, "
        "and this hook leaves each rank a part of each bucket");
  }

  void buckets_will_change() override { refuse_if_waiting("parameters can't be frozen or thawed"); }
  void gradient_arrived(std::size_t) override {
    if (!core_.sync) refuse_if_waiting("no other backward pass can begin");
  }
  void backward_begins() override {
    refuse_if_waiting("no other backward pass can begin");
    averaging_ = Averaging::by_hook;
    const auto* const order = core_.template find<LearnedOrder<D, Communicator>>();
    // A policy for numbers that are not finite judges averages, after this pass.
    const bool judged = core_.options.non_finite != NonFinite::propagate;
    if (order != nullptr && !order->learned())
      averaging_ = Averaging::whole;  // after this pass gradients change their places
    else if (!judged && all_reached())
      averaging_ = Averaging::by_optimizer;
  }
  // Hides them.
  void pass_ended() override {
    waits_for_average_ = averaging_ == Averaging::by_optimizer;
    weight_ = core_.weight;
    for (std::size_t i = 0; i < core_.entries(); ++i)
      if (core_.buckets.sends(i) && core_.parameter(i).grad_arrived()) hidden_.push_back(i);
    set_arrived(false);
    waits_for_step_ = true;
  }

  /// Where ranks reach each other's.
  detail::SharedGradients& shared() { return shared_; }
  /// Whether nothing has been averaged so far.
  bool waits_for_average() const { return waits_for_average_; }
  /// All ranks tell each other what their gradients, which wait for the average, count. Throws UsageError where they
  /// are no longer reached.
  void tell_weight() {
    check<UsageError>(all_reached(),
                      "ShardedOptimizer: the last gradients were to be averaged by the step of an optimizer that has "
                      "parameters in common, which is gone");
    shared_.tell_weight(core_.ranks, weight_);
  }
  /// Has each rank average its part of each bucket now, if that has been left to the optimizer. All ranks call it.
  void average() {
    if (!waits_for_average_) return;
    tell_weight();
    for (const Bucket& bucket : core_.buckets.all()) {
      const auto part = part_of(bucket.count, static_cast<std::size_t>(core_.ranks.rank()),
                                static_cast<std::size_t>(core_.ranks.size()));
      with_type(core_.dtype(bucket), core_.gradients(bucket), [&]<class T>(T* gradients) {
        T* const own = gradients + part.begin;
        const auto count = part.end - part.begin;
        kernels::add_up(Cpu{}, static_cast<Index>(count), own, {own, shared_.terms(own, count * sizeof(T))});
      });
    }
    waits_for_average_ = false;
    core_.ranks.barrier();  // others read this rank's until then
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
  /// They have been used.
  void forget() {
    for (const std::size_t i : hidden_) core_.parameter(i).set_grad_in_parts(false);
    hidden_.clear();
    waits_for_step_ = waits_for_average_ = false;
  }

 private:
  // What `what` says would lose them.
  void refuse_if_waiting(const char* what) const {
    check<UsageError>(!waits_for_step_, "DistributedDataParallel: ", what,
                      " before a ShardedOptimizer has stepped with the last averages, of which each rank has a part, "
                      "or forgotten them (zero_grad); several passes for one step belong under no_sync");
  }
  bool all_reached() const {
    const auto& buckets = core_.buckets.all();
    return std::all_of(buckets.begin(), buckets.end(), [&](const Bucket& bucket) {
      return shared_.reached(core_.gradients(bucket), core_.bytes(bucket));
    });
  }
  void set_arrived(bool arrived) {
    for (const std::size_t i : hidden_) {
      core_.parameter(i).set_grad_arrived(arrived);
      core_.parameter(i).set_grad_in_parts(!arrived);
    }
  }

  Core<D, Communicator>& core_;
  Averaging& averaging_;
  detail::SharedGradients shared_;
  std::vector<std::size_t> hidden_;  // entries
  bool waits_for_step_ = false, waits_for_average_ = false;
  double weight_ = 1;
};

}  // namespace chorus::ddp
