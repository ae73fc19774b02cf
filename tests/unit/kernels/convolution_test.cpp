#include <array>
#include <catch.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/cpu/winograd.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace convolution_test {

using namespace chorus;
using kernels::Conv2dShape;

/// Calls f(x index, weight index, y index) for every product of the convolution: the definition.
template <class F>
void for_products(const Conv2dShape& s, F f) {
  const Index channels = s.in_channels / s.groups, filters = s.out_channels / s.groups;
  for (Index n = 0; n < s.batch; ++n)
    for (Index o = 0; o < s.out_channels; ++o)
      for (Index c = 0; c < channels; ++c)
        for (Index kh = 0; kh < s.kernel_h; ++kh)
          for (Index kw = 0; kw < s.kernel_w; ++kw)
            for (Index oh = 0; oh < s.out_height(); ++oh)
              for (Index ow = 0; ow < s.out_width(); ++ow) {
                const Index ih = oh * s.stride_h - s.padding_h + kh * s.dilation_h;
                const Index iw = ow * s.stride_w - s.padding_w + kw * s.dilation_w;
                if (ih < 0 || ih >= s.height || iw < 0 || iw >= s.width) continue;
                f(((n * s.in_channels + o / filters * channels + c) * s.height + ih) * s.width + iw,
                  ((o * channels + c) * s.kernel_h + kh) * s.kernel_w + kw,
                  ((n * s.out_channels + o) * s.out_height() + oh) * s.out_width() + ow);
              }
}

template <class T>
std::vector<T> normal(Index count, std::mt19937& random) {
  std::normal_distribution<double> distribution;
  std::vector<T> values(static_cast<std::size_t>(count));
  for (auto& value : values) value = static_cast<T>(distribution(random));
  return values;
}

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// Largest difference, in units of rounding errors of a sum of `terms` products.
template <class T>
double difference(const std::vector<T>& got, const std::vector<double>& expected, Index terms) {
  double worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i)
    worst = std::max(worst, std::isfinite(got[i]) ? std::abs(static_cast<double>(got[i]) - expected[i]) : HUGE_VAL);
  return worst / (std::numeric_limits<T>::epsilon() * std::sqrt(static_cast<double>(terms) + 1));
}

template <class T>
void compare(const Conv2dShape& s, bool accumulate, std::mt19937& random) {
  const Index pixels = s.out_height() * s.out_width(), xs = s.batch * s.in_channels * s.height * s.width;
  const Index ys = s.batch * s.out_channels * pixels;
  const Index terms = s.in_channels / s.groups * s.kernel_h * s.kernel_w, ws = s.out_channels * terms;
  CAPTURE(s.batch, s.in_channels, s.height, s.width, s.out_channels, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w,
          s.padding_h, s.padding_w, s.dilation_h, s.dilation_w, s.groups, accumulate, sizeof(T));
  const auto x = normal<T>(xs, random), w = normal<T>(ws, random), dy = normal<T>(ys, random);
  const auto bias = normal<T>(s.out_channels, random);
  auto y = normal<T>(ys, random), dx = normal<T>(xs, random), dw = normal<T>(ws, random);
  auto db = normal<T>(s.out_channels, random);

  const auto start = [&](const std::vector<T>& values) {
    std::vector<double> doubles(values.begin(), values.end());
    if (!accumulate) doubles.assign(values.size(), 0.0);
    return doubles;
  };
  std::vector<double> expected_y(at(ys)), expected_dx = start(dx), expected_dw = start(dw), expected_db = start(db);
  for (Index i = 0; i < ys; ++i) {
    const Index channel = i / pixels % s.out_channels;
    expected_y[at(i)] = accumulate ? 0.0 : static_cast<double>(bias[at(channel)]);
    expected_db[at(channel)] += static_cast<double>(dy[at(i)]);
  }
  for_products(s, [&](Index ix, Index iw, Index iy) {
    expected_y[at(iy)] += static_cast<double>(x[at(ix)]) * static_cast<double>(w[at(iw)]);
    expected_dx[at(ix)] += static_cast<double>(dy[at(iy)]) * static_cast<double>(w[at(iw)]);
    expected_dw[at(iw)] += static_cast<double>(dy[at(iy)]) * static_cast<double>(x[at(ix)]);
  });

  kernels::conv2d_forward(Cpu{}, s, x.data(), w.data(), accumulate ? nullptr : bias.data(), y.data());
  kernels::conv2d_backward_input(Cpu{}, s, w.data(), dy.data(), dx.data(), accumulate);
  kernels::conv2d_backward_weight(Cpu{}, s, x.data(), dy.data(), dw.data(), accumulate);
  kernels::conv2d_backward_bias(Cpu{}, s, dy.data(), db.data(), accumulate);
  CHECK(difference(y, expected_y, terms) < 64);
  CHECK(difference(dx, expected_dx, terms * s.out_channels / s.in_channels) < 64);
  CHECK(difference(dw, expected_dw, s.batch * pixels) < 64);
  CHECK(difference(db, expected_db, s.batch * pixels) < 64);
}

