#pragma once
/// The gradient of an element-wise functor at one element: the functor's own `gradient`, or Dual numbers.

#include <chorus/autograd/dual.hpp>
#include <utility>

namespace chorus::math {

/// The result of `gradient`: one derivative for each input of the functor.
template <class S, int N>
struct Partials {
  S d[N];
};

/// The gradients of `y = f(x...)` at one element (or Pack); `dy` is the gradient w.r.t. y. A functor with a cheaper or
/// more exact gradient than Dual numbers defines `template <class S> Partials<S, 2> gradient(const S& dy, const S& a,
/// const S& b) const`.
template <class F, class S, class... X>
CHORUS_HD Partials<S, static_cast<int>(sizeof...(X))> gradient(const F& f, const S& dy, const X&... x) {
  constexpr int n = static_cast<int>(sizeof...(X));
  if constexpr (requires { f.gradient(dy, x...); }) {
    return f.gradient(dy, x...);
  } else {
    int next = 0;
    const auto seed = [&](const S& value) {
      Dual<S, n> input(value);
      input.d[next++] = dy;
      return input;
    };
    Dual<S, n> inputs[] = {seed(x)...};
    return [&]<int... i>(std::integer_sequence<int, i...>) {
      const Dual<S, n> y = f(inputs[i]...);
      return Partials<S, n>{{y.d[i]...}};
    }
    (std::make_integer_sequence<int, n>());
  }
}

}  // namespace chorus::math

namespace chorus {
using math::Partials;
}  // namespace chorus
