#pragma once
/// The samples of a rank and their order: one order per (seed, epoch), cut into global batches, each of which is cut
/// into shares.

#include <algorithm>
#include <chorus/core/dtype.hpp>
#include <chorus/core/ledger.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace chorus::data {

/// The share of the samples that a sampler gives, and their order.
struct SamplerOptions {
  int rank = 0;
  int world_size = 1;
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// Repeat samples so that all shares of a batch have one size.
  bool padding = false;
  /// The batch is cut into that many shares, of which each rank takes whole ones; 0: one for each rank.
  int shares = 0;
  /// For a net of several ranks, which compare the batches of their passes.
  std::shared_ptr<Ledger> ledger = {};
};

/// The order of an epoch and each rank's share of it. It depends on seed and epoch alone, so that a global batch is the
/// same set of samples for any number of ranks: with one seed, training on 1, 2 or 3 ranks sees the same data.
///
/// Of a global batch of n samples each rank gets a contiguous share of n / world_size; the first n % world_size ranks
/// get one more. A batch with fewer samples than ranks leaves some with an empty share, which has weight 0.
///
/// With `padding` each share has ceil(n / world_size) samples, and where the data end, the epoch's first samples come
/// again: the sets of PyTorch's DistributedSampler. It needs no uneven shares, but it counts some samples twice:
/// gradients are a little off, and an accuracy measured over padded shares is wrong. Measure without it.
class Sampler {
 public:
  /// Throws UsageError where the size is negative, the rank isn't in [0, world_size), or there are fewer shares than
  /// ranks; padded ones there are not.
  explicit Sampler(Index dataset_size, SamplerOptions options = {});

  /// Sets the order of another epoch; without a call every epoch has the order of epoch 0. All ranks must pass the
  /// same.
  void set_epoch(Index epoch);

  Index dataset_size() const { return size_; }
  Index epoch() const { return epoch_; }
  const SamplerOptions& options() const { return options_; }

  /// The samples of the epoch in order, of all ranks; valid until the epoch changes.
  std::span<const Index> order() const& { return std::span(*order_).first(static_cast<std::size_t>(length_)); }
  std::span<const Index> order() const&& = delete;

  /// Number of batches of `batch` samples over all ranks. Throws UsageError for a batch of less than 1 sample.
  Index global_batches(Index batch, bool drop_last = false) const;

  /// Number of samples of global batch `b`, over all ranks and without padding.
  Index global_size(Index b, Index batch) const { return std::min(batch, length_ - b * batch); }

  /// The place in global batch `b` at which this rank's share begins.
  Index share_begin(Index b, Index batch) const { return boundary(global_size(b, batch), options_.rank); }

  /// This rank's samples of global batch `b`; valid until the epoch changes.
  std::span<const Index> share(Index b, Index batch) const&;
  std::span<const Index> share(Index, Index) const&& = delete;  // would refer to a destroyed sampler

  /// All ranks' samples of global batch `b`; this rank's begin at `share_begin`. Valid as long.
  std::span<const Index> whole(Index b, Index batch) const&;
  std::span<const Index> whole(Index, Index) const&& = delete;

  /// The key of the random numbers of the i-th sample of this rank's share: the sample, or, if an order may repeat a
  /// sample, its place in the epoch.
  Index stream(Index b, Index batch, Index i) const;

 protected:
  /// Makes the order of an epoch: `length` of the dataset's samples.
  using Draw = std::function<std::vector<Index>(std::uint64_t seed, Index epoch)>;
  void draw_by(Index length, bool repeats, Draw draw);

 private:
  void check_batch(Index batch) const;

  /// The place in a global batch of `count` samples at which the share of `rank` begins and that of the rank before
  /// ends.
  Index boundary(Index count, int rank) const;

  std::span<const Index> part(Index b, Index batch, int first_rank, int last_rank) const;
  void make_order();

  Index size_, length_;  // of the dataset, and of an epoch
  SamplerOptions options_;
  Draw draw_ = {};  // set if the order is neither the dataset's nor a permutation
  bool repeats_ = false;
  Index epoch_ = 0;
  std::shared_ptr<const std::vector<Index>> order_;  // never changed: copies, which may be of another epoch, share it
};

/// PyTorch's name for a sampler with a rank and a world size; a world of one is no special case.
using DistributedSampler = Sampler;

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/sampler_impl.hpp>
#endif
