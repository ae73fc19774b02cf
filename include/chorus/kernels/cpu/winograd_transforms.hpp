#pragma once
/// The transforms of Winograd's convolutions with 3 taps (Winograd 1980; Lavin, Gray, "Fast algorithms for
/// convolutional neural networks", CVPR 2016) and their adjoints, along one axis, on packets.

#include <chorus/kernels/cpu/addresses.hpp>
#include <chorus/kernels/cpu/packet.hpp>

namespace chorus::kernels::detail {

/// The number of values that three taps are transformed to, in all variants below; and its square, for a kernel.
inline constexpr Index winograd_weights = 6, winograd_points = winograd_weights * winograd_weights;

/// Applies a transform from `In` to `Out` numbers along both axes: reads In x In numbers with `get(y, x)`, column by
/// column, and writes Out x Out results with `put(y, x, value)`, row by row.
template <int In, int Out, class T, class Transform, class Get, class Put>
void transform_both_axes(const Transform& transform, Get get, Put put) {
  Packet<T> middle[Out][In];
#pragma GCC unroll 9
  for (int x = 0; x < In; ++x) {
    Packet<T> column[In], result[Out];
#pragma GCC unroll 9
    for (int y = 0; y < In; ++y) column[y] = get(y, x);
    transform(column, result);
#pragma GCC unroll 9
    for (int y = 0; y < Out; ++y) middle[y][x] = result[y];
  }
#pragma GCC unroll 9
  for (int y = 0; y < Out; ++y) {
    Packet<T> result[Out];
    transform(middle[y], result);
#pragma GCC unroll 9
    for (int x = 0; x < Out; ++x) put(y, x, result[x]);
  }
}

/// For transform_both_axes: reads a tile's numbers at Points x Points points, which are `pitch` apart.
template <int Points, class T>
struct PointReader {
  const T* column;
  Index pitch;
  const T* at = column;

  [[gnu::always_inline]] Packet<T> operator()(int y, int) {
    if (y == 0) at = column;
    const Packet<T> value = load(at, Whole<T>{});
    at = opaque(at + Points * pitch);
    if (y == 0) column = opaque(column + pitch);
    return value;
  }
};
template <class T>
struct PointWriter {
  T* at;
  Index pitch;

  [[gnu::always_inline]] void operator()(int, int, const Packet<T>& value) {
    store(at, value, Whole<T>{});
    at = opaque(at + pitch);
  }
};

template <class T>
struct PacketSums {
  using P = Packet<T>;
  static P scaled(double factor, const P& x) { return pmul(splat(static_cast<T>(factor)), x); }
  static P plus(const P& sum, double factor, const P& x) { return pmadd(splat(static_cast<T>(factor)), x, sum); }
};

/// F(4, 3): four results of stride 1 from six pixels, with 6 multiplications instead of 12; tiles are `step` pixels
/// apart. Evaluation points are 0, ±√½, ±√2 and infinity: symmetric, with a fifth of the rounding error of the usual 0,
/// ±1, ±2.
template <class T>
struct UnitStride : PacketSums<T> {
  using P = Packet<T>;
  using PacketSums<T>::scaled, PacketSums<T>::plus;
  static constexpr int in = 6, step = 4, out = 4, points = 6;
  /// Number of tiles multiplied at a time, and tiles in a strip.
  static constexpr Index block_tiles = 64, strip_tiles = 16;
  /// The index of the transformed weight for a point.
  static constexpr int weight_of(int point) { return point; }

  static constexpr T half_root = static_cast<T>(0.70710678118654752440), root = static_cast<T>(1.41421356237309504880);

