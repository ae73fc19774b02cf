#pragma once
/// where and masked_fill.

#include <chorus/kernels/transform.hpp>
#include <chorus/ops/pointwise.hpp>
#include <type_traits>

namespace chorus {

namespace functors {

/// a if the mask is not 0, else b.
struct Where {
  template <class S>
  CHORUS_HD S operator()(const S& mask, const S& a, const S& b) const {
    return where(mask == 0, b, a);
  }
};

/// The same for integers and bools.
struct Choose {
  template <class T>
  CHORUS_HD T operator()(bool mask, const T& a, const T& b) const {
    return mask ? a : b;
  }
};

/// The value if the mask is not 0, else x.
struct MaskedFill {
  double value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& mask, const S& x) const {
    return where(mask == 0, x, S(real_of<S>(value)));
  }
};

}  // namespace functors

namespace detail {
// The mask as 0 and 1 in the operands' scalar type, which element-wise kernels need.
template <Real T, int Rank, Device D>
Tensor<T, Rank, D> as_numbers(const Tensor<bool, Rank, D>& mask) {
  const auto dense = contiguous(mask);
  auto out = Tensor<T, Rank, D>::empty(mask.shape(), mask.device());
  kernels::convert(mask.device(), dense.numel(), dense.data(), out.data());
  return out;
}
}  // namespace detail

/// a where the mask is true, else b; the three broadcast. Throws ShapeError if they don't.
template <int Rank, Device D, Operand A, Operand B>
auto where(const Tensor<bool, Rank, D>& mask, const A& a, const B& b) {
  using T = typename tensor_of<A>::value_type;
  detail::check_defined("where", mask, value_of(a), value_of(b));
  if constexpr (Real<T>) {
    const auto numbers = detail::as_numbers<T>(mask);
    return detail::pointwise("where", functors::Where{}, numbers, a, b);
  } else {
    static_assert(of_one_type<A, B>, "where: operands have different scalar types; to<float>(x) converts one");
    const auto shape = broadcast_shapes("where", broadcast_shapes("where", mask.shape(), a.shape()), b.shape());
    detail::check_same_device("where", mask, a, b);
    const auto choose = detail::broadcast_to(mask, shape);
    const auto left = detail::broadcast_to(a, shape);
    const auto right = detail::broadcast_to(b, shape);
    auto out = std::remove_const_t<decltype(left)>::empty(shape, mask.device());
    kernels::transform(mask.device(), functors::Choose{}, out.numel(), out.data(), choose.data(), left.data(),
                       right.data());
    return record("where", std::move(out), nullptr, mask, a, b);
  }
}

/// The value where the mask is true, else x; they broadcast. Throws ShapeError if they don't.
template <Operand X, int Rank, Device D>
auto masked_fill(const X& x, const Tensor<bool, Rank, D>& mask, double value) {
  detail::check_defined("masked_fill", value_of(x), mask);
  const auto numbers = detail::as_numbers<typename tensor_of<X>::value_type>(mask);
  return detail::pointwise("masked_fill", functors::MaskedFill{value}, numbers, x);
}

/// where with a number instead of a or b; it is converted to the operand's type.
template <int Rank, Device D, Operand B>
auto where(const Tensor<bool, Rank, D>& mask, math::Arithmetic auto number, const B& b) {
  using T = typename tensor_of<B>::value_type;
  return where(mask, Tensor<T, 0, D>::full({}, static_cast<T>(number), mask.device()), b);
}
template <int Rank, Device D, Operand A>
auto where(const Tensor<bool, Rank, D>& mask, const A& a, math::Arithmetic auto number) {
  using T = typename tensor_of<A>::value_type;
  return where(mask, a, Tensor<T, 0, D>::full({}, static_cast<T>(number), mask.device()));
}

}  // namespace chorus
