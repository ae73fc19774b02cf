#pragma once
/// Sums of canonical shares of several ranks, added up in the order of the tree.

#include <algorithm>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>
#include <vector>

namespace chorus::same_bits {

/// The sums that each rank has of a batch of so many samples: none where its shares have no samples.
inline std::vector<std::vector<ShareRange>> sums_of_ranks(std::size_t shares, std::size_t ranks, std::size_t batch) {
  const std::size_t used = std::min(shares, batch);
  std::vector<std::vector<ShareRange>> sums;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const ShareRange run = shares_of_device(shares, ranks, rank);
    sums.push_back(sums_of({std::min(run.begin, used), std::min(run.end, used)}, used));
  }
  return sums;
}

/// Adds up what ranks have, in place; `total` gets the result. `numbers(rank, k)`: where the k-th sum of a rank lies,
/// asked for from left to right.
template <Device D, class Numbers>
void add_up(const std::vector<std::vector<ShareRange>>& of_ranks, const Numbers& numbers, D device, DType dtype,
            std::size_t count, std::byte* total) {
  const auto add = [&](std::byte* left, const std::byte* right) { add_numbers(device, dtype, count, right, left); };
  TreeSum<std::byte*> sum;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank)
    for (std::size_t k = 0; k < of_ranks[rank].size(); ++k) sum.push(of_ranks[rank][k], numbers(rank, k), add);
  if (auto* const* const all = sum.finish(add); all != nullptr && *all != total)
    copy_bytes(device, total, device, *all, count * size_of(dtype));
}

}  // namespace chorus::same_bits