TEST_CASE("convolution equals its definition for random sizes, strides, paddings, dilations and groups") {
  std::mt19937 random(1);
  const auto pick = [&](int least, int most) -> Index { return std::uniform_int_distribution<>(least, most)(random); };
  for (int repeat = 0; repeat < 300; ++repeat) {
    Conv2dShape s{};
    s.groups = pick(1, 3);
    s.batch = pick(1, 5);
    s.in_channels = s.groups * pick(1, 5);
    s.out_channels = s.groups * pick(1, 20);
    s.kernel_h = pick(1, 5);
    s.kernel_w = pick(1, 5);
    s.stride_h = pick(1, 3);
    s.stride_w = pick(1, 3);
    s.dilation_h = pick(1, 3);
    s.dilation_w = pick(1, 3);
    s.padding_h = pick(0, 4);
    s.padding_w = pick(0, 4);
    s.height = std::max<Index>(1, s.dilation_h * (s.kernel_h - 1) + 1 - 2 * s.padding_h) + pick(0, 9);
    s.width = std::max<Index>(1, s.dilation_w * (s.kernel_w - 1) + 1 - 2 * s.padding_w) + pick(0, 40);
    if (repeat % 3 == 0)
      compare<double>(s, repeat % 2 == 0, random);
    else
      compare<float>(s, repeat % 2 == 0, random);
  }
}

TEST_CASE(
    "convolution of many channels or many filters equals its definition, padded or not, with equal phases or not") {
  std::mt19937 random(7);
  const auto pick = [&](int least, int most) -> Index { return std::uniform_int_distribution<>(least, most)(random); };
  for (int repeat = 0; repeat < 60; ++repeat) {
    Conv2dShape s{};
    s.groups = pick(1, 2);
    s.batch = pick(1, 3);
    s.in_channels = s.groups * (repeat % 2 == 0 ? pick(1, 8) : pick(24, 50));
    s.out_channels = s.groups * (repeat % 3 == 0 ? pick(1, 8) : pick(24, 70));
    s.kernel_h = pick(1, 4);
    s.kernel_w = pick(1, 4);
    s.stride_h = repeat % 4 < 2 ? s.kernel_h : pick(1, 3);
    s.stride_w = repeat % 4 < 2 ? s.kernel_w : pick(1, 3);
    s.dilation_h = pick(1, 2);
    s.dilation_w = pick(1, 2);
    s.padding_h = pick(0, 2) * pick(0, 1);
    s.padding_w = pick(0, 2) * pick(0, 1);
    s.height = std::max<Index>(1, s.dilation_h * (s.kernel_h - 1) + 1 - 2 * s.padding_h) + pick(0, 9);
    s.width = std::max<Index>(1, s.dilation_w * (s.kernel_w - 1) + 1 - 2 * s.padding_w) + pick(0, 20);
    if (repeat % 5 == 0)
      compare<double>(s, repeat % 2 == 0, random);
    else
      compare<float>(s, repeat % 7 < 3, random);
  }
}

