#pragma once
/// The transforms of F(4 x 4, 3 x 3) (Winograd 1980; Lavin, Gray, "Fast algorithms for convolutional neural networks",
/// CVPR 2016) and their adjoints, on packets. The polynomials are evaluated at 0, ±√½, ±√2 and infinity: symmetric, and
/// with a fifth of the rounding error that the usual 0, ±1, ±2 give.

#include <chorus/kernels/cpu/packet.hpp>

namespace chorus::inline CHORUS_ABI::kernels::detail {

inline constexpr Index winograd_out = 4, winograd_in = 6, winograd_points = 36;

/// Applies a transform of `In` to `Out` numbers along both axes: `put(y, x, value)` for Out x Out results from
/// `get(y, x)` for In x In numbers.
template <int In, int Out, class T, class Transform, class Get, class Put>
void transform_both_axes(const Transform& transform, const Get& get, const Put& put) {
  Packet<T> middle[Out][In];
#pragma GCC unroll 6
  for (int x = 0; x < In; ++x) {
    Packet<T> column[In], result[Out];
#pragma GCC unroll 6
    for (int y = 0; y < In; ++y) column[y] = get(y, x);
    transform(column, result);
#pragma GCC unroll 6
    for (int y = 0; y < Out; ++y) middle[y][x] = result[y];
  }
#pragma GCC unroll 6
  for (int y = 0; y < Out; ++y) {
    Packet<T> result[Out];
    transform(middle[y], result);
#pragma GCC unroll 6
    for (int x = 0; x < Out; ++x) put(y, x, result[x]);
  }
}

template <class T>
struct WinogradTransforms {
  using P = Packet<T>;
  static constexpr T half_root = static_cast<T>(0.70710678118654752440), root = static_cast<T>(1.41421356237309504880);
  static P scaled(double factor, const P& x) { return pmul(splat(static_cast<T>(factor)), x); }
  static P plus(const P& sum, double factor, const P& x) { return pmadd(splat(static_cast<T>(factor)), x, sum); }

  /// Six pixels in a row, at the six points.
  static void input(const P* d, P* t) {
    const P even = plus(d[4], -2, d[2]), odd = plus(scaled(half_root, d[3]), -root, d[1]);
    const P even_far = plus(d[4], -0.5, d[2]), odd_far = plus(scaled(root, d[3]), -half_root, d[1]);
    t[0] = plus(padd(d[0], d[4]), -2.5, d[2]);
    t[1] = padd(even, odd);
    t[2] = psub(even, odd);
    t[3] = padd(even_far, odd_far);
    t[4] = psub(even_far, odd_far);
    t[5] = plus(padd(d[1], d[5]), -2.5, d[3]);
  }
  /// Three taps, at the six points, with the weights of the interpolation.
  static void weight(const P* w, P* t) {
    const P even = plus(scaled(-2.0 / 3, w[0]), -1.0 / 3, w[2]), odd = scaled(-2.0 / 3 * half_root, w[1]);
    const P even_far = plus(scaled(1.0 / 6, w[0]), 1.0 / 3, w[2]), odd_far = scaled(root / 6.0, w[1]);
    t[0] = w[0];
    t[1] = padd(even, odd);
    t[2] = psub(even, odd);
    t[3] = padd(even_far, odd_far);
    t[4] = psub(even_far, odd_far);
    t[5] = w[2];
  }
  /// Four results from the products at the six points.
  static void output(const P* m, P* y) {
    const P sum = padd(m[1], m[2]), difference = psub(m[1], m[2]);
    const P sum_far = padd(m[3], m[4]), difference_far = psub(m[3], m[4]);
    y[0] = padd(m[0], padd(sum, sum_far));
    y[1] = plus(scaled(half_root, difference), root, difference_far);
    y[2] = plus(scaled(0.5, sum), 2, sum_far);
    y[3] = plus(plus(m[5], half_root / 2, difference), 2 * root, difference_far);
  }
  /// The adjoint of `output`.
  static void output_gradient(const P* y, P* m) {
    const P even = plus(y[0], 0.5, y[2]), odd = plus(scaled(half_root, y[1]), half_root / 2, y[3]);
    const P even_far = plus(y[0], 2, y[2]), odd_far = plus(scaled(root, y[1]), 2 * root, y[3]);
    m[0] = y[0];
    m[1] = padd(even, odd);
    m[2] = psub(even, odd);
    m[3] = padd(even_far, odd_far);
    m[4] = psub(even_far, odd_far);
    m[5] = y[3];
  }
  /// The adjoint of `weight`.
  static void weight_gradient(const P* t, P* w) {
    const P sum = padd(t[1], t[2]), difference = psub(t[1], t[2]);
    const P sum_far = padd(t[3], t[4]), difference_far = psub(t[3], t[4]);
    w[0] = plus(plus(t[0], -2.0 / 3, sum), 1.0 / 6, sum_far);
    w[1] = plus(scaled(-2.0 / 3 * half_root, difference), root / 6.0, difference_far);
    w[2] = plus(plus(t[5], -1.0 / 3, sum), 1.0 / 3, sum_far);
  }
};

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
