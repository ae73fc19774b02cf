#include <algorithm>
#include <catch.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/sort.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace {
using chorus::Cpu;
using chorus::Index;
using chorus::kernels::AxisShape;

// Few different numbers, of both signs, with zeros of both, infinities and NaN of both.
template <class T>
std::vector<T> sort_numbers(Index count) {
  std::vector<T> x(static_cast<std::size_t>(count));
  std::uint32_t state = 1;
  for (T& value : x) {
    state = state * 1664525u + 1013904223u;
    const auto pick = static_cast<std::int64_t>(state >> 16) % 300 - 150;
    value = static_cast<T>(pick * (1 << 20));
    if constexpr (std::numeric_limits<T>::has_infinity) {
      value = static_cast<T>(pick) / T{8};
      if (pick == 3) value = -T{0};
      if (pick == 5) value = std::numeric_limits<T>::infinity();
      if (pick == -5) value = -std::numeric_limits<T>::infinity();
      if (pick == 7) value = std::numeric_limits<T>::quiet_NaN();
      if (pick == -7) value = -std::numeric_limits<T>::quiet_NaN();
    }
  }
  return x;
}

template <class T>
std::vector<std::int64_t> sorted_by_definition(AxisShape s, Index count, bool descending, const std::vector<T>& x) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(s.axis)),
      out(static_cast<std::size_t>(s.outer * count * s.inner));
  for (Index o = 0; o < s.outer; ++o)
    for (Index i = 0; i < s.inner; ++i) {
      const auto less = [&](std::int64_t a, std::int64_t b) {
        const auto at = [&](std::int64_t j) { return x[static_cast<std::size_t>((o * s.axis + j) * s.inner + i)]; };
        const T u = at(a), v = at(b);
        return u < v || (v != v && u == u);
      };
      std::iota(order.begin(), order.end(), std::int64_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](auto a, auto b) { return descending ? less(b, a) : less(a, b); });
      for (Index j = 0; j < count; ++j)
        out[static_cast<std::size_t>((o * count + j) * s.inner + i)] = order[static_cast<std::size_t>(j)];
    }
  return out;
}

template <class T>
void check_sorting(AxisShape s, Index count) {
  const auto x = sort_numbers<T>(s.numel());
  for (const bool descending : {false, true}) {
    const auto expected = sorted_by_definition(s, count, descending, x);
    std::vector<std::int64_t> index(expected.size());
    for (const int threads : {1, 2}) {
      chorus::set_num_threads(threads);
      chorus::kernels::argsort(Cpu{}, s, count, descending, x.data(), index.data());
      CHECK(index == expected);
    }
    chorus::set_num_threads(1);
  }
}

TEST_CASE("long and short lines, rows and columns, are sorted by definition on one thread and two") {
  for (const Index length : {1, 17, 200, 5000}) {
    check_sorting<float>({3, length, 1}, length);
    check_sorting<double>({1, length, 11}, length);
    check_sorting<std::int64_t>({2, length, 1}, length);
  }
  for (const Index count : {0, 1, 5, 60, 300}) {  // few of many
    check_sorting<float>({2, 3000, 1}, count);
    check_sorting<double>({3, 517, 1}, count);
    check_sorting<std::int64_t>({2, 1000, 1}, count);
  }
  check_sorting<float>({2, 300, 9}, 200);
  check_sorting<float>({0, 3, 1}, 3);
}

TEST_CASE("matrices that are copied transposed have every number in its place on one thread and two") {
  for (const Index rows : {1, 7, 64, 131, 700})
    for (const Index columns : {1, 8, 77, 300}) {
      std::vector<float> x(static_cast<std::size_t>(rows * columns)), y(x.size());
      std::iota(x.begin(), x.end(), 0.0f);
      for (const int threads : {1, 2}) {
        chorus::set_num_threads(threads);
        std::fill(y.begin(), y.end(), -1.0f);
        const Index shape[] = {1, columns, rows}, strides[] = {0, 1, columns};
        chorus::kernels::copy_strided(Cpu{}, std::span(shape), x.data(), std::span(strides), y.data());
        bool right = true;
        for (Index j = 0; j < columns; ++j)
          for (Index i = 0; i < rows; ++i)
            right = right && y[static_cast<std::size_t>(j * rows + i)] == x[static_cast<std::size_t>(i * columns + j)];
        CHECK(right);
      }
      chorus::set_num_threads(1);
    }
}

}  // namespace
