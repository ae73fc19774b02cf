#pragma once
/// The sums of shares that ranks have of a bucket, added up in the order of the tree.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/config.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/sums_of_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::same_bits {

/// Every rank gathers all ranks' sums of a bucket, and adds them by itself: no algorithm or transport has an order of
/// its own in it. Each of n ranks sends (n - 1) times its sums, of which there is one where its run of shares is a node
/// of the tree, as 4 of 8 are.
template <Device D, class Communicator>
class BucketSums final : public ddp::BucketSums {
 public:
  /// `shares` in all; `tree` of this rank's run.
  BucketSums(ddp::Core<D, Communicator>& core, std::size_t shares, const GradientTree<D>& tree)
      : core_(core), shares_(shares), tree_(tree) {}

  void start(ddp::Bucket& bucket) override;

  void finish(ddp::Bucket& bucket) override;

 private:
  // Which sums each rank has of this batch.
  void share_out();

  struct Gathered {
    Storage<D> own, all;
  };
  ddp::Core<D, Communicator>& core_;
  std::size_t shares_;
  const GradientTree<D>& tree_;
  std::vector<std::vector<ShareRange>> sums_;  // of each rank
  std::size_t most_ = 1;                       // of them a rank has
  std::vector<Gathered> gathered_;             // by bucket
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_COMMUNICATOR_TEMPLATES
#include <chorus/same_bits/bucket_sums_impl.hpp>
#endif
