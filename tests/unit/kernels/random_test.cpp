#include <algorithm>
#include <cstddef>
#include <numeric>

#include <catch.hpp>
#include <chorus/kernels/cpu/philox_block.hpp>
#include <chorus/kernels/cpu/random.hpp>

#include "reference.hpp"

namespace random_test {

using namespace chorus::kernels;
using chorus::Cpu;

template <class T>
std::vector<T> uniform(Index offset, Index count, T lo = 0, T hi = 1, std::uint64_t stream = 2) {
  std::vector<T> out(static_cast<std::size_t>(count));
  fill_uniform(Cpu{}, 1, stream, offset, count, out.data(), lo, hi);
  return out;
}
template <class T>
std::vector<T> normal(Index offset, Index count, T mean = 0, T deviation = 1) {
  std::vector<T> out(static_cast<std::size_t>(count));
  fill_normal(Cpu{}, 1, 2, offset, count, out.data(), mean, deviation);
  return out;
}
double mean_of(const auto& x) { return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size()); }
double variance_of(const auto& x) {
  double sum = 0;
  const double mean = mean_of(x);
  for (const double value : x) sum += (value - mean) * (value - mean);
  return sum / static_cast<double>(x.size());
}

TEST_CASE("a block of Philox words is Philox, counter by counter") {
  std::array<chorus::PhiloxWords, philox_block> counters;
  for (std::size_t i = 0; i < philox_block; ++i) {
    const auto n = static_cast<std::uint32_t>(i);
    counters[i] = {n * 2654435761u, n + 7, ~n, n << 20};
  }
  std::array<std::uint32_t, 4 * philox_block> words;
  philox_words(0xfedcba9876543210ull, counters.data(), words.data());
  for (std::size_t i = 0; i < words.size(); ++i)
    CHECK(words[i] == chorus::philox(0xfedcba9876543210ull, counters[i / 4])[i % 4]);
}

TEMPLATE_TEST_CASE("any part of a stream can be drawn alone", "", float, double) {
  const auto all = uniform<TestType>(0, 40);
  const auto all_normal = normal<TestType>(0, 40);
  for (std::ptrdiff_t offset = 0; offset < 9; ++offset)
    for (std::ptrdiff_t count = 0; count < 20; ++count) {
      CHECK(uniform<TestType>(offset, count) ==
            std::vector<TestType>(all.begin() + offset, all.begin() + offset + count));
      CHECK(normal<TestType>(offset, count) ==
            std::vector<TestType>(all_normal.begin() + offset, all_normal.begin() + offset + count));
    }
  CHECK(uniform<TestType>(Index{1} << 40, 4) != uniform<TestType>(0, 4));
}

TEST_CASE("uniform floats are Philox words, scaled") {
  const auto x = uniform<float>(0, 8, -3, 5);
  for (std::size_t i = 0; i < 8; ++i) {
    const auto word = chorus::philox(1, {static_cast<std::uint32_t>(i / 4), 0, 2, 0})[i % 4];
    CHECK(x[i] == static_cast<float>(-3 + 8 * static_cast<double>(chorus::unit_float(word))));
  }
}

TEMPLATE_TEST_CASE("random numbers have the moments they should", "", float, double) {
  const auto u = uniform<TestType>(0, 100000, -1, 3);
  CHECK(mean_of(u) == Approx(1).margin(0.02));
  CHECK(variance_of(u) == Approx(16.0 / 12).margin(0.02));
  CHECK(*std::min_element(u.begin(), u.end()) >= -1);
  CHECK(*std::max_element(u.begin(), u.end()) < 3);
  const auto n = normal<TestType>(0, 100000, 2, 3);
  CHECK(mean_of(n) == Approx(2).margin(0.05));
  CHECK(variance_of(n) == Approx(9).margin(0.15));
  CHECK(std::count_if(n.begin(), n.end(), [](auto x) { return x > 8; }) == Approx(2275).margin(200));
  CHECK(uniform<TestType>(0, 4, 0, 1, 3) != uniform<TestType>(0, 4, 0, 1, 2));
}

TEST_CASE("a uniform float stays below its upper bound when rounding would reach it") {
  const auto x = uniform<float>(0, 100000, 1.0f, std::nextafter(1.0f, 2.0f));
  CHECK(std::all_of(x.begin(), x.end(), [](float value) { return value == 1.0f; }));
}

TEST_CASE("a permutation has every number once, in an order of its own for each seed and stream") {
  for (const Index n : {0, 1, 2, 3, 10, 1000}) {
    auto order = permutation(4, 5, n);
    CHECK(order == permutation(4, 5, n));
    if (n > 3) {
      CHECK(order != permutation(4, 6, n));
      CHECK(order != permutation(5, 5, n));
      CHECK_FALSE(std::is_sorted(order.begin(), order.end()));
    }
    std::sort(order.begin(), order.end());
    std::vector<Index> sorted(static_cast<std::size_t>(n));
    std::iota(sorted.begin(), sorted.end(), Index{0});
    CHECK(order == sorted);
  }
}

TEST_CASE("all orders of three are equally frequent") {
  int counts[27] = {};
  for (std::uint64_t stream = 0; stream < 6000; ++stream) {
    const auto order = permutation(6, stream, 3);
    ++counts[order[0] * 9 + order[1] * 3 + order[2]];
  }
  for (const int code : {5, 7, 11, 15, 19, 21}) CHECK(counts[code] == Approx(1000).margin(130));
}

}  // namespace random_test
