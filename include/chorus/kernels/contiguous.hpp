#pragma once
/// Dense copies.

#include <chorus/kernels/copy.hpp>
#include <chorus/tensor/tensor.hpp>

namespace chorus {

/// A copy of the numbers, dense, in memory of its own; undefined where x is.
template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> clone(const Tensor<T, Rank, D>& x) {
  if (!x.defined()) return x;
  auto out = Tensor<T, Rank, D>::empty(x.shape(), x.device());
  if (x.is_contiguous())
    copy_bytes(x.device(), out.data(), x.device(), x.data(), x.bytes());
  else
    kernels::copy_strided(x.device(), x.shape(), x.data(), x.strides(), out.data());
  return out;
}

/// The same numbers in dense row-major memory: `x` itself where it already is.
template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> contiguous(const Tensor<T, Rank, D>& x) {
  return x.is_contiguous() ? x : clone(x);
}

}  // namespace chorus
