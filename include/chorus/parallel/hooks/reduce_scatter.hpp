#pragma once
/// Averages gradients in parts, for an optimizer that steps only this rank's part.

#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/ddp/parts.hpp>

namespace chorus {

/// Every rank gets the average of its own part of each bucket (`ddp::part_of`) only: half of an all-reduce. The other
/// half is the all-gather of the parameters in ShardedOptimizer's step. Together they send as much as AllReduce alone,
/// 2 (n - 1) / n of the model's bytes per rank, and no two ranks step the same parameter (Rajbhandari et al., "ZeRO",
/// SC 2020, stage 2; the memory for gradients is not reduced).
///
///   ch::DistributedDataParallel<Model, ch::ReduceScatter> net{make(), run};
///   ch::ShardedOptimizer<ch::optim::Adam<ch::Cpu>> optimizer{net, {.lr = 1e-3}};
///
/// After backward the parameters have no gradients, as no rank has whole ones. The optimizer finds the parts, clips
/// them (`optimizer.clip_grad_norm`) and steps. It must step, or `zero_grad`, before the next averaged backward pass.
/// The first pass, which learns the order of the buckets, computes whole averages.
struct ReduceScatter {
  static constexpr bool in_parts = true, several_rounds = true;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    const auto ranks = static_cast<std::size_t>(communicator.size()), share = bucket.gradients.size() / ranks;
    if (ranks == 1 || share == 0) return {};
    const std::span<const T> all = bucket.gradients.first(share * ranks);
    const auto own = bucket.gradients.subspan(share * static_cast<std::size_t>(communicator.rank()), share);
    // On the CPU this thread does the work itself, which is cheaper than waking another one.
    if (std::is_same_v<D, Cpu> && bucket.last) {
      communicator.reduce_scatter(all, own, comm::ReduceOp::sum, options(bucket));
      return {};
    }
    return communicator.reduce_scatter_async(all, own, comm::ReduceOp::sum, options(bucket));
  }
  /// The remainder is averaged on all ranks.
  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int round) {
    const auto ranks = static_cast<std::size_t>(communicator.size()), rest = bucket.gradients.size() % ranks;
    if (rest == 0 || round > 0) return {};
    return communicator.all_reduce_async(bucket.gradients.last(rest), comm::ReduceOp::sum, options(bucket));
  }

 private:
  template <class T, Device D>
  static comm::CollectiveOptions options(const GradBucket<T, D>& bucket) {
    return {.scale = bucket.weight, .traffic = trace::Traffic::gradients, .bucket = static_cast<int>(bucket.index)};
  }
};

}  // namespace chorus
