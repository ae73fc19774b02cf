// Integer kernels: each way of computing gives the integers of the plain definition.
#include <catch.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/quantization/kernels/convolution.hpp>
#include <chorus/quantization/kernels/pointwise.hpp>
#include <chorus/quantization/kernels/pooling.hpp>
#include <cmath>
#include <unit/random_draw.hpp>
#include <string>
#include <vector>

namespace int8_test {

using chorus::Index;
using chorus::kernels::Conv2dShape;
using chorus::kernels::Pool2dShape;
using namespace chorus::kernels::int8;
using Draw = test::DrawFrom<71>;
using Bytes = std::vector<std::uint8_t>;

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// Images in memory of their own.
struct Own {
  Bytes memory;
  Images images;
  Own(Index batch, Index height, Index width, Index channels, Index border)
      : images{nullptr, batch, height, width, channels, border} {
    memory.assign(at(images.bytes()), 99);
    images.data = memory.data();
  }
  Bytes numbers() const {
    Bytes out;
    for (Index image = 0; image < images.batch; ++image)
      for (Index row = 0; row < images.height; ++row)
        for (Index i = 0; i < images.width * images.channels; ++i) out.push_back(images.at(image, row, 0)[i]);
    return out;
  }
};

/// A convolution with all that belongs to it.
struct Problem {
  Conv2dShape shape;
  std::int32_t zero_point;
  Own x;
  std::vector<std::int8_t> weight;
  PackedWeights packed;
  std::vector<std::int32_t> offset;
  std::vector<float> bias, multiplier;
  Requantize to;

  Problem(const Conv2dShape& s, Draw& draw, bool extremes = false)
      : shape(s),
        zero_point(static_cast<std::int32_t>(draw.below(256))),
        x(s.batch, s.height, s.width, s.in_channels, std::max(s.padding_h, s.padding_w)) {
    x.images.fill_border(static_cast<std::uint8_t>(zero_point));
    for (Index image = 0; image < s.batch; ++image)
      for (Index row = 0; row < s.height; ++row)
        for (Index i = 0; i < s.width * s.in_channels; ++i)
          x.images.at(image, row, 0)[i] = static_cast<std::uint8_t>(extremes ? 255 : draw.below(256));
    weight.resize(at(s.weight_count()));
    for (auto& w : weight) w = static_cast<std::int8_t>(extremes ? 127 : static_cast<int>(draw.below(255)) - 127);
    packed = pack_weights(s, weight);
    const auto padded = at(s.out_channels + panel);
    offset.assign(padded, 0);
    bias.assign(padded, 0);
    multiplier.assign(padded, 0);
    const float terms = static_cast<float>(s.weight_count() / s.out_channels);
    for (Index o = 0; o < s.out_channels; ++o) {
      offset[at(o)] = extremes ? 0 : -zero_point * packed.sums[at(o)];
      bias[at(o)] = static_cast<float>(draw.below(2000)) - 1000;
      multiplier[at(o)] = extremes ? 100 / (terms * 255 * 127)
                                   : static_cast<float>(draw.below(100) + 1) * 1e-4f / std::sqrt(terms);
    }
    const auto zero = static_cast<std::int32_t>(draw.below(200));
    to = {offset.data(), bias.data(), multiplier.data(), zero, draw.chance(50) ? zero : 0,
          draw.chance(20) ? 220 : 255};
  }

  template <class Way>
  Bytes by() const {
    const Own y(shape.batch, shape.out_height(), shape.out_width(), shape.out_channels, 1);
    convolution<Way>(shape, x.images, packed, to, y.images);
    for (const std::uint8_t byte : {y.memory.front(), y.memory[y.memory.size() - 1]}) REQUIRE(byte == 99);
    return y.numbers();
  }

