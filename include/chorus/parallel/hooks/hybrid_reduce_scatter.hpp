#pragma once
/// Averages gradients in parts that groups of ranks have in common (hybrid sharding).

#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <cstddef>
#include <optional>
#include <span>

namespace chorus {

/// Each rank of `shards` gets the sum of its part over the group, as by ReduceScatter, and then the sum over the ranks
/// of `replicas`, which have the same part in other groups (Zhao et al., "PyTorch FSDP", VLDB 2023, hybrid sharding).
/// With d groups of s ranks each rank sends (s - 1) / s + 2 (d - 1) / (d s) of the model's bytes. Both communicators
/// must outlive it.
template <class Communicator>
struct HybridReduceScatter {
  Communicator *shards, *replicas;
  static constexpr bool in_parts = true, several_rounds = true;

  template <class T, Device D, class All>
  comm::Work start(const GradBucket<T, D>& bucket, All&) {
    return ReduceScatter().start(bucket, *shards);
  }
  template <class T, Device D, class All>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, All&, int round) {
    if (round == 0)
      if (auto rest = ReduceScatter().resume(bucket, *shards, 0)) return rest;
    if (replicas->size() == 1 || round > (left_over(bucket) ? 1 : 0)) return {};
    const auto part = ddp::part_of(bucket.gradients.size(), static_cast<std::size_t>(shards->rank()),
                                   static_cast<std::size_t>(shards->size()));
    // The reduce-scatter has applied the weight already, unless there is only one shard.
    return replicas->all_reduce_async(bucket.gradients.subspan(part.begin, part.end - part.begin), comm::ReduceOp::sum,
                                      {.scale = shards->size() == 1 ? bucket.weight : 1,
                                       .traffic = trace::Traffic::gradients,
                                       .bucket = static_cast<int>(bucket.index)});
  }

 private:
  template <class Bucket>
  bool left_over(const Bucket& bucket) const {
    return bucket.gradients.size() % static_cast<std::size_t>(shards->size()) != 0;
  }
};

}  // namespace chorus
