#pragma once
/// Contiguous copies, and writes through a view.

#include <chorus/kernels/copy.hpp>
#include <chorus/tensor/tensor.hpp>
#include <type_traits>

namespace chorus {

/// A contiguous copy in new memory; undefined if x is.
template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> clone(const Tensor<T, Rank, D>& x) {
  if (!x.defined()) return x;
  auto out = Tensor<T, Rank, D>::empty(x.shape(), x.device());
  if (x.is_contiguous() && !std::is_same_v<D, Cpu>)  // on the CPU threads share the kernel's copy
    copy_bytes(x.device(), out.data(), x.device(), x.data(), x.bytes());
  else
    kernels::copy_strided(x.device(), x.shape(), x.data(), x.strides(), out.data());
  return out;
}

/// x in contiguous row-major memory: `x` itself if it already is.
template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> contiguous(const Tensor<T, Rank, D>& x) {
  return x.is_contiguous() ? x : clone(x);
}

/// Implements `x[0] = y`: see Tensor's assignment.
template <Scalar T, int Rank, Device D, class Y>
void write_through(const Tensor<T, Rank, D>& x, const Y& y) {
  if constexpr (std::is_arithmetic_v<Y>) {
    static_assert(Real<T> || std::is_integral_v<Y>, "x[i] = number: expected an integer for a tensor of integers");
    write_through(x, Tensor<T, 0, D>::full({}, static_cast<T>(y), x.defined() ? x.device() : D{}));
  } else if constexpr (!AnyTensor<Y>) {
    static_assert(AnyTensor<Y>, "x[i] = y: expected a Tensor or a number; for a Variable use value()");
  } else if constexpr (!std::is_same_v<typename Y::value_type, T>) {
    static_assert(std::is_same_v<typename Y::value_type, T>,
                  "x[i] = y: expected one scalar type; to<float>(y) converts");
  } else if constexpr (!std::is_same_v<typename Y::device_type, D>) {
    static_assert(std::is_same_v<typename Y::device_type, D>,
                  "x[i] = y: expected one kind of device; to_device(y, device) copies");
  } else {
    static_assert(Y::rank <= Rank, "x[i] = y: the right side has more axes than the left side");
    detail::check_defined("x[i] = y", x, y);
    check<UsageError>(x.storage().owners() > 1, "x[i] = y: the left side is a temporary of shape ", x.shape(),
                      ": expected a view of a named tensor, as x[i] or x.slice(...)");
    bool fits = true;
    for (std::size_t axis = 0; axis < x.shape().size(); ++axis) {
      check<UsageError>(x.strides()[axis] != 0 || x.shape()[axis] <= 1,
                        "x[i] = y: expected memory for each element, got an expanded tensor of shape ", x.shape());
      const std::size_t begin = x.shape().size() - y.shape().size();
      if (axis >= begin) fits = fits && (y.shape()[axis - begin] == x.shape()[axis] || y.shape()[axis - begin] == 1);
    }
    check<ShapeError>(fits, "x[i] = y: expected y to broadcast to shape ", x.shape(), ", got shape ", y.shape());
    // A source that shares the written memory, or is on another device, is copied first.
    const bool apart = y.storage().memory().block() != x.storage().memory().block();
    auto right = contiguous((apart ? y : clone(y)).expand(x.shape()));
    if (right.device() != x.device()) {
      auto near = Tensor<T, Rank, D>::empty(x.shape(), x.device());
      copy_bytes(x.device(), near.data(), right.device(), right.data(), right.bytes());
      right = near;
    }
    if (x.is_contiguous())
      copy_bytes(x.device(), x.data(), x.device(), right.data(), x.bytes());
    else
      kernels::scatter_strided(x.device(), x.shape(), right.data(), x.data(), x.strides());
    x.storage().wrote();
  }
}

/// The compile error if `y` can't be assigned to a Tensor.
template <Scalar T, int Rank, Device D, class Y>
void refuse_assignment(const Tensor<T, Rank, D>&, const Y&) {
  static_assert(
      std::is_same_v<Y, void>,
      "x = y: expected a Tensor of the same scalar type, rank and device. Declare x as auto or Variable(x) to assign a "
      "Variable; x.slice(0, 0, n) = y writes into x's memory, and parameter.assign(y) into a parameter's");
}

}  // namespace chorus
