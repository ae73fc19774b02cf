#pragma once
/// Choices by a mask: where and masked_fill.

#include <chorus/ops/pointwise.hpp>

namespace chorus {

namespace functors {

/// a where the mask is not 0, else b.
struct Where {
  template <class S>
  CHORUS_HD S operator()(const S& mask, const S& a, const S& b) const {
    return where(mask == 0, b, a);
  }
};

/// The value where the mask is not 0, else x.
struct MaskedFill {
  double value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& mask, const S& x) const {
    return where(mask == 0, x, S(real_of<S>(value)));
  }
};

}  // namespace functors

namespace detail {
// The mask as 0 and 1 in the operands' scalar type: element-wise kernels work in one.
template <Real T, int Rank, Device D>
Tensor<T, Rank, D> as_numbers(const Tensor<bool, Rank, D>& mask) {
  const auto dense = contiguous(mask);
  auto out = Tensor<T, Rank, D>::empty(mask.shape(), mask.device());
  kernels::convert(mask.device(), dense.numel(), dense.data(), out.data());
  return out;
}
}  // namespace detail

/// a where the mask is true, else b; the three broadcast. Throws ShapeError where they don't.
template <int Rank, Device D, Operand A, Operand B>
auto where(const Tensor<bool, Rank, D>& mask, const A& a, const B& b) {
  detail::check_defined("where", mask, value_of(a), value_of(b));
  const auto numbers = detail::as_numbers<typename tensor_of<A>::value_type>(mask);
  return detail::pointwise("where", functors::Where{}, numbers, a, b);
}

/// The value where the mask is true, else x; they broadcast. Throws ShapeError where they don't.
template <Operand X, int Rank, Device D>
auto masked_fill(const X& x, const Tensor<bool, Rank, D>& mask, double value) {
  detail::check_defined("masked_fill", value_of(x), mask);
  const auto numbers = detail::as_numbers<typename tensor_of<X>::value_type>(mask);
  return detail::pointwise("masked_fill", functors::MaskedFill{value}, numbers, x);
}

}  // namespace chorus