  Bytes expected() const {
    Bytes out;
    const Index in = shape.in_channels / shape.groups, outputs = shape.out_channels / shape.groups;
    for (Index image = 0; image < shape.batch; ++image)
      for (Index row = 0; row < shape.out_height(); ++row)
        for (Index column = 0; column < shape.out_width(); ++column)
          for (Index o = 0; o < shape.out_channels; ++o) {
            std::int32_t sum = 0;
            for (Index c = 0; c < in; ++c)
              for (Index kh = 0; kh < shape.kernel_h; ++kh)
                for (Index kw = 0; kw < shape.kernel_w; ++kw)
                  sum += x.images.at(image, row * shape.stride_h - shape.padding_h + kh * shape.dilation_h,
                                     column * shape.stride_w - shape.padding_w +
                                         kw * shape.dilation_w)[o / outputs * in + c] *
                         weight[at(((o * in + c) * shape.kernel_h + kh) * shape.kernel_w + kw)];
            out.push_back(to(sum, o));
          }
    return out;
  }

  void check_all() const {
    const Bytes right = expected();
    CHECK(by<Plain>() == right);
#if defined(__AVX2__)
    CHECK(by<Widened>() == right);
#endif
#if defined(CHORUS_INT8_VNNI256)
    CHECK(by<Vnni256>() == right);
#endif
#if defined(CHORUS_INT8_VNNI512)
    CHECK(by<Vnni512>() == right);
#endif
    CHECK(by<Best>() == right);
  }
};

TEST_CASE("int8 convolutions: every way gives the integers of the definition, for random shapes") {
  test::for_seeds(
      40,
      [](std::uint64_t seed) {
        Draw draw(seed);
        const auto some = [&](std::uint32_t least, std::uint32_t most) {
          return static_cast<Index>(least + draw.below(most - least + 1));
        };
        const Index groups = draw.one_of<Index>({1, 1, 1, 2, 3});
        Conv2dShape s{.batch = some(1, 3),
                      .in_channels = groups * some(1, draw.chance(20) ? 70 : 9),
                      .height = some(5, 12),
                      .width = some(5, 12),
                      .out_channels = groups * some(1, draw.chance(30) ? 150 : 20),
                      .kernel_h = some(1, 3),
                      .kernel_w = some(1, 3),
                      .stride_h = some(1, 2),
                      .stride_w = some(1, 3),
                      .padding_h = some(0, 2),
                      .padding_w = some(0, 2),
                      .dilation_h = some(1, 2),
                      .dilation_w = some(1, 2),
                      .groups = groups};
        if (draw.chance(15)) s.groups = s.out_channels = s.in_channels;  // depthwise
        CAPTURE(seed);
        Problem(s, draw).check_all();
      },
      [](std::uint64_t seed) { return std::to_string(seed) + "\n"; });
}

TEST_CASE("int8 products: rows and columns around each tile's size") {
  Draw draw(5);
  for (const Index rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 239, 240, 241})
    for (const Index columns : {1, 15, 16, 17, 32, 33, 48, 63, 64, 65, 130}) {
      CAPTURE(rows, columns);
      Problem({.batch = rows, .in_channels = 7, .height = 1, .width = 1, .out_channels = columns, .kernel_h = 1,
               .kernel_w = 1},
              draw)
          .check_all();
    }
}

TEST_CASE("int8 products of 255 and 127 are added without saturation") {
  // Pairs in 16 bits would end at 32767: 255 * 127 * 2 is 64770.
  Draw draw(6);
  Problem({.batch = 3, .in_channels = 512, .height = 3, .width = 3, .out_channels = 20, .kernel_h = 3, .kernel_w = 3},
          draw, true)
      .check_all();
}

TEST_CASE("int8 convolutions on a team of threads have the same integers") {
  Draw draw(7);
  const Problem problem({.batch = 5, .in_channels = 64, .height = 14, .width = 14, .out_channels = 130, .kernel_h = 3,
                         .kernel_w = 3, .padding_h = 1, .padding_w = 1},
                        draw);
  const Bytes alone = problem.by<Best>();
  chorus::set_num_threads(3);
  const Bytes together = problem.by<Best>();
  chorus::set_num_threads(1);
  CHECK(together == alone);
}

