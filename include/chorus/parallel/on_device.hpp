#pragma once
/// Copies between the devices of a process, counted.

#include <chorus/core/trace.hpp>
#include <chorus/kernels/to_device.hpp>
#include <type_traits>

namespace chorus::inline CHORUS_ABI::detail {

/// A dense copy of `x` on `device`; `x` itself where it is one already.
template <Scalar T, int Rank, Device From, Device D>
Tensor<T, Rank, D> on_device(const Tensor<T, Rank, From>& x, D device, trace::Traffic traffic) {
  const auto dense = contiguous(x);
  if constexpr (std::is_same_v<From, D>)  // what comes from the host is no traffic between devices
    if (dense.device() != device) trace::sent(dense.device().index, traffic, dense.bytes());
  return to_device(dense, device);
}

}  // namespace chorus::inline CHORUS_ABI::detail