TEST_CASE("convolution of one channel and one filter a group equals its definition") {
  std::mt19937 random(5);
  const auto pick = [&](int least, int most) -> Index { return std::uniform_int_distribution<>(least, most)(random); };
  for (int repeat = 0; repeat < 200; ++repeat) {
    Conv2dShape s{};
    s.groups = s.in_channels = s.out_channels = pick(1, 4);
    s.batch = pick(1, 3);
    s.kernel_h = repeat % 2 == 0 ? 3 : pick(1, 9);
    s.kernel_w = repeat % 2 == 0 ? 3 : pick(1, 9);
    s.stride_h = pick(1, 3);
    s.stride_w = pick(1, 3);
    s.dilation_h = pick(1, 2);
    s.dilation_w = pick(1, 2);
    s.padding_h = pick(0, 4);
    s.padding_w = pick(0, 4);
    s.height = std::max<Index>(1, s.dilation_h * (s.kernel_h - 1) + 1 - 2 * s.padding_h) + pick(0, 9);
    s.width = std::max<Index>(1, s.dilation_w * (s.kernel_w - 1) + 1 - 2 * s.padding_w) + pick(0, 40);
    if (repeat % 3 == 0)
      compare<double>(s, repeat % 4 < 2, random);
    else
      compare<float>(s, repeat % 4 < 2, random);
  }
}

TEST_CASE("depthwise 3x3 convolution equals its definition for rows shorter and longer than registers") {
  std::mt19937 random(6);
  const auto pick = [&](int least, int most) -> Index { return std::uniform_int_distribution<>(least, most)(random); };
  for (const Index width : {1, 2, 7, 8, 9, 15, 16, 17, 23, 32, 33, 47, 50})
    for (int repeat = 0; repeat < 6; ++repeat) {
      Conv2dShape s{};
      s.groups = s.in_channels = s.out_channels = 2;
      s.batch = pick(1, 2);
      s.kernel_h = s.kernel_w = 3;
      s.dilation_h = pick(1, 3);
      s.dilation_w = pick(1, 3);
      s.padding_w = std::max(pick(0, 8), s.dilation_w - (width - 1) / 2);
      s.padding_h = pick(0, 8);
      s.width = width;
      s.height = std::max<Index>(1, 2 * s.dilation_h + 1 - 2 * s.padding_h) + (repeat < 3 ? 0 : pick(1, 40));
      compare<float>(s, repeat % 2 == 0, random);
      compare<double>(s, repeat % 2 == 0, random);
    }
}

TEST_CASE("convolution equals its definition for the sizes of real networks") {
  std::mt19937 random(2);
  compare<float>(
      {.batch = 3, .in_channels = 3, .height = 32, .width = 32, .out_channels = 6, .kernel_h = 5, .kernel_w = 5}, false,
      random);
  compare<float>(
      {.batch = 17, .in_channels = 6, .height = 14, .width = 14, .out_channels = 16, .kernel_h = 5, .kernel_w = 5},
      false, random);
  for (const Index stride : {1, 2}) {
    compare<float>({.batch = 2,
                    .in_channels = 64,
                    .height = 16,
                    .width = 16,
                    .out_channels = 72,
                    .kernel_h = 3,
                    .kernel_w = 3,
                    .stride_h = stride,
                    .stride_w = stride,
                    .padding_h = 1,
                    .padding_w = 1},
                   false, random);
    compare<float>({.batch = 40,
                    .in_channels = 130,
                    .height = 4,
                    .width = 4,
                    .out_channels = 34,
                    .kernel_h = 3,
                    .kernel_w = 3,
                    .stride_h = stride,
                    .stride_w = stride,
                    .padding_h = 1,
                    .padding_w = 1},
                   true, random);
    compare<float>({.batch = 2,
                    .in_channels = 40,
                    .height = 16,
                    .width = 16,
                    .out_channels = 48,
                    .kernel_h = 1,
                    .kernel_w = 1,
                    .stride_h = stride,
                    .stride_w = stride},
                   false, random);
  }
  compare<double>({.batch = 2,
                   .in_channels = 24,
                   .height = 9,
                   .width = 11,
                   .out_channels = 24,
                   .kernel_h = 3,
                   .kernel_w = 3,
                   .padding_h = 1,
                   .padding_w = 1,
                   .groups = 24},
                  true, random);
}

