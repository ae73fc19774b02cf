#pragma once
/// sign, floor, ceil, round. Their gradients are 0.

#include <chorus/ops/pointwise.hpp>
#include <limits>

namespace chorus {

namespace functors {

/// 1, 0 or -1; 0 for NaN, as in PyTorch.
struct Sign {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x > 0, S(1), where(x < 0, S(-1), S(0)));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S&, const S&) const {
    return {{S(0)}};
  }
};

/// The nearest integer, the even one of two. Adding 2^23, or 2^52 for double, leaves no bits for fractions; numbers
/// from there on are integers.
struct Round {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    constexpr auto whole = 1 / std::numeric_limits<real_of<S>>::epsilon();
    const S above = abs(x), near = (above + whole) - whole;
    return where(above < whole, where(x < 0, -near, where(x > 0, near, x)), x);
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S&, const S&) const {
    return {{S(0)}};
  }
};

/// The largest integer that is not above x.
struct Floor {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    const S near = Round{}(x);
    return where(near > x, near - 1, near);
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S&, const S&) const {
    return {{S(0)}};
  }
};

/// The smallest integer that is not below x.
struct Ceil {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return -Floor{}(-x);
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S&, const S&) const {
    return {{S(0)}};
  }
};

}  // namespace functors

/// 1, 0 or -1; 0 for NaN.
template <Operand X>
auto sign(const X& x) {
  return detail::pointwise("sign", functors::Sign{}, x);
}
/// The largest integer that is not above x.
template <Operand X>
auto floor(const X& x) {
  return detail::pointwise("floor", functors::Floor{}, x);
}
/// The smallest integer that is not below x.
template <Operand X>
auto ceil(const X& x) {
  return detail::pointwise("ceil", functors::Ceil{}, x);
}
/// The nearest integer; halves go to the even one.
template <Operand X>
auto round(const X& x) {
  return detail::pointwise("round", functors::Round{}, x);
}

}  // namespace chorus
