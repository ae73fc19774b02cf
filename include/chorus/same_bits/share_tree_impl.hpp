#pragma once
/// How numbers are added up in the order of the tree.

#include <bit>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::same_bits {

CHORUS_INLINE bool ShareRange::joins(const ShareRange& next) const {
  return end == next.begin && count() == next.count() && std::has_single_bit(count()) && begin % (2 * count()) == 0;
}

CHORUS_INLINE std::vector<ShareRange> sums_of(ShareRange run, std::size_t shares) {
  ShareTree tree;
  const auto nothing = [](std::size_t) {};
  for (std::size_t share = run.begin; share < run.end; ++share) tree.push({share, share + 1}, nothing);
  if (run == ShareRange{0, shares}) tree.finish(nothing);
  return tree.sums();
}

CHORUS_INLINE double add_shares(std::span<const double> of_share) {
  const auto add = [](double& left, double right) { left += right; };
  TreeSum<double> sum;
  for (std::size_t share = 0; share < of_share.size(); ++share) sum.push({share, share + 1}, of_share[share], add);
  const double* const all = sum.finish(add);
  return all == nullptr ? 0 : *all;
}

}  // namespace chorus::same_bits
