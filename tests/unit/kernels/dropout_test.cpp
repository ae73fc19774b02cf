#include <cstddef>
#include <limits>
#include <string>

#include <catch.hpp>
#include <chorus/kernels/cpu/dropout.hpp>

#include "reference.hpp"

namespace dropout_test {

using namespace chorus::kernels;
using chorus::Cpu;
using chorus::RandomKey;

const RandomKey key{.seed = 0x123456789abcdefull, .step = 5, .operation = 2, .first_sample = 100};

// The rule that kernels on all devices follow, word by word.
bool keeps(const RandomKey& k, Index sample, Index element, double p) {
  const auto words =
      chorus::philox(k.seed, {static_cast<std::uint32_t>(element / 4),
                              static_cast<std::uint32_t>(k.first_sample + sample), k.step, k.operation ^ 0x64726F70u});
  return static_cast<double>(chorus::unit_float(words[static_cast<std::size_t>(element % 4)])) >= p;
}

std::vector<float> dropped(Index samples, Index inner, const std::vector<float>& x, double p, const RandomKey& k) {
  std::vector<float> y(x.size(), 77.0f);
  dropout_forward(Cpu{}, samples, inner, x.data(), y.data(), p, k);
  return y;
}

TEST_CASE("dropout follows its rule for every size") {
  for (const Index samples : {0, 1, 3, 20})
    for (const Index inner : {0, 1, 4, 6, 63, 64, 120, 131})
      for (const double p : {0.0, 0.1, 0.5, 1.0}) {
        CAPTURE(samples, inner, p);
        const auto x = numbers<float>(samples * inner, 51);
        const auto y = dropped(samples, inner, x, p, key);
        std::vector<float> expected;
        for (Index s = 0; s < samples; ++s)
          for (Index e = 0; e < inner; ++e) {
            const float value = x[static_cast<std::size_t>(s * inner + e)];
            expected.push_back(keeps(key, s, e, p) ? value * static_cast<float>(1 / (1 - p)) : 0.0f);
          }
        CHECK(y == expected);
      }
}

TEST_CASE("dropout does not depend on how the samples are split") {
  for (const Index inner : {10, 120}) {
    const auto x = numbers<float>(9 * inner, 52);
    const auto whole = dropped(9, inner, x, 0.5, key);
    for (Index first = 0; first <= 9; ++first) {
      const auto cut = static_cast<std::ptrdiff_t>(first * inner);
      auto later = key;
      later.first_sample += first;
      auto joined = dropped(first, inner, {x.begin(), x.begin() + cut}, 0.5, key);
      const auto rest = dropped(9 - first, inner, {x.begin() + cut, x.end()}, 0.5, later);
      joined.insert(joined.end(), rest.begin(), rest.end());
      CHECK(joined == whole);
    }
  }
}

TEST_CASE("dropout keeps a share of 1 - p, differently in each step, layer and sample") {
  const std::vector<float> x(100000, 1.0f);
  const auto kept = [](const std::vector<float>& y) {
    double count = 0;
    for (const float value : y) count += value != 0;
    return count / static_cast<double>(y.size());
  };
  const auto y = dropped(100, 1000, x, 0.3, key);
  CHECK(kept(y) == Approx(0.7).margin(0.01));
  for (auto change : {0, 1, 2, 3}) {
    auto other = key;
    if (change == 0) ++other.step;
    if (change == 1) ++other.operation;
    if (change == 2) ++other.seed;
    if (change == 3) other.first_sample += 100;
    auto both = dropped(100, 1000, x, 0.3, other);
    for (std::size_t i = 0; i < both.size(); ++i) both[i] *= y[i];
    CHECK(kept(both) == Approx(0.49).margin(0.01));
  }
}

TEST_CASE("the backward pass of dropout draws the same mask") {
  const Index samples = 7, inner = 45;
  const auto dy = numbers<double>(samples * inner, 53);
  std::vector<double> y(dy.size()), dx(dy.size(), 1.0), ones(dy.size(), 1.0);
  dropout_forward(Cpu{}, samples, inner, ones.data(), y.data(), 0.4, key);
  dropout_backward(Cpu{}, samples, inner, dy.data(), dx.data(), 0.4, key, true);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = 1 + y[i] * dy[i];
  CHECK(error(dx, y) < 1e-15);
  dropout_backward(Cpu{}, samples, inner, dy.data(), dx.data(), 0.4, key, false);
  for (double& value : y) value -= 1;
  CHECK(error(dx, y) < 1e-15);
}

TEST_CASE("dropout refuses a p that is no probability") {
  const float x = 1;
  float y = 5;
  for (const double p : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    std::string message;
    try {
      dropout_forward(Cpu{}, 1, 1, &x, &y, p, key);
    } catch (const chorus::UsageError& error) {
      message = error.what();
    }
    CHECK(message == chorus::cat("dropout: p must be in [0, 1], got ", p));
  }
  CHECK(y == 5);
}

TEST_CASE("the integer threshold of dropout is the comparison of unit floats") {
  for (const double p : {0.0, 0x1p-24, 0.1, 0.3, 0.5, 0.9, 1.0})
    for (const std::uint32_t near :
         {0u, 1u, 1677721u, 1677722u, 5033164u, 5033165u, 8388607u, 8388608u, 15099494u, 15099495u, 16777215u}) {
      CAPTURE(p, near);
      const std::uint32_t word = near << 8 | 0x5au;
      CHECK(dropout_keeps(word, dropout_threshold(p)) == (static_cast<double>(chorus::unit_float(word)) >= p));
    }
}

}  // namespace dropout_test
