#pragma once
/// Optimizer steps as element-wise functions, which run on every device.

#include <array>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/kernels/scalar_math.hpp>
#include <chorus/optim/optimizer.hpp>

namespace chorus::optim::detail {

/// out[i] = f(in_0[i], in_1[i], ...); `out` may be one of the inputs.
template <class T, class D, class F, class... In>
void update(D device, Index count, const F& f, T* out, const In*... in) {
  kernels::pointwise_forward(device, f, count, std::array<const T*, sizeof...(In)>{in...}, out);
}

/// keep a + mix b
struct Mix {
  double keep = 1, mix = 1;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    using R = math::real_of<S>;
    return a * R(keep) + b * R(mix);
  }
};
/// keep a + mix b²
struct MixSquare {
  double keep = 1, mix = 1;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    using R = math::real_of<S>;
    return a * R(keep) + b * b * R(mix);
  }
};

}  // namespace chorus::optim::detail