  /// Transforms six adjacent pixels to the six points.
  static constexpr auto input = [](const P* d, P* t) __attribute__((always_inline)) {
    const P even = plus(d[4], -2, d[2]), odd = plus(scaled(half_root, d[3]), -root, d[1]);
    const P even_far = plus(d[4], -0.5, d[2]), odd_far = plus(scaled(root, d[3]), -half_root, d[1]);
    t[0] = plus(padd(d[0], d[4]), -2.5, d[2]);
    t[1] = padd(even, odd);
    t[2] = psub(even, odd);
    t[3] = padd(even_far, odd_far);
    t[4] = psub(even_far, odd_far);
    t[5] = plus(padd(d[1], d[5]), -2.5, d[3]);
  };
  /// Transforms three taps to the six points, including the interpolation's factors.
  static constexpr auto weight = [](const P* w, P* t) __attribute__((always_inline)) {
    const P even = plus(scaled(-2.0 / 3, w[0]), -1.0 / 3, w[2]), odd = scaled(-2.0 / 3 * half_root, w[1]);
    const P even_far = plus(scaled(1.0 / 6, w[0]), 1.0 / 3, w[2]), odd_far = scaled(root / 6.0, w[1]);
    t[0] = w[0];
    t[1] = padd(even, odd);
    t[2] = psub(even, odd);
    t[3] = padd(even_far, odd_far);
    t[4] = psub(even_far, odd_far);
    t[5] = w[2];
  };
  /// Computes four results from the products at the six points.
  static constexpr auto output = [](const P* m, P* y) __attribute__((always_inline)) {
    const P sum = padd(m[1], m[2]), difference = psub(m[1], m[2]);
    const P sum_far = padd(m[3], m[4]), difference_far = psub(m[3], m[4]);
    y[0] = padd(m[0], padd(sum, sum_far));
    y[1] = plus(scaled(half_root, difference), root, difference_far);
    y[2] = plus(scaled(0.5, sum), 2, sum_far);
    y[3] = plus(plus(m[5], half_root / 2, difference), 2 * root, difference_far);
  };
  /// The adjoint of `output`.
  static constexpr auto output_gradient = [](const P* y, P* m) __attribute__((always_inline)) {
    const P even = plus(y[0], 0.5, y[2]), odd = plus(scaled(half_root, y[1]), half_root / 2, y[3]);
    const P even_far = plus(y[0], 2, y[2]), odd_far = plus(scaled(root, y[1]), 2 * root, y[3]);
    m[0] = y[0];
    m[1] = padd(even, odd);
    m[2] = psub(even, odd);
    m[3] = padd(even_far, odd_far);
    m[4] = psub(even_far, odd_far);
    m[5] = y[3];
  };
  /// The adjoint of `weight`.
  static constexpr auto weight_gradient = [](const P* t, P* w) __attribute__((always_inline)) {
    const P sum = padd(t[1], t[2]), difference = psub(t[1], t[2]);
    const P sum_far = padd(t[3], t[4]), difference_far = psub(t[3], t[4]);
    w[0] = plus(plus(t[0], -2.0 / 3, sum), 1.0 / 6, sum_far);
    w[1] = plus(scaled(-2.0 / 3 * half_root, difference), root / 6.0, difference_far);
    w[2] = plus(plus(t[5], -1.0 / 3, sum), 1.0 / 3, sum_far);
  };
};

/// F(4, 2), the basis of stride 2: every other pixel meets the outer two taps, the rest only the middle tap. With
/// points ±2/5, ±13/10 and infinity the rounding error is 1.5 times that of the direct form.
template <class T>
struct TwoTaps : PacketSums<T> {
  using P = Packet<T>;
  using PacketSums<T>::scaled, PacketSums<T>::plus;
  static constexpr double near = 0.4, far = 1.3, near2 = near * near, far2 = far * far;
  static constexpr double near_share = 0.5 / (near * (near2 - far2)), far_share = 0.5 / (far * (far2 - near2));

