#pragma once
/// Checks the number of canonical shares.

#include <chorus/core/error.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>

namespace chorus::same_bits {

/// Returns `shares`. Throws UsageError for an invalid number, for more devices than shares, and if samples are not
/// along the first axis.
[[gnu::cold]] inline std::size_t checked_shares(int shares, int devices, int dim) {
  check<UsageError>(shares >= 1 && shares <= most_shares, "SameBits: expected 1 to ", most_shares, " shares, got ",
                    shares);
  check<UsageError>(devices <= shares, "SameBits: each of ", devices,
                    " devices needs at least one share: expected at least that many, got ", shares);
  check<UsageError>(dim == 0, "SameBits: a batch is cut along its first axis: expected dim = 0, got ", dim,
                    "; for samples along another axis pass batch_axis<1>(input)");
  return static_cast<std::size_t>(shares);
}

}  // namespace chorus::same_bits
