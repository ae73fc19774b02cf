#pragma once
/// Copies between the devices of a process: counted, and recorded, so that one graph spans all devices.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/kernels/to_device.hpp>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus {

namespace operations {
struct DeviceCopy {
  static constexpr const char* name = "device_copy";
  static constexpr bool linear = true;
  trace::Traffic back;  ///< traffic class of the gradient's copy
};
}  // namespace operations

namespace detail {

/// A contiguous copy of `x` on `device`; `x` itself if it is contiguous and there already.
template <Scalar T, int Rank, Device From, Device D>
Tensor<T, Rank, D> on_device(const Tensor<T, Rank, From>& x, D device, trace::Traffic traffic) {
  const auto dense = contiguous(x);
  if constexpr (std::is_same_v<From, D>)  // a copy from the host is no traffic between devices
    if (dense.device() != device) trace::sent(dense.device().index, device.index, traffic, dense.bytes());
  return to_device(dense, device);
}

/// Records that `copy`, on any device, is a copy of `x`.
template <AnyVariable X>
auto record_copy(tensor_of<X> copy, const X& x, trace::Traffic back) {
  return record(
      operations::DeviceCopy{back}, std::move(copy),
      [back](const auto& dy, auto dx) { dx->add(on_device(dy, dx->device(), back)); }, x);
}
template <AnyVariable X, Device D>
auto copy_recorded(const X& x, D device, trace::Traffic traffic) {
  return record_copy(on_device(x.value(), device, traffic), GraphVariable(x), traffic);
}

}  // namespace detail

template <class T, int Rank, class D>
auto derivatives(const operations::DeviceCopy& operation, const GraphVariable<T, Rank, D>& dy,
                 const GraphVariable<T, Rank, D>&, const GraphVariable<T, Rank, D>& x) {
  return std::tuple{[&] { return detail::copy_recorded(dy, x.device(), operation.back); }};
}

}  // namespace chorus
