#pragma once
/// logaddexp, cdist, nan_to_num.

#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/ops/rearranging.hpp>
#include <limits>
#include <optional>
#include <type_traits>

namespace chorus {

namespace functors {

/// log(exp(a) + exp(b)) without overflow; the gradients are the softmax weights. For equal infinities, a.
struct LogAddExp {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    const S least = -abs(a - b);
    return max(a, b) + where(a == b, S(real_of<S>(0.69314718055994531)), log1p(exp(least)));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& a, const S& b) const {
    const S share = where(a == b, S(real_of<S>(0.5)), sigmoid(a - b));
    return {{dy * share, dy * where(a == b, S(real_of<S>(0.5)), sigmoid(b - a))}};
  }
};

/// x, with replacements for NaN and infinities.
struct NanToNum {
  double nan = 0, above = 0, below = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    const S finite = where(x > std::numeric_limits<R>::max(), S(R(above)),
                           where(x < std::numeric_limits<R>::lowest(), S(R(below)), x));
    return where(x == x, finite, S(R(nan)));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{where(abs(x) <= std::numeric_limits<real_of<S>>::max(), dy, S(0))}};
  }
};

}  // namespace functors

/// log(exp(a) + exp(b)), element-wise.
template <Operand A, Operand B>
auto logaddexp(const A& a, const B& b) {
  return detail::pointwise("logaddexp", functors::LogAddExp{}, a, b);
}

/// Replaces NaN by `nan`, and infinities by `above` and `below` (default: the type's largest and lowest numbers).
/// Replaced elements get no gradient.
template <Operand X>
auto nan_to_num(const X& x, double nan = 0, std::optional<double> above = {}, std::optional<double> below = {}) {
  using T = typename tensor_of<X>::value_type;
  const auto most = [] {
    if constexpr (std::is_same_v<T, half>)
      return 65504.0;
    else if constexpr (std::is_same_v<T, bf16>)
      return 0x1.FEp127;
    else
      return static_cast<double>(std::numeric_limits<T>::max());
  }();
  return detail::pointwise("nan_to_num", functors::NanToNum{nan, above.value_or(most), below.value_or(-most)}, x);
}

/// a: [..., m, features], b: [..., n, features] -> [..., m, n]: the p-norms of all differences. Leading axes are equal
/// or 1. All m n features differences are in memory at once. A distance of 0 has gradient 0. Throws ShapeError if
/// features differ.
template <Operand A, Operand B>
auto cdist(const A& a, const B& b, double p = 2) {
  constexpr int rank = tensor_of<A>::rank;
  static_assert(rank >= 2 && tensor_of<B>::rank == rank, "cdist: expected two stacks of vectors of the same rank");
  check<ShapeError>(value_of(a).size(-1) == value_of(b).size(-1), "cdist: expected equal last sizes, got shapes ",
                    value_of(a).shape(), " and ", value_of(b).shape());
  return norm(unsqueeze(a, rank - 1) - unsqueeze(b, rank - 2), p, -1);
}

}  // namespace chorus