  [[gnu::always_inline]] static void input(const P& d0, const P& d1, const P& d2, const P& d3, const P& d4, P* t) {
    const P odd = plus(d3, -far2, d1), even = scaled(near, plus(d2, -far2, d0));
    const P odd_far = plus(d3, -near2, d1), even_far = scaled(far, plus(d2, -near2, d0));
    t[0] = padd(even, odd);
    t[1] = psub(even, odd);
    t[2] = padd(even_far, odd_far);
    t[3] = psub(even_far, odd_far);
    t[4] = plus(plus(d4, -(near2 + far2), d2), near2 * far2, d0);
  }
  [[gnu::always_inline]] static void weight(const P& w0, const P& w1, P* t) {
    const P even = scaled(near_share, w0), odd = scaled(near * near_share, w1);
    const P even_far = scaled(far_share, w0), odd_far = scaled(far * far_share, w1);
    t[0] = padd(even, odd);
    t[1] = psub(even, odd);
    t[2] = padd(even_far, odd_far);
    t[3] = psub(even_far, odd_far);
    t[4] = w1;
  }
  [[gnu::always_inline]] static void weight_gradient(const P* t, P& w0, P& w1) {
    const P sum = padd(t[0], t[1]), difference = psub(t[0], t[1]);
    const P sum_far = padd(t[2], t[3]), difference_far = psub(t[2], t[3]);
    w0 = plus(scaled(near_share, sum), far_share, sum_far);
    w1 = plus(plus(t[4], near * near_share, difference), far * far_share, difference_far);
  }
  [[gnu::always_inline]] static void output(const P* m, P* y) {
    const P sum = padd(m[0], m[1]), difference = psub(m[0], m[1]);
    const P sum_far = padd(m[2], m[3]), difference_far = psub(m[2], m[3]);
    y[0] = padd(sum, sum_far);
    y[1] = plus(scaled(near, difference), far, difference_far);
    y[2] = plus(scaled(near2, sum), far2, sum_far);
    y[3] = plus(plus(m[4], near * near2, difference), far * far2, difference_far);
  }
  [[gnu::always_inline]] static void output_gradient(const P* y, P* m) {
    const P even = plus(y[0], near2, y[2]), odd = plus(scaled(near, y[1]), near * near2, y[3]);
    const P even_far = plus(y[0], far2, y[2]), odd_far = plus(scaled(far, y[1]), far * far2, y[3]);
    m[0] = padd(even, odd);
    m[1] = psub(even, odd);
    m[2] = padd(even_far, odd_far);
    m[3] = psub(even_far, odd_far);
    m[4] = y[3];
  }
};

/// Shared by both directions of stride 2: 9 multiplications instead of 12 for four results.
template <class T>
struct StridedPoints {
  using P = Packet<T>;
  static constexpr int points = 9;
  static constexpr Index block_tiles = 32, strip_tiles = 4;
  static constexpr int weight_of(int point) { return point < 5 ? point : 5; }

  static constexpr auto weight = [](const P* w, P* t) __attribute__((always_inline)) {
    TwoTaps<T>::weight(w[0], w[2], t);
    t[5] = w[1];
  };
  static constexpr auto weight_gradient = [](const P* t, P* w) __attribute__((always_inline)) {
    TwoTaps<T>::weight_gradient(t, w[0], w[2]);
    w[1] = t[5];
  };
};

/// Computes four results of stride 2 from nine pixels.
template <class T>
struct StrideTwo : StridedPoints<T> {
  using P = Packet<T>;
  static constexpr int in = 9, step = 8, out = 4;

  static constexpr auto input = [](const P* d, P* t) __attribute__((always_inline)) {
    TwoTaps<T>::input(d[0], d[2], d[4], d[6], d[8], t);
    for (int i = 0; i < 4; ++i) t[5 + i] = d[2 * i + 1];
  };
  static constexpr auto output = [](const P* m, P* y) __attribute__((always_inline)) {
    TwoTaps<T>::output(m, y);
    for (int i = 0; i < 4; ++i) y[i] = padd(y[i], m[5 + i]);
  };
  static constexpr auto output_gradient = [](const P* y, P* m) __attribute__((always_inline)) {
    TwoTaps<T>::output_gradient(y, m);
    for (int i = 0; i < 4; ++i) m[5 + i] = y[i];
  };
};

/// The gradient w.r.t. its input, with padding 1: eight pixels from five results.
template <class T>
struct StrideTwoInput : StridedPoints<T> {
  using P = Packet<T>;
  static constexpr int in = 5, step = 4, out = 8;

  static constexpr auto input = [](const P* d, P* t) __attribute__((always_inline)) {
    TwoTaps<T>::input(d[0], d[1], d[2], d[3], d[4], t);
    for (int i = 0; i < 4; ++i) t[5 + i] = d[i];
  };
  static constexpr auto output = [](const P* m, P* y) __attribute__((always_inline)) {
    P odd[4];
    TwoTaps<T>::output(m, odd);
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = m[5 + i];
      y[2 * i + 1] = odd[i];
    }
  };
};

}  // namespace chorus::kernels::detail