TEST_CASE("3 x 3 convolutions of many channels equal their definition, with tiles cut at the edges") {
  std::mt19937 random(5);
  const auto shape = [](Index batch, Index height, Index width, Index padding_h, Index padding_w, Index groups) {
    return Conv2dShape{.batch = batch,
                       .in_channels = 33 * groups,
                       .height = height,
                       .width = width,
                       .out_channels = 40 * groups,
                       .kernel_h = 3,
                       .kernel_w = 3,
                       .padding_h = padding_h,
                       .padding_w = padding_w,
                       .groups = groups};
  };
  const auto strided = [&](Index batch, Index height, Index width, Index groups) {
    Conv2dShape s = shape(batch, height, width, 1, 1, groups);
    s.stride_h = s.stride_w = 2;
    return s;
  };
  // Weights that are transformed where they are used, and tiles that come in several groups.
  Conv2dShape heavy = shape(2, 4, 8, 1, 1, 1), many = shape(9, 16, 40, 1, 1, 1), many_strided = strided(9, 32, 40, 1);
  heavy.in_channels = 390;
  heavy.out_channels = 330;
  for (const auto& s : {shape(1, 10, 18, 0, 0, 1), shape(3, 7, 11, 1, 1, 1), shape(2, 9, 6, 0, 1, 2),
                        shape(2, 10, 14, 2, 1, 1), shape(70, 4, 4, 1, 1, 1), strided(1, 16, 32, 1),
                        strided(3, 7, 13, 1), strided(2, 15, 8, 2), strided(70, 8, 7, 1), heavy, many, many_strided}) {
    REQUIRE(kernels::detail::suits_winograd<float>(s));
    compare<float>(s, false, random);
    compare<float>(s, true, random);
  }
}

TEST_CASE("dilated 3 x 3 convolutions of many channels equal their definition, for parts of different sizes") {
  std::mt19937 random(7);
  for (const auto& [dilation, padding_h, padding_w, groups] :
       {std::array<Index, 4>{2, 2, 2, 1}, {2, 0, 4, 2}, {3, 3, 0, 1}}) {
    const Conv2dShape s{.batch = 2,
                        .in_channels = 33 * groups,
                        .height = 19,
                        .width = 26,
                        .out_channels = 34 * groups,
                        .kernel_h = 3,
                        .kernel_w = 3,
                        .padding_h = padding_h,
                        .padding_w = padding_w,
                        .dilation_h = dilation,
                        .dilation_w = dilation,
                        .groups = groups};
    compare<float>(s, false, random);
    compare<float>(s, true, random);
  }
}

TEST_CASE("a sample's result and gradient have the same bits in any batch") {
  std::mt19937 random(6);
  for (const auto& [channels, stride, dilation] :
       {std::array<Index, 3>{3, 1, 1}, {32, 1, 1}, {400, 1, 1}, {3, 2, 1}, {33, 2, 1}, {33, 1, 2}}) {
    Conv2dShape s{.batch = 21,
                  .in_channels = channels,
                  .height = 9,
                  .width = 8,
                  .out_channels = channels == 400 ? 320 : 34,
                  .kernel_h = 3,
                  .kernel_w = 3,
                  .stride_h = stride,
                  .stride_w = stride,
                  .padding_h = dilation,
                  .padding_w = dilation,
                  .dilation_h = dilation,
                  .dilation_w = dilation};
    const Index pixels = s.out_height() * s.out_width();
    const auto x = normal<float>(21 * channels * 72, random);
    const auto w = normal<float>(s.out_channels * channels * 9, random);
    const auto dy = normal<float>(21 * s.out_channels * pixels, random);
    std::vector<float> y(dy.size()), dx(x.size()), one_y(at(s.out_channels * pixels)), one_dx(at(channels * 72));
    kernels::conv2d_forward<float>(Cpu{}, s, x.data(), w.data(), nullptr, y.data());
    kernels::conv2d_backward_input(Cpu{}, s, w.data(), dy.data(), dx.data(), false);
    s.batch = 1;
    for (const std::size_t n : {0u, 7u, 20u}) {
      kernels::conv2d_forward<float>(Cpu{}, s, x.data() + n * one_dx.size(), w.data(), nullptr, one_y.data());
      kernels::conv2d_backward_input(Cpu{}, s, w.data(), dy.data() + n * one_y.size(), one_dx.data(), false);
      CHECK(std::equal(one_y.begin(), one_y.end(), y.data() + n * one_y.size()));
      CHECK(std::equal(one_dx.begin(), one_dx.end(), dx.data() + n * one_dx.size()));
    }
  }
}

