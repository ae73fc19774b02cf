#pragma once
/// A linear layer of a few rows.

#include <chorus/core/config.hpp>
#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <concepts>

namespace chorus::kernels {

inline constexpr int few_rows = 4;

/// y = x wᵀ + bias for at most `few_rows` rows; x: [m, k], w: [n, k], y: [m, n], bias: [n] or null. Weights are read
/// once, in place. The order of sums is not gemm's: the last bits may differ from those in a larger batch.
template <std::floating_point T>
void linear_of_few_rows(Cpu, Index m, Index n, Index k, const T* x, const T* w, T* y, const T* bias);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/few_rows.hpp>
#endif
