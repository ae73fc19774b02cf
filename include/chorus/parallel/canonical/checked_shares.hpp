#pragma once
/// The option `canonical_shares` of every policy.

#include <chorus/core/error.hpp>
#include <chorus/core/share_tree.hpp>
#include <cstddef>

namespace chorus::canonical {

/// The number of shares, 0 where there are none. Throws UsageError for a number that is none, where there
/// are more devices than shares, and where samples don't lie along the first axis.
[[gnu::cold]] inline std::size_t checked_shares(int shares, int devices, int dim) {
  check<UsageError>(shares >= 0 && shares <= most_canonical_shares, "canonical_shares: expected 1 to ",
                    most_canonical_shares, ", or 0 for none, got ", shares);
  check<UsageError>(shares == 0 || devices <= shares, "canonical_shares: each of ", devices,
                    " devices takes whole shares: expected at least as many, got ", shares);
  check<UsageError>(shares == 0 || dim == 0,
                    "canonical_shares: a batch is cut along its first axis: expected dim = 0, got ", dim,
                    "; of an input that has its samples along another one let it be batch_axis<1>(input)");
  return static_cast<std::size_t>(shares);
}

}  // namespace chorus::canonical
