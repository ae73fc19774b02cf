#pragma once
/// A sampler with weights, for example to draw rare classes more often.

#include <algorithm>
#include <bit>
#include <chorus/core/error.hpp>
#include <chorus/data/random_stream.hpp>
#include <chorus/data/sampler.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace chorus::data {

/// Options of WeightedRandomSampler.
struct WeightedOptions {
  Index num_samples = 0;    ///< samples per epoch; 0: the dataset's size
  bool replacement = true;  ///< whether a sample may repeat in an epoch
};

/// Draws an epoch's samples with probabilities proportional to `weights`, like PyTorch's WeightedRandomSampler:
/// `DataLoader loader{train, WeightedRandomSampler{net.sampler(train), weights}, {...}}`. The order depends only on
/// seed, epoch and weights. It is split into shares like the other sampler's order: with equal weights, any number of
/// ranks under any policy sees the same global batches.
class WeightedRandomSampler : public Sampler {
 public:
  /// `weights`: one per sample, at least 0. Throws UsageError for other weights, or if fewer than num_samples are
  /// positive and samples may not repeat.
  WeightedRandomSampler(Sampler shares, const std::vector<double>& weights, const WeightedOptions& options = {})
      : Sampler(std::move(shares)) {
    const Index count = options.num_samples == 0 ? dataset_size() : options.num_samples;
    check<UsageError>(count >= 0, "WeightedRandomSampler: expected at least 0 samples in an epoch, got ", count);
    auto sums = std::make_shared<const std::vector<std::uint64_t>>(tree(weights, options.replacement ? 1 : count));
    draw_by(count, options.replacement, [sums, count, again = options.replacement](std::uint64_t seed, Index epoch) {
      return draw(*sums, count, again, seed, epoch);
    });
  }

 private:
  /// A binary tree: node n is the sum of nodes 2 n and 2 n + 1; the leaves are the weights as integers, so that sums
  /// are exact and every machine draws the same.
  std::vector<std::uint64_t> tree(const std::vector<double>& weights, Index at_least) const {
    check<UsageError>(std::cmp_equal(weights.size(), dataset_size()), "WeightedRandomSampler: expected ",
                      dataset_size(), " weights, one for each sample, got ", weights.size());
    double sum = 0;
    Index positive = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      check<UsageError>(std::isfinite(weights[i]) && weights[i] >= 0,
                        "WeightedRandomSampler: expected weights of at least 0, got ", weights[i], " for sample ", i);
      sum += weights[i];
      positive += weights[i] > 0;
    }
    check<UsageError>(std::isfinite(sum), "WeightedRandomSampler: the sum of the weights is too large");
    check<UsageError>(positive >= at_least, "WeightedRandomSampler: expected at least ", at_least,
                      " weights above 0, got ", positive);
    const std::size_t leaves = std::bit_ceil(std::max(weights.size(), std::size_t{1}));
    std::vector<std::uint64_t> out(2 * leaves);
    for (std::size_t i = 0; i < weights.size(); ++i)
      if (weights[i] > 0)
        out[leaves + i] = std::max(std::uint64_t{1}, static_cast<std::uint64_t>(weights[i] / sum * 0x1p52));
    for (std::size_t n = leaves - 1; n > 0; --n) out[n] = out[2 * n] + out[2 * n + 1];
    return out;
  }

  static std::vector<Index> draw(std::vector<std::uint64_t> sums, Index count, bool again, std::uint64_t seed,
                                 Index epoch) {
    const std::size_t leaves = sums.size() / 2;
    std::vector<Index> order;
    for (Index i = 0; i < count; ++i) {
      RandomStream random(seed, Purpose::weigh, i, epoch);
      std::uint64_t left = scaled(random.long_word(), sums[1]);
      std::size_t n = 1;
      while (n < leaves) {
        n *= 2;
        if (left >= sums[n]) left -= sums[n++];
      }
      order.push_back(static_cast<Index>(n - leaves));
      if (again) continue;
      for (const auto weight = sums[n]; n > 0; n /= 2) sums[n] -= weight;
    }
    return order;
  }

  /// The upper half of word * total: an integer in [0, total).
  static std::uint64_t scaled(std::uint64_t word, std::uint64_t total) {
    const std::uint64_t low = word & 0xFFFFFFFFu, high = word >> 32;
    const std::uint64_t a = low * (total & 0xFFFFFFFFu), b = low * (total >> 32), c = high * (total & 0xFFFFFFFFu);
    const std::uint64_t middle = (a >> 32) + (b & 0xFFFFFFFFu) + (c & 0xFFFFFFFFu);
    return high * (total >> 32) + (b >> 32) + (c >> 32) + (middle >> 32);
  }
};

}  // namespace chorus::data
