#pragma once
/// Sums of products of whole numbers, without rounding error.

namespace chorus::kernels {

/// While it is true on a thread, convolutions multiply and add only their operands, so that sums of whole numbers are
/// exact as long as they stay below 2^24. Winograd's methods don't.
inline thread_local constinit bool exact_sums = false;

}  // namespace chorus::kernels
