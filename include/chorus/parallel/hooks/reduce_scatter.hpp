#pragma once
/// Averages gradients in parts, for an optimizer of which each rank steps its part alone.

#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/ddp/parts.hpp>

namespace chorus {

/// Of each bucket, every rank gets the average of its own part (`ddp::part_of`) and no other: half of an all-reduce.
/// The other half is the all-gather of the parameters in ShardedOptimizer's step, so that both together send what
/// AllReduce alone does, 2 (n - 1) / n of the model's bytes from each of n ranks, and no rank steps what another does
/// (Rajbhandari et al., "ZeRO", SC 2020, stage 2; the memory for gradients stays).
///
///   ch::DistributedDataParallel<Model, ch::ReduceScatter> net{make(), run};
///   ch::ShardedOptimizer<ch::optim::Adam<ch::Cpu>> optimizer{net, {.lr = 1e-3}};
///
/// After backward the parameters have no gradients, for nobody has whole ones: the optimizer finds the parts, clips
/// them (`optimizer.clip_grad_norm`), and steps. The next averaged backward pass wants that step, or `zero_grad`,
/// first. The first pass, in which the order of the buckets is learned, averages whole.
struct ReduceScatter {
  static constexpr bool in_parts = true, several_rounds = true;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    const auto ranks = static_cast<std::size_t>(communicator.size()), share = bucket.gradients.size() / ranks;
    if (ranks == 1 || share == 0) return {};
    const std::span<const T> all = bucket.gradients.first(share * ranks);
    const auto own = bucket.gradients.subspan(share * static_cast<std::size_t>(communicator.rank()), share);
    // On the CPU this thread does the work itself, rather than wake another one.
    if (std::is_same_v<D, Cpu> && bucket.last) {
      communicator.reduce_scatter(all, own, comm::ReduceOp::sum, options(bucket));
      return {};
    }
    return communicator.reduce_scatter_async(all, own, comm::ReduceOp::sum, options(bucket));
  }
  /// The few numbers that are left over go to all ranks.
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
