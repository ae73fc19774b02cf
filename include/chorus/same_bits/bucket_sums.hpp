#pragma once
/// Adds up the ranks' sums of shares of a bucket in the order of the tree.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/config.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/sums_of_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::same_bits {

/// Every rank gathers all ranks' sums of a bucket and adds them itself, so that the order does not depend on an
/// algorithm or transport. Each of n ranks sends (n - 1) times its sums: one if its run of shares is a node of the
/// tree, such as 4 of 8.
template <Device D, class Communicator>
class BucketSums final : public ddp::BucketSums {
 public:
  /// `shares`: their total number; `tree`: of this rank's run.
  BucketSums(ddp::Core<D, Communicator>& core, std::size_t shares, const GradientTree<D>& tree)
      : core_(core), shares_(shares), tree_(tree) {}

  void start(ddp::Bucket& bucket) override;

  void finish(ddp::Bucket& bucket) override;

 private:
  // Determines which sums of this batch each rank has.
  void share_out();

  struct Gathered {
    Storage<D> own, all;
  };
  ddp::Core<D, Communicator>& core_;
  std::size_t shares_;
  const GradientTree<D>& tree_;
  std::vector<std::vector<ShareRange>> sums_;  // by rank
  std::size_t most_ = 1;                       // the maximum number of sums of a rank
  std::vector<Gathered> gathered_;             // by bucket
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_COMMUNICATOR_TEMPLATES
#include <chorus/same_bits/bucket_sums_impl.hpp>
#endif
