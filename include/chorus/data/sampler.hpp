#pragma once
/// The order of samples and each rank's share: one order per (seed, epoch), split into global batches, and these into
/// shares.

#include <algorithm>
#include <chorus/core/dtype.hpp>
#include <chorus/core/ledger.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace chorus::data {

/// Decides before each batch where a loader's pass goes on: for a net whose ranks change while it trains.
class PassGuide {
 public:
  virtual ~PassGuide() = default;
  struct Place {
    Index batch;
    int rank, world_size;
  };
  /// Batch `next` of `batches` is due; at the end of the pass next == batches. `begins`: nothing of the pass has been
  /// read. Returns the batch that is read instead, and this rank's share of it and of later ones.
  virtual Place go_on(Index next, Index batches, bool begins) = 0;
};

/// Options of Sampler: the rank's share and the order.
struct SamplerOptions {
  int rank = 0;
  int world_size = 1;
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// Repeat samples so that all shares of a batch have the same size.
  bool padding = false;
  /// The number of shares of a batch, which ranks hold as whole shares; 0: one per rank.
  int shares = 0;
  /// For a net of several ranks, which compare the batches of their passes.
  std::shared_ptr<Ledger> ledger = {};
  std::shared_ptr<PassGuide> guide = {};  ///< asked by loaders
};

/// The order of an epoch and each rank's share of it. It depends only on seed and epoch, so that global batches are the
/// same for any number of ranks: with one seed, training on 1, 2 or 3 ranks sees the same data.
///
/// Each rank gets a contiguous share of n / world_size samples of a global batch of n; the first n % world_size ranks
/// get one more. If a batch has fewer samples than there are ranks, some shares are empty, with weight 0.
///
/// With `padding` each share has ceil(n / world_size) samples; at the end of the data the epoch's first samples repeat,
/// as in PyTorch's DistributedSampler. Some samples then count twice: gradients are slightly off, and an accuracy over
/// padded shares is wrong. Evaluate without padding.
class Sampler {
 public:
  /// Throws UsageError if the size is negative, if the rank is not in [0, world_size), if `shares` is neither 0 nor in
  /// [world_size, most_shares], or for other shares with padding.
  explicit Sampler(Index dataset_size, SamplerOptions options = {});

  /// Sets the epoch of the order; by default every epoch has the order of epoch 0. All ranks must set the same.
  void set_epoch(Index epoch);

  /// Takes another rank's share. Throws UsageError as the constructor.
  void set_rank(int rank, int world_size);

  Index dataset_size() const { return size_; }
  Index epoch() const { return epoch_; }
  const SamplerOptions& options() const { return options_; }

  /// All ranks' samples of the epoch, in order; valid until the epoch changes.
  std::span<const Index> order() const& { return std::span(*order_).first(static_cast<std::size_t>(length_)); }
  std::span<const Index> order() const&& = delete;

  /// Number of global batches of `batch` samples. Throws UsageError for a batch of less than 1 sample.
  Index global_batches(Index batch, bool drop_last = false) const;

  /// Number of samples of global batch `b`, over all ranks, without padding.
  Index global_size(Index b, Index batch) const { return std::min(batch, length_ - b * batch); }

  /// Where this rank's share begins in global batch `b`.
  Index share_begin(Index b, Index batch) const { return boundary(global_size(b, batch), options_.rank); }

  /// This rank's samples of global batch `b`; valid until the epoch changes.
  std::span<const Index> share(Index b, Index batch) const&;
  std::span<const Index> share(Index, Index) const&& = delete;  // would refer to a destroyed sampler

  /// All ranks' samples of global batch `b`; this rank's begin at `share_begin`. Valid until the epoch changes.
  std::span<const Index> whole(Index b, Index batch) const&;
  std::span<const Index> whole(Index, Index) const&& = delete;

  /// The key of random numbers for the i-th sample of this rank's share: the sample's index, or its position in the
  /// epoch if samples may repeat.
  Index stream(Index b, Index batch, Index i) const;

 protected:
  /// Makes the order of an epoch: `length` of the dataset's samples.
  using Draw = std::function<std::vector<Index>(std::uint64_t seed, Index epoch)>;
  void draw_by(Index length, bool repeats, Draw draw);

 private:
  void check_options() const;
  void check_batch(Index batch) const;

  /// Where the share of `rank` begins, and the previous one ends, in a global batch of `count` samples.
  Index boundary(Index count, int rank) const;

  std::span<const Index> part(Index b, Index batch, int first_rank, int last_rank) const;
  void make_order();

  Index size_, length_;  // of the dataset, and of an epoch
  SamplerOptions options_;
  Draw draw_ = {};  // set if the order is neither the dataset's nor a permutation
  bool repeats_ = false;
  Index epoch_ = 0;
  std::shared_ptr<const std::vector<Index>> order_;  // immutable: shared with copies, which may be of another epoch
};

/// PyTorch's name for a sampler with a rank and a world size.
using DistributedSampler = Sampler;

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/sampler_impl.hpp>
#endif
