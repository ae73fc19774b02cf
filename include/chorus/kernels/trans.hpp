#pragma once
/// The orientation in which a matrix product reads an operand.

#include <chorus/core/config.hpp>

namespace chorus::kernels {

/// Whether an operand is read transposed.
enum class Trans : bool { no, yes };

}  // namespace chorus::kernels
