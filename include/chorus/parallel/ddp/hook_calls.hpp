#pragma once
/// How DistributedDataParallel calls its communication hook.

#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/hook.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <span>
#include <utility>

namespace chorus::ddp {

/// Calls `f` with the bucket's GradBucket.
template <Device D, class Communicator, class F>
void as_hooks_see(const Core<D, Communicator>& core, const Bucket& bucket, const F& f) {
  with_type(core.dtype(bucket), core.gradients(bucket), [&]<class T>(T* gradients) {
    f(GradBucket<T, D>{bucket.index, core.parameter(bucket.parameters.front()).where(),
                       std::span<T>(gradients, bucket.count), core.weight, bucket.parts,
                       bucket.index + 1 == core.buckets.all().size()});
  });
}

template <Device D, class Hook, class Communicator>
struct HookCalls {
  Hook hook;

  void start(const Core<D, Communicator>& core, Bucket& bucket) {
    if (core.sums) return core.sums->start(bucket);
    if constexpr (HookTraits<Hook, D, Communicator>::starts)  // else DistributedDataParallel has said so
      as_hooks_see(core, bucket, [&](const auto& view) { bucket.work = hook.start(view, core.ranks); });
  }
  /// Waits for buckets, and for the hook's later rounds, round by round for all buckets.
  void wait_for(const Core<D, Communicator>& core, std::span<Bucket> buckets) {
    if (core.sums) {
      for (Bucket& bucket : buckets) core.sums->finish(bucket);
      return;
    }
    if constexpr (HookTraits<Hook, D, Communicator>::resumes)
      resume_until_done(hook, core, buckets);
    else
      for (Bucket& bucket : buckets) bucket.work.wait();
  }
};

/// For hooks of several rounds.
template <class Hook, Device D, class Communicator>
void resume_until_done(Hook& hook, const Core<D, Communicator>& core, std::span<Bucket> buckets) {
  bool more = !buckets.empty();
  for (Bucket& bucket : buckets) bucket.done = false;
  for (int round = 0; std::exchange(more, false); ++round)
    for (Bucket& bucket : buckets) {
      if (bucket.done) continue;
      bucket.work.wait();
      bucket.done = true;
      as_hooks_see(core, bucket, [&](const auto& view) {
        if (auto next = hook.resume(view, core.ranks, round)) {
          bucket.work = std::move(*next);
          bucket.done = false;
          more = true;
        }
      });
    }
}

}  // namespace chorus::ddp
