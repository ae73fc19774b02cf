#include <catch.hpp>
#include <chorus/kernels/pooling.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace pooling_test {

using namespace chorus;
using kernels::Pool2dShape;

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// Calls f(output index, input index) for each pixel of each window, in order.
template <class F>
void for_pixels(const Pool2dShape& s, F f) {
  for (Index plane = 0, out = 0; plane < s.planes; ++plane)
    for (Index oh = 0; oh < s.out_height(); ++oh)
      for (Index ow = 0; ow < s.out_width(); ++ow, ++out)
        for (Index kh = 0; kh < s.kernel_h; ++kh)
          for (Index kw = 0; kw < s.kernel_w; ++kw) {
            const Index h = oh * s.stride_h - s.padding_h + kh, w = ow * s.stride_w - s.padding_w + kw;
            if (h >= 0 && h < s.height && w >= 0 && w < s.width) f(out, (plane * s.height + h) * s.width + w);
          }
}

template <class T>
void compare(const Pool2dShape& s, bool accumulate, std::mt19937& random) {
  CAPTURE(s.planes, s.height, s.width, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w, s.padding_h, s.padding_w,
          accumulate, sizeof(T));
  // Few different numbers, so that windows have several largest ones; now and then NaN or an infinity.
  const auto numbers = [&](Index count) {
    std::vector<T> values(at(count));
    for (auto& value : values) value = static_cast<T>(std::uniform_int_distribution<>(-3, 3)(random));
    return values;
  };
  const Index image = s.height * s.width, xs = s.planes * image, ys = s.planes * s.out_height() * s.out_width();
  auto x = numbers(xs);
  for (auto& value : x) {
    const int special = std::uniform_int_distribution<>(0, 60)(random);
    if (special == 0) value = std::numeric_limits<T>::quiet_NaN();
    if (special < 3 && special > 0) value = std::numeric_limits<T>::infinity() * (special == 1 ? T{1} : T{-1});
  }
  const auto dy = numbers(ys), before = numbers(xs);

  std::vector<T> best(at(ys), -std::numeric_limits<T>::infinity());
  std::vector<Index> where(at(ys), -1);
  for_pixels(s, [&](Index out, Index in) {
    if (where[at(out)] < 0 || x[at(in)] > best[at(out)] || std::isnan(x[at(in)])) {
      best[at(out)] = x[at(in)];
      where[at(out)] = in;
    }
  });
  std::vector<T> y(at(ys)), y_alone(at(ys));
  std::vector<std::int32_t> argmax(at(ys), -1);
  kernels::max_pool2d_forward(Cpu{}, s, x.data(), y.data(), argmax.data());
  kernels::max_pool2d_forward(Cpu{}, s, x.data(), y_alone.data(), nullptr);
  auto dx = before, expected = accumulate ? before : std::vector<T>(before.size());
  kernels::max_pool2d_backward(Cpu{}, s, dy.data(), argmax.data(), dx.data(), accumulate);
  bool same = true;
  for (std::size_t i = 0; i < at(ys); ++i) {
    const auto equal = [&](T value) { return std::isnan(best[i]) ? std::isnan(value) : value == best[i]; };
    same = same && equal(y[i]) && equal(y_alone[i]) && argmax[i] == where[i] % image;
    expected[at(where[i])] += dy[i];
  }
  CHECK(same);
  CHECK(dx == expected);

  const auto finite = numbers(xs);
  std::vector<T> mean(at(ys));
  auto mean_dx = before, expected_dx = accumulate ? before : std::vector<T>(before.size());
  const T area = static_cast<T>(s.kernel_h * s.kernel_w);
  for_pixels(s, [&](Index out, Index in) {
    mean[at(out)] += finite[at(in)] / area;
    expected_dx[at(in)] += dy[at(out)] / area;
  });
  kernels::avg_pool2d_forward(Cpu{}, s, finite.data(), y.data());
  kernels::avg_pool2d_backward(Cpu{}, s, dy.data(), mean_dx.data(), accumulate);
  double worst = 0;
  for (std::size_t i = 0; i < at(ys); ++i) worst = std::max(worst, std::abs(static_cast<double>(mean[i] - y[i])));
  for (std::size_t i = 0; i < at(xs); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(expected_dx[i] - mean_dx[i])));
  CHECK(worst < 1e-5);
}

TEST_CASE("pooling equals its definition for random windows") {
  std::mt19937 random(1);
  const auto pick = [&](int least, int most) -> Index { return std::uniform_int_distribution<>(least, most)(random); };
  for (int repeat = 0; repeat < 300; ++repeat) {
    Pool2dShape s{};
    s.planes = pick(0, 4);
    s.kernel_h = pick(1, 4);
    s.kernel_w = repeat % 2 == 0 ? s.kernel_h : pick(1, 4);
    s.stride_h = repeat % 4 == 0 ? s.kernel_h : pick(1, 4);
    s.stride_w = repeat % 4 == 0 ? s.kernel_w : pick(1, 4);
    s.padding_h = pick(0, static_cast<int>(s.kernel_h / 2));
    s.padding_w = pick(0, static_cast<int>(s.kernel_w / 2));
    s.height = s.kernel_h + pick(0, 12);
    s.width = s.kernel_w + pick(0, 70);
    if (repeat % 3 == 0)
      compare<double>(s, repeat % 2 == 0, random);
    else
      compare<float>(s, repeat % 2 == 0, random);
  }
}

TEST_CASE("2 x 2 pooling equals its definition for the sizes of real networks") {
  std::mt19937 random(2);
  for (const Index size : {2, 3, 10, 28, 32, 33, 64, 100})
    compare<float>(
        {.planes = 5, .height = size, .width = size, .kernel_h = 2, .kernel_w = 2, .stride_h = 2, .stride_w = 2},
        size % 2 == 0, random);
}

TEST_CASE("pooling the whole image gives one number") {
  std::mt19937 random(3);
  compare<float>({.planes = 7, .height = 4, .width = 5, .kernel_h = 4, .kernel_w = 5, .stride_h = 4, .stride_w = 5},
                 false, random);
}

TEST_CASE("a window of -inf alone gives -inf and its first pixel") {
  const Pool2dShape s{.planes = 1, .height = 2, .width = 2, .kernel_h = 2, .kernel_w = 2, .stride_h = 2, .stride_w = 2};
  const std::vector<double> x(4, -std::numeric_limits<double>::infinity());
  double y = 0;
  std::int32_t argmax = -1;
  kernels::max_pool2d_forward(Cpu{}, s, x.data(), &y, &argmax);
  CHECK(y == x[0]);
  CHECK(argmax == 0);
}

}  // namespace pooling_test
