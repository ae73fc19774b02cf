#pragma once
/// Less common activations, with PyTorch's definitions.

#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus {

namespace functors {

/// scale (x, or alpha (exp(x) - 1) for x <= 0). The constants keep mean 0 and variance 1 (Klambauer et al. 2017).
struct Selu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return where(x > 0, x * R(1.0507009873554805), expm1(x) * R(1.6732632423543772 * 1.0507009873554805));
  }
};
/// x, or alpha (exp(x / alpha) - 1) for x <= 0 (Barron 2017).
struct Celu {
  double alpha = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return where(x > 0, x, expm1(x * R(1 / alpha)) * R(alpha));
  }
};
/// x / (1 + |x|)
struct Softsign {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x / (1 + abs(x));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    const S below = 1 + abs(x);
    return {{dy / below / below}};
  }
};
/// x - tanh(x)
struct Tanhshrink {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x - tanh(x);
  }
};
/// x outside of [-lambda, lambda], else 0.
struct Hardshrink {
  double lambda = 0.5;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(abs(x) <= real_of<S>(lambda), S(0), x);
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{where(abs(x) > real_of<S>(lambda), dy, S(0))}};
  }
};
/// x moved by lambda towards 0, but not beyond.
struct Softshrink {
  double lambda = 0.5;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return where(x > R(lambda), x - R(lambda), where(x < R(-lambda), x + R(lambda), x * 0));  // NaN stays
  }
};
/// x above the threshold, else `value`.
struct Threshold {
  double threshold = 0, value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= real_of<S>(threshold), S(real_of<S>(value)), x);
  }
};
/// x for positive x, else slope x with a learned slope (He et al. 2015).
struct Prelu {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& slope) const {
    return where(x > 0, x, x * slope);
  }
};

}  // namespace functors

/// elu with the constants of Klambauer et al. 2017, which keep mean 0 and variance 1.
template <Operand X>
auto selu(const X& x) {
  return detail::pointwise("selu", functors::Selu{}, x);
}
/// x, or alpha (exp(x / alpha) - 1) for x <= 0. Throws UsageError if alpha is 0.
template <Operand X>
auto celu(const X& x, double alpha = 1) {
  check<UsageError>(alpha != 0, "celu: expected an alpha other than 0");
  return detail::pointwise("celu", functors::Celu{alpha}, x);
}
/// x / (1 + |x|).
template <Operand X>
auto softsign(const X& x) {
  return detail::pointwise("softsign", functors::Softsign{}, x);
}
/// x - tanh(x).
template <Operand X>
auto tanhshrink(const X& x) {
  return detail::pointwise("tanhshrink", functors::Tanhshrink{}, x);
}
/// x if |x| > lambda, else 0.
template <Operand X>
auto hardshrink(const X& x, double lambda = 0.5) {
  return detail::pointwise("hardshrink", functors::Hardshrink{lambda}, x);
}
/// x moved by lambda towards 0; 0 if |x| <= lambda.
template <Operand X>
auto softshrink(const X& x, double lambda = 0.5) {
  return detail::pointwise("softshrink", functors::Softshrink{lambda}, x);
}
/// x if x > above, else value.
template <Operand X>
auto threshold(const X& x, double above, double value) {
  return detail::pointwise("threshold", functors::Threshold{above, value}, x);
}

/// x: [batch, channels, ...], slope: [channels] or [1]. Throws ShapeError if the channels differ.
template <Operand X, Operand W>
auto prelu(const X& x, const W& slope) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 2 && tensor_of<W>::rank == 1,
                "prelu: expected an input [batch, channels, ...] and a slope [channels]");
  Shape<rank - 1> per_channel{};
  per_channel.fill(1);
  per_channel[0] = value_of(slope).numel();
  check<ShapeError>(per_channel[0] == 1 || per_channel[0] == value_of(x).size(1), "prelu: an input of shape ",
                    value_of(x).shape(), " does not fit ", per_channel[0], " slopes");
  return detail::pointwise("prelu", functors::Prelu{}, x, reshape(slope, per_channel));
}

/// The first half of an axis times the sigmoid of the second (Dauphin et al. 2017). Throws ShapeError for an odd size.
template <Operand X>
auto glu(const X& x, Index axis = -1) {
  const Index size = value_of(x).size(axis);
  check<ShapeError>(size % 2 == 0, "glu: axis ", axis, " of shape ", value_of(x).shape(), " has an odd size");
  return slice(x, axis, 0, size / 2) * sigmoid(slice(x, axis, size / 2, size));
}

}  // namespace chorus
