#pragma once
/// Dense copies of strided views.

#include <chorus/kernels/copy.hpp>
#include <chorus/tensor/tensor.hpp>

namespace chorus::inline CHORUS_ABI {

/// The same numbers in dense row-major memory: `x` itself where it already is.
template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> contiguous(const Tensor<T, Rank, D>& x) {
  if (!x.defined() || x.is_contiguous()) return x;
  auto out = Tensor<T, Rank, D>::empty(x.shape(), x.device());
  kernels::copy_strided(x.device(), x.shape(), x.data(), x.strides(), out.data());
  return out;
}

}  // namespace chorus