TEST_CASE("convolutions give the same bits on any number of threads") {
  std::mt19937 random(7);
  for (const auto& [batch, channels, filters, size, stride] : {std::array<Index, 5>{23, 5, 40, 17, 1},
                                                               {23, 34, 40, 17, 1},
                                                               {9, 5, 40, 17, 2},
                                                               {41, 34, 40, 17, 2},
                                                               {3, 390, 330, 4, 1}}) {
    const Conv2dShape s{.batch = batch,
                        .in_channels = channels,
                        .height = size,
                        .width = size,
                        .out_channels = filters,
                        .kernel_h = 3,
                        .kernel_w = 3,
                        .stride_h = stride,
                        .stride_w = stride,
                        .padding_h = 1,
                        .padding_w = 1};
    const auto x = normal<float>(batch * channels * size * size, random);
    const auto w = normal<float>(filters * channels * 9, random), bias = normal<float>(filters, random);
    const auto dy = normal<float>(batch * filters * s.out_height() * s.out_width(), random);
    const auto run = [&](int threads) {
      set_num_threads(threads);
      std::vector<float> y(dy.size()), dx(x.size()), dw(w.size()), db(bias.size());
      kernels::conv2d_forward<float>(Cpu{}, s, x.data(), w.data(), bias.data(), y.data());
      kernels::conv2d_backward_input(Cpu{}, s, w.data(), dy.data(), dx.data(), false);
      kernels::conv2d_backward_weight(Cpu{}, s, x.data(), dy.data(), dw.data(), false);
      kernels::conv2d_backward_bias(Cpu{}, s, dy.data(), db.data(), false);
      set_num_threads(1);
      for (const auto* part : {&dx, &dw, &db}) y.insert(y.end(), part->begin(), part->end());
      return y;
    };
    const auto alone = run(1);
    CHECK(run(2) == alone);
    CHECK(run(3) == alone);
  }
}

TEST_CASE("1 x 1 convolutions have the same bits in any batch and on any number of threads") {
  std::mt19937 random(8);
  // Sides whose last panel of pixels is nearly empty or full, sums of one piece and of two, few results and many.
  for (const auto& [channels, filters, side] :
       {std::array<Index, 3>{300, 7, 7}, {5, 300, 7}, {40, 130, 16}, {270, 290, 20}}) {
    Conv2dShape s{.batch = 3,
                  .in_channels = 2 * channels,
                  .height = side,
                  .width = side,
                  .out_channels = 2 * filters,
                  .kernel_h = 1,
                  .kernel_w = 1,
                  .groups = 2};
    compare<float>(s, false, random);
    const Index pixels = side * side;
    const auto x = normal<float>(3 * s.in_channels * pixels, random),
               dy = normal<float>(3 * s.out_channels * pixels, random);
    const auto w = normal<float>(s.out_channels * channels, random), bias = normal<float>(s.out_channels, random);
    // Of `batch` images from number `first` on; the gradient once in place of what is there, once onto it.
    const auto run = [&](int threads, Index first, Index batch) {
      set_num_threads(threads);
      s.batch = batch;
      std::vector<float> y(at(batch * s.out_channels * pixels)), dx(at(batch * s.in_channels * pixels)), sum(dx.size());
      std::fill(sum.begin(), sum.end(), 0.3f);
      kernels::conv2d_forward<float>(Cpu{}, s, x.data() + first * s.in_channels * pixels, w.data(), bias.data(),
                                     y.data());
      const float* const gradient = dy.data() + first * s.out_channels * pixels;
      kernels::conv2d_backward_input(Cpu{}, s, w.data(), gradient, dx.data(), false);
      kernels::conv2d_backward_input(Cpu{}, s, w.data(), gradient, sum.data(), true);
      set_num_threads(1);
      return std::array{y, dx, sum};
    };
    const auto alone = run(1, 0, 3);
    CHECK(run(2, 0, 3) == alone);
    CHECK(run(3, 0, 3) == alone);
    for (Index image = 0; image < 3; ++image)
      for (const int threads : {1, 2}) {
        const auto one = run(threads, image, 1);
        for (std::size_t part = 0; part < 3; ++part)
          CHECK(std::equal(one[part].begin(), one[part].end(),
                           alone[part].begin() + static_cast<std::ptrdiff_t>(at(image) * one[part].size())));
      }
  }
}

