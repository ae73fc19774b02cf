#pragma once
/// The residual of a compressed gradient.

#include <chorus/kernels/scalar_math.hpp>
#include <cmath>

namespace chorus::detail {

/// gradient - sent; 0 if either is not finite, since the residual would stay so for ever.
struct NotSent {
  template <class S>
  CHORUS_HD S operator()(const S& gradient, const S& sent) const {
    using namespace math;
    using R = real_of<S>;
    const S rest = gradient - sent;
    return where(rest < R(INFINITY), where(rest > -R(INFINITY), rest, S(0)), S(0));
  }
};

}  // namespace chorus::detail
