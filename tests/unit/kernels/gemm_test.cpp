#include <algorithm>
#include <catch.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/few_rows.hpp>
#include <chorus/kernels/gemm.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace gemm_test {

using namespace chorus;
using kernels::Trans;

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

template <class T>
std::vector<T> normal(Index count, std::mt19937& random) {
  std::normal_distribution<float> distribution;
  std::vector<T> values(at(count));
  for (auto& value : values) value = static_cast<T>(distribution(random));
  return values;
}

/// Compares with the definition in double precision; the numbers between the rows of c must stay as they are. Results
/// of 2 bytes are those of float, rounded.
template <class T, class Out = compute_type<T>>
void compare(Trans ta, Trans tb, Index m, Index n, Index k, bool accumulate, bool with_bias, Index gap,
             std::mt19937& random) {
  CAPTURE(ta == Trans::yes, tb == Trans::yes, m, n, k, accumulate, with_bias, gap, dtype<T>);
  const Index lda = (ta == Trans::no ? k : m) + gap, ldb = (tb == Trans::no ? n : k) + gap, ldc = n + gap;
  const auto a = normal<T>((ta == Trans::no ? m : k) * lda, random), bias = normal<T>(n, random);
  const auto b = normal<T>((tb == Trans::no ? k : n) * ldb, random), start = normal<T>(m * ldc, random);
  const std::vector<Out> before(start.begin(), start.end());
  auto c = before;
  kernels::gemm(Cpu{}, ta, tb, m, n, k, a.data(), lda, b.data(), ldb, c.data(), ldc, accumulate,
                with_bias ? bias.data() : nullptr);
  double worst = 0;
  bool gaps_kept = true;
  for (Index i = 0; i < m; ++i) {
    for (Index j = 0; j < n; ++j) {
      double sum = (accumulate ? static_cast<double>(before[at(i * ldc + j)]) : 0.0) +
                   (with_bias ? static_cast<double>(bias[at(j)]) : 0.0);
      for (Index p = 0; p < k; ++p)
        sum += static_cast<double>(a[at(ta == Trans::no ? i * lda + p : p * lda + i)]) *
               static_cast<double>(b[at(tb == Trans::no ? p * ldb + j : j * ldb + p)]);
      worst = std::max(worst, std::abs(sum - static_cast<double>(c[at(i * ldc + j)])));
    }
    for (Index j = n; j < ldc; ++j) gaps_kept = gaps_kept && c[at(i * ldc + j)] == before[at(i * ldc + j)];
  }
  CHECK(worst / (std::numeric_limits<Out>::epsilon() * std::sqrt(static_cast<double>(k) + 1)) < 64);
  CHECK(gaps_kept);
  if constexpr (Narrow<T>) {
    auto rounded = start;
    kernels::gemm(Cpu{}, ta, tb, m, n, k, a.data(), lda, b.data(), ldb, rounded.data(), ldc, accumulate,
                  with_bias ? bias.data() : nullptr);
    CHECK(std::equal(c.begin(), c.end(), rounded.begin(), [](float x, T y) { return T(x).bits() == y.bits(); }));
  }
}

constexpr Trans both[] = {Trans::no, Trans::yes};

TEST_CASE("gemm equals its definition for random sizes, also empty ones") {
  std::mt19937 random(1);
  const auto pick = [&](int least, int most) -> Index { return std::uniform_int_distribution<>(least, most)(random); };
  for (int repeat = 0; repeat < 200; ++repeat) {
    const Trans ta = both[pick(0, 1)], tb = both[pick(0, 1)];
    const Index m = pick(0, 40), n = pick(0, 70), k = pick(0, 50);
    const auto compare_in = [&]<class T>(T) {
      compare<T>(ta, tb, m, n, k, pick(0, 1) == 1, pick(0, 1) == 1, pick(0, 3), random);
    };
    repeat % 2 == 0 ? compare_in(bf16()) : repeat % 3 == 0 ? compare_in(double()) : compare_in(float());
  }
}

TEST_CASE("gemm equals its definition across its block sizes") {
  std::mt19937 random(2);
  for (const Trans ta : both)
    for (const Trans tb : both) {
      compare<float>(ta, tb, 9, 65, 519, false, true, 0, random);
      compare<float>(ta, tb, 263, 33, 257, true, true, 1, random);
      compare<float>(ta, tb, 270, 300, 70, false, false, 2, random);
      compare<float>(ta, tb, 1, 1, 1000, true, false, 0, random);
      compare<double>(ta, tb, 260, 280, 258, true, true, 5, random);
      compare<float>(ta, tb, 255, 2100, 259, true, true, 3, random);
      compare<bf16>(ta, tb, 9, 65, 1051, false, true, 1, random);
      compare<bf16>(ta, tb, 263, 33, 513, true, true, 0, random);
      compare<bf16>(ta, tb, 255, 1040, 33, true, false, 3, random);
      compare<half>(ta, tb, 11, 7, 35, true, true, 1, random);
    }
}

