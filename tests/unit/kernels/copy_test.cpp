#include <algorithm>
#include <catch.hpp>
#include <chorus/kernels/cpu/axis_block.hpp>
#include <chorus/kernels/cpu/copy.hpp>
#include <memory>
#include <numeric>
#include <vector>

#include "reference.hpp"

namespace copy_test {

using namespace chorus::kernels;
using chorus::Cpu;

using Sizes = std::vector<Index>;

struct View {
  Sizes shape, strides;
};
const View views[] = {
    {{}, {}},
    {{5}, {1}},
    {{5}, {3}},
    {{5}, {0}},
    {{4, 6}, {6, 1}},
    {{6, 4}, {1, 6}},                // transposed
    {{33, 50}, {1, 33}},             // transposed, larger than a tile
    {{2, 40, 3}, {120, 1, 40}},      // channels last
    {{3, 2, 4}, {1, 12, 3}},         // all axes moved
    {{4, 5, 2, 3}, {1, 4, 60, 20}},  // transposed with more axes around
    {{2, 3, 4, 5}, {60, 0, 5, 1}},   // expanded
    {{5, 2}, {1, 0}},                // each number twice
    {{7, 3}, {2, 0}},                // three times, with gaps
    {{3, 2, 4, 2}, {4, 0, 1, 0}},    // images of twice the size
    {{2, 3, 17}, {5, 1, 0}},         // many times
    {{2, 2, 3, 2, 2, 2, 2, 2}, {1, 2, 4, 12, 24, 48, 96, 192}},
    {{3, 0, 2}, {1, 2, 3}},
};

Index numel_of(const Sizes& shape) {
  return std::accumulate(shape.begin(), shape.end(), Index{1}, std::multiplies<>());
}
std::size_t offset_of(Index at, const View& view) {
  Index offset = 0;
  for (std::size_t axis = view.shape.size(); axis-- > 0; at /= view.shape[axis])
    offset += at % view.shape[axis] * view.strides[axis];
  return static_cast<std::size_t>(offset);
}

/// Memory that all of `views` fit into; not std::vector, which has no bool in memory.
template <class T>
struct Source {
  T data[2000];
  Source() {
    for (std::size_t i = 0; i < 2000; ++i) data[i] = static_cast<T>(i * 7 % 251);
  }
};

TEMPLATE_TEST_CASE("copy_strided makes any view dense, for every scalar type", "", bool, std::uint8_t, std::int8_t,
                   std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t, std::uint64_t, float,
                   double) {
  using T = TestType;
  const Source<T> source;
  for (const View& view : views) {
    CAPTURE(view.shape, view.strides);
    const Index count = numel_of(view.shape);
    T out[2000] = {};
    copy_strided<T>(Cpu{}, view.shape, source.data, view.strides, out);
    bool equal = true;
    for (Index i = 0; i < count; ++i) equal = equal && out[i] == source.data[offset_of(i, view)];
    CHECK(equal);
    CHECK(out[count] == T{});
  }
}

TEST_CASE("threads share the copy of a view with many axes, each in matrices of its own") {
  const View large[] = {
      {{9, 10, 11, 12, 13}, {1, 9, 90, 990, 11880}},  // all axes reversed
      {{5, 40, 50, 17}, {34000, 1, 40, 2000}},        // channels last
      {{2, 300, 311}, {1, 2, 600}},                   // few matrices
      {{40, 1, 70, 80}, {1, 0, 3200, 40}},
  };
  for (const View& view : large) {
    CAPTURE(view.shape);
    const auto count = static_cast<std::size_t>(numel_of(view.shape));
    REQUIRE(count >= 2 * chorus::thread_elements);
    std::vector<float> source(count), out(count);
    std::iota(source.begin(), source.end(), 0.0f);
    for (const int threads : {1, 2, 3}) {
      chorus::set_num_threads(threads);
      std::fill(out.begin(), out.end(), -1.0f);
      copy_strided<float>(Cpu{}, view.shape, source.data(), view.strides, out.data());
      bool equal = true;
      for (std::size_t i = 0; i < count; ++i) equal = equal && out[i] == source[offset_of(static_cast<Index>(i), view)];
      CHECK(equal);
    }
    chorus::set_num_threads(1);
  }
}

TEMPLATE_TEST_CASE("scatter_strided puts a dense array into a view, or adds it", "", std::int64_t, float, double) {
  using T = TestType;
  const Source<T> source;
  for (const View& view : views) {
    CAPTURE(view.shape, view.strides);
    const Index count = numel_of(view.shape);
    std::vector<T> out(2000, T{1}), expected = out;
    if (std::find(view.strides.begin(), view.strides.end(), 0) == view.strides.end()) {
      scatter_strided<T>(Cpu{}, view.shape, source.data, out.data(), view.strides);
      for (Index i = 0; i < count; ++i) expected[offset_of(i, view)] = source.data[i];
      CHECK(out == expected);
    }
    if constexpr (chorus::Real<T>) {
      scatter_strided<T>(Cpu{}, view.shape, source.data, out.data(), view.strides, true);
      for (Index i = 0; i < count; ++i) expected[offset_of(i, view)] += source.data[i];
      CHECK(out == expected);  // small integers: exact
    } else {
      CHECK_THROWS_WITH(scatter_strided<T>(Cpu{}, Sizes{1}, source.data, out.data(), Sizes{1}, true),
                        "scatter_strided: cannot accumulate I64");
    }
  }
}

TEMPLATE_TEST_CASE("a block is taken out, put in, and padded with zeros", "", bool, std::int64_t, float) {
  using T = TestType;
  const AxisShape shapes[] = {{1, 4, 1}, {300, 3, 1}, {700, 5, 2}, {3, 4, 5}, {2, 3, 3000}, {0, 3, 2}, {3, 3, 0}};
  for (const auto& whole : shapes)
    for (const Index start : {0, 1, 2})
      for (const Index count : {0, 1, 2}) {
        if (start + count > whole.axis) continue;
        CAPTURE(whole.outer, whole.axis, whole.inner, start, count);
        const auto n = static_cast<std::size_t>(whole.numel());
        const auto x = std::make_unique<T[]>(n), block = std::make_unique<T[]>(n), padded = std::make_unique<T[]>(n);
        for (std::size_t i = 0; i < n; ++i) {
          x[i] = static_cast<T>(i % 5 + 1);
          padded[i] = T{1};
        }
        take_block(Cpu{}, whole, start, count, x.get(), block.get());
        pad_block(Cpu{}, whole, start, count, block.get(), padded.get());
        bool equal = true;
        for (std::size_t i = 0; i < n; ++i) {
          const Index place = static_cast<Index>(i) / whole.inner % whole.axis;
          equal = equal && padded[i] == (place >= start && place < start + count ? x[i] : T{});
        }
        CHECK(equal);
      }
}

TEMPLATE_TEST_CASE("fill sets every element and no other, for every scalar type", "", bool, std::uint8_t, std::int8_t,
                   std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t, std::uint64_t, float,
                   double) {
  for (const Index n : {0, 1, 16, 19}) {
    TestType out[20] = {};
    fill(Cpu{}, n, out, TestType{1});
    CHECK(std::count(out, out + 20, TestType{1}) == n);
    CHECK(std::count(out, out + n, TestType{1}) == n);
  }
}

TEST_CASE("convert casts as static_cast does") {
  const float x[] = {-1.7f, 0.0f, 2.9f};
  std::int32_t integers[3];
  bool truths[3];
  double doubles[3];
  convert(Cpu{}, 3, x, integers);
  convert(Cpu{}, 3, x, truths);
  convert(Cpu{}, 3, x, doubles);
  CHECK((integers[0] == -1 && integers[1] == 0 && integers[2] == 2));
  CHECK((truths[0] && !truths[1] && truths[2]));
  CHECK(doubles[2] == static_cast<double>(2.9f));
}

TEMPLATE_TEST_CASE("axpy and scale", "", float, double) {
  using T = TestType;
  for (const Index n : {0, 1, 16, 37}) {
    const auto x = numbers<T>(n, 1);
    auto y = numbers<T>(n, 2);
    const auto before = y;
    axpy(Cpu{}, n, T{2}, x.data(), y.data());
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(y[i] == Approx(before[i] + 2 * x[i]));
    scale(Cpu{}, n, T{-3}, y.data());
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(y[i] == Approx(-3 * (before[i] + 2 * x[i])));
  }
}

}  // namespace copy_test
