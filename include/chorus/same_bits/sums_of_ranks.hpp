#pragma once
/// Adds up the canonical shares' sums of several ranks in the order of the tree.

#include <algorithm>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>
#include <vector>

namespace chorus::same_bits {

/// By rank: its sums of a batch of that many samples; none if its shares have no samples.
inline std::vector<std::vector<ShareRange>> sums_of_ranks(std::size_t shares, std::size_t ranks, std::size_t batch) {
  const std::size_t used = std::min(shares, batch);
  std::vector<std::vector<ShareRange>> sums;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const ShareRange run = shares_of_device(shares, ranks, rank);
    sums.push_back(sums_of({std::min(run.begin, used), std::min(run.end, used)}, used));
  }
  return sums;
}

/// Adds up the ranks' sums in place, with the result in `total`. `numbers(rank, k)`: the address of a rank's k-th sum;
/// called from left to right.
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
