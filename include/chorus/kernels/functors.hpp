#pragma once
/// The library's element-wise functions, with PyTorch's definitions. Each is written once for numbers, Packs and, for
/// gradients, Duals. Options are members.

#include <chorus/autograd/functor_gradient.hpp>
#include <chorus/kernels/scalar_math.hpp>

namespace chorus::functors {

// `linear`: constant derivatives; `passes_gradient`: they are 1. `bilinear`: each derivative depends only on the other
// input. Backward does not check inputs that it does not need for writes.

using namespace math;  // for plain numbers, which have no argument-dependent lookup

struct Add {
  static constexpr bool linear = true, passes_gradient = true;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a + b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S&, const S&) const {
    return {{dy, dy}};
  }
};

struct Sub {
  static constexpr bool linear = true;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a - b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S&, const S&) const {
    return {{dy, -dy}};
  }
};

struct Mul {
  static constexpr bool bilinear = true;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a * b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& a, const S& b) const {
    return {{dy * b, dy * a}};
  }
};

struct Div {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a / b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& a, const S& b) const {
    return {{dy / b, -dy * (a / b / b)}};
  }
};

/// The maximum; a tie gives half of the gradient to each side.
struct Maximum {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return max(a, b);
  }
};

struct Minimum {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return min(a, b);
  }
};

/// base^exponent
struct Pow {
  template <class S>
  CHORUS_HD S operator()(const S& base, const S& exponent) const {
    return pow(base, exponent);
  }
};

struct AddScalar {
  static constexpr bool linear = true;
  double value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x + real_of<S>(value);
  }
};

struct MulScalar {
  static constexpr bool linear = true;
  double value = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * real_of<S>(value);
  }
};

/// x^exponent; fast for -1, -0.5, 0, 0.5, 1, 2, 3.
struct PowScalar {
  double exponent = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return pow(x, real_of<S>(exponent));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    const auto e = static_cast<real_of<S>>(exponent);
    if (e == 0) return {{S(0) * dy}};
    return {{pow(x, e - 1) * e * dy}};
  }
};

struct Neg {
  static constexpr bool linear = true;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return -x;
  }
};

struct Square {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * x;
  }
};

struct Reciprocal {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return 1 / x;
  }
};

// Functors that call one function of all number types.
#define CHORUS_FUNCTOR(NAME, FUNCTION)         \
  struct NAME {                                \
    template <class S>                         \
    CHORUS_HD S operator()(const S& x) const { \
      return FUNCTION(x);                      \
    }                                          \
  }
CHORUS_FUNCTOR(Abs, abs);
CHORUS_FUNCTOR(Sqrt, sqrt);
CHORUS_FUNCTOR(Rsqrt, rsqrt);
CHORUS_FUNCTOR(Exp, exp);
CHORUS_FUNCTOR(Log, log);
CHORUS_FUNCTOR(Log1p, log1p);
CHORUS_FUNCTOR(Sin, sin);
CHORUS_FUNCTOR(Cos, cos);
CHORUS_FUNCTOR(Tanh, tanh);
CHORUS_FUNCTOR(Erf, erf);
CHORUS_FUNCTOR(Sigmoid, sigmoid);
#undef CHORUS_FUNCTOR

/// max(x, 0); NaN propagates. The gradient at 0 is 0.
struct Relu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= 0, S(0), x);
  }
};

/// x clipped to [min, max]; at finite limits the gradient is 0. NaN propagates without a gradient.
struct Clamp {
  double min = 0, max = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x < real_of<S>(min), S(real_of<S>(min)), where(x > real_of<S>(max), S(real_of<S>(max)), x));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    const auto above = min == -INFINITY ? x >= real_of<S>(min) : x > real_of<S>(min);
    const auto below = max == INFINITY ? x <= real_of<S>(max) : x < real_of<S>(max);
    return {{where(above, where(below, dy, S(0)), S(0))}};
  }
};

struct Relu6 : Clamp {
  CHORUS_HD constexpr Relu6() : Clamp{0, 6} {}
};

struct LeakyRelu {
  double slope = 0.01;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x > 0, x, x * real_of<S>(slope));
  }
};

/// x for positive x, else alpha (exp(x) - 1).
struct Elu {
  double alpha = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x > 0, x, expm1(x) * real_of<S>(alpha));
  }
};

/// x sigmoid(x), also called swish.
struct Silu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * sigmoid(x);
  }
};

/// x Φ(x); Φ is the standard normal distribution function (Hendrycks, Gimpel 2016).
struct Gelu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * (erf(x * real_of<S>(0.70710678118654752)) + 1) * real_of<S>(0.5);
  }
};

/// GELU's approximation 0.5 x (1 + tanh(u)), u = sqrt(2/π) (x + 0.044715 x³), which is x sigmoid(2 u).
struct GeluTanh {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return x * sigmoid(x * (x * x * R(2 * 0.79788456080286536 * 0.044715) + R(2 * 0.79788456080286536)));
  }
};

/// log(1 + exp(beta x)) / beta; x itself if beta x exceeds the threshold.
struct Softplus {
  double beta = 1, threshold = 20;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    const S scaled = x * R(beta);
    return where(scaled > R(threshold), x, softplus(scaled) / R(beta));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    using R = real_of<S>;
    const S scaled = x * R(beta);
    return {{where(scaled > R(threshold), dy, dy * sigmoid(scaled))}};
  }
};

/// x tanh(softplus(x)) (Misra 2019).
struct Mish {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * tanh(softplus(x));
  }
};

struct LogSigmoid {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return -softplus(-x);
  }
};

/// relu6(x + 3) / 6
struct Hardsigmoid {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= -3, S(0), where(x >= 3, S(1), (x + 3) / 6));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{where(x > -3, where(x < 3, dy / 6, S(0)), S(0))}};
  }
};

/// x relu6(x + 3) / 6. The gradient is 0 for x <= -3 and 1 for x >= 3.
struct Hardswish {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x < -3, S(0), where(x <= 3, x * (x + 3) / 6, x));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{where(x <= -3, S(0), where(x >= 3, dy, dy * (x / 3 + real_of<S>(0.5))))}};
  }
};

}  // namespace chorus::functors
