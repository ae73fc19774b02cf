#pragma once
/// Makes an epoch's order and splits it.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/shares.hpp>
#include <chorus/data/random_stream.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/kernels/random.hpp>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

namespace chorus::data {

CHORUS_INLINE Sampler::Sampler(Index dataset_size, SamplerOptions options)
    : size_(dataset_size), length_(dataset_size), options_(std::move(options)) {
  check<UsageError>(size_ >= 0, "Sampler: expected a dataset of at least 0 samples, got ", size_);
  check_options();
  make_order();
}

CHORUS_INLINE void Sampler::check_options() const {
  check<UsageError>(options_.world_size >= 1, "Sampler: expected a world size of at least 1, got ",
                    options_.world_size);
  check<UsageError>(options_.rank >= 0 && options_.rank < options_.world_size, "Sampler: rank ", options_.rank,
                    " is not in [0, ", options_.world_size, "), the ranks of a world of ", options_.world_size);
  const int shares = options_.shares;
  check<UsageError>(shares == 0 || (shares >= options_.world_size && shares <= most_shares),
                    "Sampler: expected 0 shares, or at least one for each of ", options_.world_size,
                    " ranks and at most ", most_shares, ", got ", shares);
  check<UsageError>(
      shares == 0 || !options_.padding,
      "Sampler: padding is for shares by rank, and not supported for a batch that is cut into other shares");
}

CHORUS_INLINE void Sampler::set_rank(int rank, int world_size) {
  options_.rank = rank;
  options_.world_size = world_size;
  check_options();
}

CHORUS_INLINE void Sampler::set_epoch(Index epoch) {
  check<UsageError>(epoch >= 0, "Sampler: expected an epoch of at least 0, got ", epoch);
  if (std::exchange(epoch_, epoch) != epoch && (options_.shuffle || draw_)) make_order();
}

CHORUS_INLINE Index Sampler::global_batches(Index batch, bool drop_last) const {
  check_batch(batch);
  return length_ / batch + (!drop_last && length_ % batch != 0);  // without overflow for any batch size
}

CHORUS_INLINE std::span<const Index> Sampler::share(Index b, Index batch) const& {
  return part(b, batch, options_.rank, options_.rank + 1);
}

CHORUS_INLINE std::span<const Index> Sampler::whole(Index b, Index batch) const& {
  return part(b, batch, 0, options_.world_size);
}

CHORUS_INLINE std::span<const Index> Sampler::part(Index b, Index batch, int first_rank, int last_rank) const {
  check_batch(batch);
  check<UsageError>(b >= 0 && b * batch < length_, "Sampler: batch ", b, " of ", batch, " does not exist in ", length_,
                    " samples");
  const Index count = global_size(b, batch);
  const Index begin = boundary(count, first_rank), end = boundary(count, last_rank);
  return std::span(*order_).subspan(static_cast<std::size_t>(b * batch + begin), static_cast<std::size_t>(end - begin));
}

CHORUS_INLINE Index Sampler::stream(Index b, Index batch, Index i) const {
  const Index place = b * batch + share_begin(b, batch) + i;
  return repeats_ ? place : (*order_)[static_cast<std::size_t>(place)];
}

CHORUS_INLINE void Sampler::draw_by(Index length, bool repeats, Draw draw) {
  length_ = length;
  repeats_ = repeats;
  draw_ = std::move(draw);
  make_order();
}

CHORUS_INLINE void Sampler::check_batch(Index batch) const {
  check<UsageError>(batch >= 1, "Sampler: expected a global batch of at least 1 sample, got ", batch);
}

CHORUS_INLINE Index Sampler::boundary(Index count, int rank) const {
  const Index world = options_.world_size;
  if (options_.padding) return rank * ((count + world - 1) / world);
  const auto ranks = static_cast<std::size_t>(world), at = static_cast<std::size_t>(rank);
  if (options_.shares == 0) return chorus::share_begin(count, ranks, at);
  const auto shares = static_cast<std::size_t>(options_.shares);
  const auto first = chorus::share_begin(options_.shares, ranks, at);  // the first share of this rank
  return chorus::share_begin(count, shares, static_cast<std::size_t>(first));
}

CHORUS_INLINE void Sampler::make_order() {
  std::vector<Index> order;
  if (draw_) {
    order = draw_(options_.seed, epoch_);
  } else if (options_.shuffle) {
    const auto key = options_.seed ^ static_cast<std::uint64_t>(Purpose::shuffle);
    order = kernels::permutation(key, static_cast<std::uint64_t>(epoch_), size_);
  } else {
    order.resize(static_cast<std::size_t>(length_));
    std::iota(order.begin(), order.end(), Index{0});
  }
  // Padding reads up to world_size - 1 samples beyond the end: the first ones again.
  if (options_.padding && length_ > 0)
    for (int i = 0; i + 1 < options_.world_size; ++i) order.push_back(order[static_cast<std::size_t>(i)]);
  order_ = std::make_shared<const std::vector<Index>>(std::move(order));
}

}  // namespace chorus::data