TEST_CASE("int8 levels: ties go to even, limits hold, NaN is the least") {
  const Levels levels{0.5f, 10, {}};
  CHECK(levels.level(0.25f) == 10);
  CHECK(levels.level(0.75f) == 12);
  CHECK(levels.level(-0.75f) == 8);
  CHECK(levels.level(1e9f) == 255);
  CHECK(levels.level(-1e9f) == 0);
  CHECK(level_of(levels, -1e9f, 10) == 10);
  CHECK(levels.level(std::numeric_limits<float>::quiet_NaN()) == 0);
  CHECK(levels.level(std::numeric_limits<float>::infinity()) == 255);
  CHECK(Levels{0.5f, 10, {0, 100}}.level(1e9f) == 100);
  CHECK(levels.number(14) == 2.0f);
}

TEST_CASE("int8 sums: vectors and the rest give what floats give") {
  Draw draw(8);
  for (int trial = 0; trial < 20; ++trial) {
    const auto levels = [&] {
      return Levels{static_cast<float>(draw.below(1000) + 1) * 1e-3f, static_cast<std::int32_t>(draw.below(256)), {}};
    };
    const Sum sum{levels(), levels(), levels(), draw.chance(50)};
    Bytes a(101), b(101), y(101);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<std::uint8_t>(draw.below(256));
      b[i] = static_cast<std::uint8_t>(draw.below(256));
    }
    add(sum, a.data(), b.data(), y.data(), 101);
    int differ = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      // In memory, each product is rounded.
      volatile float left = static_cast<float>(a[i] - sum.a.zero_point) * sum.a.scale;
      volatile float right = static_cast<float>(b[i] - sum.b.zero_point) * sum.b.scale;
      volatile float both = left + right;
      if (sum.relu && both < 0) both = 0;
      differ += y[i] != sum.y.level(both);
    }
    CHECK(differ == 0);
  }
}

TEST_CASE("int8 pooling: padding never counts as a number") {
  Draw draw(9);
  for (int trial = 0; trial < 20; ++trial) {
    const Index window = 1 + draw.below(3), stride = 1 + draw.below(2);
    const Pool2dShape s{.planes = 1, .height = 7, .width = 6, .kernel_h = window, .kernel_w = window, .stride_h = stride,
                        .stride_w = stride, .padding_h = window / 2, .padding_w = window / 2,
                        .ceil_mode = draw.chance(50)};
    const Own x(2, 7, 6, 5, 1), most(2, s.out_height(), s.out_width(), 5, 0), mean(2, s.out_height(), s.out_width(), 5, 0);
    for (Index image = 0; image < 2; ++image)
      for (Index row = 0; row < 7; ++row)
        for (Index i = 0; i < 30; ++i) x.images.at(image, row, 0)[i] = static_cast<std::uint8_t>(draw.below(256));
    const Mean how{{0.1f, 120, {}}, {0.07f, 100, {}}, draw.chance(50)};
    max_pool2d(s, x.images, most.images);
    avg_pool2d(s, x.images, mean.images, how);
    int differ = 0;
    for (Index image = 0; image < 2; ++image)
      for (Index row = 0; row < s.out_height(); ++row)
        for (Index column = 0; column < s.out_width(); ++column)
          for (Index c = 0; c < 5; ++c) {
            int largest = 0, sum = 0, inside = 0, padded = 0;
            for (Index i = row * stride - window / 2; i < row * stride - window / 2 + window; ++i)
              for (Index j = column * stride - window / 2; j < column * stride - window / 2 + window; ++j) {
                padded += i < 7 + window / 2 && j < 6 + window / 2;
                if (i < 0 || i >= 7 || j < 0 || j >= 6) continue;
                const int q = x.images.at(image, i, j)[c];
                largest = std::max(largest, q);
                sum += q - 120;
                ++inside;
              }
            const float over = static_cast<float>(how.count_include_pad ? padded : inside);
            differ += most.images.at(image, row, column)[c] != largest;
            differ += mean.images.at(image, row, column)[c] != how.y.level(static_cast<float>(sum) * (0.1f / over));
          }
    CHECK(differ == 0);
  }
}

}  // namespace int8_test
