#pragma once
/// Element-wise elementary functions of Tensors, Variables and Parameters of any rank.

#include <chorus/ops/pointwise.hpp>

namespace chorus {

#define CHORUS_UNARY(NAME, FUNCTOR)                          \
  template <Operand X>                                       \
  auto NAME(const X& x) {                                    \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, x); \
  }
/// |x|; the gradient at 0 is 0.
CHORUS_UNARY(abs, Abs)
CHORUS_UNARY(square, Square)
CHORUS_UNARY(sqrt, Sqrt)
/// 1 / sqrt(x)
CHORUS_UNARY(rsqrt, Rsqrt)
/// 1 / x
CHORUS_UNARY(reciprocal, Reciprocal)
CHORUS_UNARY(exp, Exp)
CHORUS_UNARY(log, Log)
/// log(1 + x), accurate for small x.
CHORUS_UNARY(log1p, Log1p)
CHORUS_UNARY(sin, Sin)
CHORUS_UNARY(cos, Cos)
CHORUS_UNARY(tanh, Tanh)
/// The error function.
CHORUS_UNARY(erf, Erf)
#undef CHORUS_UNARY

}  // namespace chorus
