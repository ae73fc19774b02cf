#pragma once
/// Exact sums of products of integers.

namespace chorus::kernels {

/// While true on a thread, convolutions only multiply and add their operands, so that sums of integers are exact as
/// long as they stay below 2^24. Winograd's algorithm is then not used.
inline thread_local constinit bool exact_sums = false;

}  // namespace chorus::kernels