/// Whether a row of a product with a transposed matrix has the same bits whatever the number of rows and threads.
template <class T>
void compare_numbers_of_rows() {
  std::mt19937 random(3);
  constexpr Index most = 200, n = 210;
  for (const Trans ta : both)
    for (const Index k : {40, 530}) {
      const auto a = normal<T>(most * k, random), b = normal<T>(n * k, random), bias = normal<T>(n, random);
      const auto before = normal<float>(most * n, random);
      for (const bool accumulate : {false, true}) {
        const auto product = [&](Index m) {
          auto c = before;
          kernels::gemm(Cpu{}, ta, Trans::yes, m, n, k, a.data(), ta == Trans::no ? k : most, b.data(), k, c.data(), n,
                        accumulate, bias.data());
          return c;
        };
        const auto all = product(most);
        for (const Index m : {15, 16, 30, 32, 61, 64}) {
          CAPTURE(ta == Trans::yes, k, accumulate, m);
          set_num_threads(m % 2 == 0 ? 1 : 2);
          const auto some = product(m);
          set_num_threads(1);
          CHECK(std::equal(some.begin(), some.begin() + m * n, all.begin()));
          CHECK(std::equal(some.begin() + m * n, some.end(), before.begin() + m * n));
        }
      }
    }
}

TEST_CASE("a row of a product with a transposed matrix has the same bits whatever the number of rows and threads") {
  compare_numbers_of_rows<float>();
  compare_numbers_of_rows<bf16>();
}

TEST_CASE("a linear layer of a few rows equals its definition, with the same bits on any number of threads") {
  std::mt19937 random(4);
  for (const auto& [n, k] : {std::pair<Index, Index>{1, 1}, {7, 16}, {5, 15}, {6, 41}, {3, 0}, {1500, 270}})
    for (const Index m : {0, 1, 2, 3, 4}) {
      const auto x = normal<float>(m * k, random), w = normal<float>(n * k, random), bias = normal<float>(n, random);
      const float* const biases[] = {nullptr, bias.data()};
      for (const float* const added : biases) {
        CAPTURE(m, n, k, added != nullptr);
        std::vector<float> y(at(m * n + 1), 7);
        kernels::linear_of_few_rows(Cpu{}, m, n, k, x.data(), w.data(), y.data(), added);
        double worst = 0;
        for (Index i = 0; i < m; ++i)
          for (Index j = 0; j < n; ++j) {
            double sum = added == nullptr ? 0.0 : static_cast<double>(added[j]);
            for (Index p = 0; p < k; ++p)
              sum += static_cast<double>(x[at(i * k + p)]) * static_cast<double>(w[at(j * k + p)]);
            worst = std::max(worst, std::abs(sum - static_cast<double>(y[at(i * n + j)])));
          }
        CHECK(worst / (std::numeric_limits<float>::epsilon() * std::sqrt(static_cast<double>(k) + 1)) < 16);
        CHECK(y.back() == 7);
        auto by_two = y;
        set_num_threads(2);
        kernels::linear_of_few_rows(Cpu{}, m, n, k, x.data(), w.data(), by_two.data(), added);
        set_num_threads(1);
        CHECK(by_two == y);
      }
    }
}

TEST_CASE("gemm reads no more than its operands and passes NaN on to its row and column alone") {
  const auto check = []<class T>(T one) {
    std::vector<T> a(5 * 3, one), b(3 * 20, one);
    std::vector<float> c(5 * 20, 7);
    a[2 * 3 + 1] = std::numeric_limits<float>::quiet_NaN();
    a[4 * 3 + 2] = -std::numeric_limits<float>::infinity();
    kernels::gemm(Cpu{}, Trans::no, Trans::no, 5, 20, 3, a.data(), 3, b.data(), 20, c.data(), 20, false);
    for (std::size_t i = 0; i < c.size(); ++i)
      CHECK((i / 20 == 2 ? std::isnan(c[i]) : i / 20 == 4 ? std::isinf(c[i]) && c[i] < 0 : c[i] == 3));
  };
  check(1.0f);
  check(bf16(1.0f));
}

}  // namespace gemm_test
