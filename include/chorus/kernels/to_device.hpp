#pragma once
/// Copies of tensors on other devices, of the same or another kind.

#include <type_traits>

#include <chorus/kernels/contiguous.hpp>

namespace chorus {

/// A contiguous copy of `x` on `device`; `x` itself if it is there already.
template <Scalar T, int Rank, Device From, Device To>
Tensor<T, Rank, To> to_device(const Tensor<T, Rank, From>& x, To device) {
  if constexpr (std::is_same_v<From, To>)
    if (!x.defined() || x.device() == device) return x;
  if (!x.defined()) return {};
  const auto dense = contiguous(x);
  auto out = Tensor<T, Rank, To>::empty(dense.shape(), device);
  copy_bytes(device, out.data(), dense.device(), dense.data(), dense.bytes());
  return out;
}

}  // namespace chorus