TEST_CASE("a large gradient by the weight has the same bits where it is added, and wherever it lies") {
  std::mt19937 random(8);
  const Conv2dShape s{2, 256, 4, 4, 256, 3, 3, 1, 1, 1, 1};
  const auto x = normal<float>(2 * 256 * 16, random), dy = normal<float>(2 * 256 * 16, random);
  const Index size = 256 * 256 * 9;
  const auto gradient = [&](Index offset, bool accumulate) {
    const Storage<Cpu> memory(Cpu{}, at(size + 16) * sizeof(float));  // aligned to 64 bytes
    auto* const all = static_cast<float*>(memory.data());
    std::fill_n(all, size + 16, 7.0f);
    if (accumulate) std::fill_n(all + offset, size, 0.0f);
    kernels::conv2d_backward_weight<float>(Cpu{}, s, x.data(), dy.data(), all + offset, accumulate);
    for (Index i = 0; i < 16; ++i) CHECK(all[i < offset ? i : size + i] == 7);  // what lies around it stays
    return std::vector<float>(all + offset, all + offset + size);
  };
  for (const int threads : {1, 2}) {
    set_num_threads(threads);
    const auto whole_lines = gradient(0, false);
    CHECK(whole_lines == gradient(16, false));
    CHECK(whole_lines == gradient(3, false));
    CHECK(whole_lines == gradient(0, true));
  }
  set_num_threads(1);
}

TEST_CASE("convolution of nothing writes what a sum of nothing is") {
  std::mt19937 random(3);
  for (const bool accumulate : {false, true}) {
    compare<float>(
        {.batch = 0, .in_channels = 3, .height = 8, .width = 8, .out_channels = 6, .kernel_h = 5, .kernel_w = 5},
        accumulate, random);
    compare<float>(
        {.batch = 2, .in_channels = 3, .height = 8, .width = 8, .out_channels = 0, .kernel_h = 5, .kernel_w = 5},
        accumulate, random);
  }
  // No input channels: the bias alone.
  const Conv2dShape s{
      .batch = 2, .in_channels = 0, .height = 3, .width = 3, .out_channels = 2, .kernel_h = 3, .kernel_w = 3};
  const float bias[] = {1, 2};
  std::vector<float> y(4, 7);
  kernels::conv2d_forward<float>(Cpu{}, s, nullptr, nullptr, bias, y.data());
  CHECK(y == std::vector<float>{1, 2, 1, 2});
}

TEST_CASE("an output pixel without a kernel tap on a finite number stays apart from its neighbours' infinities") {
  const Conv2dShape s{.batch = 1,
                      .in_channels = 1,
                      .height = 2,
                      .width = 20,
                      .out_channels = 1,
                      .kernel_h = 1,
                      .kernel_w = 3,
                      .padding_w = 1};
  std::vector<float> x(40, 1), w(3, 1), y(40);
  x[19] = std::numeric_limits<float>::infinity();
  kernels::conv2d_forward<float>(Cpu{}, s, x.data(), w.data(), nullptr, y.data());
  CHECK(std::isinf(y[18]));
  CHECK(std::isinf(y[19]));
  CHECK(y[20] == 2);
  CHECK(y[17] == 3);
}

TEST_CASE("a convolution's second run asks the system for no memory and gives the same bits") {
  std::mt19937 random(4);
  const Conv2dShape s{
      .batch = 5, .in_channels = 6, .height = 14, .width = 14, .out_channels = 16, .kernel_h = 5, .kernel_w = 5};
  const auto x = normal<float>(5 * 6 * 14 * 14, random), w = normal<float>(16 * 6 * 25, random);
  const auto dy = normal<float>(5 * 16 * 100, random);
  const auto run = [&] {
    std::vector<float> y(dy.size()), dx(x.size()), dw(w.size());
    kernels::conv2d_forward<float>(Cpu{}, s, x.data(), w.data(), nullptr, y.data());
    kernels::conv2d_backward_input(Cpu{}, s, w.data(), dy.data(), dx.data(), false);
    kernels::conv2d_backward_weight(Cpu{}, s, x.data(), dy.data(), dw.data(), false);
    y.insert(y.end(), dx.begin(), dx.end());
    y.insert(y.end(), dw.begin(), dw.end());
    return y;
  };
  const auto first = run();
  const auto allocations = CachingAllocator<Cpu>::of(Cpu{}).system_allocations();
  CHECK(run() == first);
  CHECK(CachingAllocator<Cpu>::of(Cpu{}).system_allocations() == allocations);
}

}  // namespace convolution_test
