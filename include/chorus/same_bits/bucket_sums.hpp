#pragma once
/// Adds up the ranks' sums of shares of a bucket in the order of the tree.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/config.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/sums_of_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::same_bits {

/// The tree's reduce-scatter: every rank has a piece of each bucket; the others send it their sums of this piece, and
/// it adds all up itself, so that the order does not depend on an algorithm or transport. Ranks that need more than
/// their piece then gather the others'. A rank sends (n - 1) / n of a bucket for each of its sums: one if its run of
/// shares is a node of the tree, such as 4 of 8.
template <Device D, class Communicator>
class BucketSums final : public ddp::BucketSums {
 public:
  /// `shares`: their total number; `tree`: of this rank's run. `shards`: neighbouring ranks, each of which wants one
  /// part of a bucket; `replicas`: the ranks that want the same part. Without shards all want all of it.
  BucketSums(ddp::Core<D, Communicator>& core, std::size_t shares, const GradientTree<D>& tree,
             const Communicator* shards, Communicator* replicas)
      : core_(core), shares_(shares), tree_(tree), shards_(shards), replicas_(replicas) {}

  void start(ddp::Bucket& bucket) override;

  void finish(ddp::Bucket& bucket) override;

 private:
  /// Elements [begin, begin + count) of a bucket.
  struct Piece {
    std::size_t begin, count;
  };
  struct Exchange {
    Storage<D> received = {};                        // the other ranks' sums of this rank's piece
    std::vector<Storage<D>> sent = {};               // this rank's own
    std::vector<std::vector<std::byte*>> sums = {};  // by rank: of this rank's piece
    std::vector<comm::Work> work = {};
    bool added = false;  // to the result
  };

  // Determines which sums of this batch each rank has, and which part of a bucket.
  void share_out();
  std::size_t rank() const { return static_cast<std::size_t>(core_.ranks.rank()); }
  // The part of a bucket that a rank wants, and the piece of it that it adds up.
  Piece part(const ddp::Bucket& bucket, std::size_t rank) const;
  Piece piece(const ddp::Bucket& bucket, std::size_t rank) const;
  // Sends and receives sums, in pairs of ranks: see comm/algorithms/all_to_all.hpp.
  template <class T>
  void exchange(const ddp::Bucket& bucket);
  // Adds up this rank's piece, and begins to gather the others' of its part.
  void add(ddp::Bucket& bucket);
  template <class T>
  void gather(const ddp::Bucket& bucket, T* gradients);
  // This thread does the last bucket's work itself, which is cheaper than waking another one.
  bool is_last(const ddp::Bucket& bucket) const {
    return std::is_same_v<D, Cpu> && bucket.index + 1 == core_.buckets.all().size();
  }
  static comm::CollectiveOptions options(const ddp::Bucket& bucket) {
    return {.traffic = trace::Traffic::gradients, .bucket = static_cast<int>(bucket.index)};
  }

  ddp::Core<D, Communicator>& core_;
  std::size_t shares_;
  const GradientTree<D>& tree_;
  const Communicator* shards_;
  Communicator* replicas_;
  std::size_t parts_ = 1, copies_ = 1;         // the number of different parts, and of ranks that want the same
  std::vector<std::vector<ShareRange>> sums_;  // by rank
  std::vector<Exchange> exchanges_;            // by bucket
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_COMMUNICATOR_TEMPLATES
#include <chorus/same_bits/bucket_sums_impl.hpp>
#endif
