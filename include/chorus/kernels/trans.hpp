#pragma once
/// Whether a matrix product reads an operand transposed.

#include <chorus/core/config.hpp>

namespace chorus::kernels {

/// Whether an operand is read transposed.
enum class Trans : bool { no, yes };

}  // namespace chorus::kernels
