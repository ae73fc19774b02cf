#include <chorus/ops/fft.hpp>
#include <complex>
#include <numbers>

#include "higher_order.hpp"

namespace fft_test {

namespace fft = ch::fft;
using Complex = std::complex<double>;

// The definition, for lines [2, in, 2], cut or padded to n.
std::vector<double> sums(const Tensor<3>& x, Index n, int sign, double scale) {
  std::vector<double> out;
  for (Index line = 0; line < x.size(0); ++line)
    for (Index k = 0; k < n; ++k) {
      Complex sum;
      for (Index j = 0; j < std::min(n, x.size(1)); ++j)
        sum += Complex(x(line, j, 0), x(line, j, 1)) *
               std::polar(1.0, sign * 2 * std::numbers::pi * static_cast<double>(j * k % n) / static_cast<double>(n));
      out.push_back(scale * sum.real());
      out.push_back(scale * sum.imag());
    }
  return out;
}

TEST_CASE("fft and ifft are their definitions, of every length, cut and continued with zeros") {
  const auto x = numbers<3>({2, 6, 2}, 1);
  for (const Index n : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 25, 30}) {
    CAPTURE(n);
    const auto count = static_cast<double>(n);
    CHECK(distance(values(fft::fft(x, {.n = n})), sums(x, n, -1, 1)) < 1e-12);
    CHECK(distance(values(fft::ifft(x, {.n = n})), sums(x, n, 1, 1 / count)) < 1e-12);
    CHECK(distance(values(fft::fft(x, {.n = n, .norm = fft::Norm::ortho})), sums(x, n, -1, 1 / std::sqrt(count))) < 1e-12);
    CHECK(distance(values(fft::ifft(x, {.n = n, .norm = fft::Norm::forward})), sums(x, n, 1, 1)) < 1e-12);

    const auto real = numbers<2>({3, n}, 2);
    const auto spectrum = fft::rfft(real);
    CHECK(spectrum.shape() == Shape<3>{3, n / 2 + 1, 2});
    CHECK(distance(values(fft::irfft(spectrum, {.n = n})), values(real)) < 1e-12);
    const auto pairs = ch::stack(-1, real, Tensor<2>::zeros({3, n}));
    CHECK(distance(values(spectrum), values(ch::slice(fft::fft(pairs), 1, 0, n / 2 + 1))) < 1e-12);
  }
  CHECK(fft::fft(Tensor<3>::empty({0, 4, 2})).numel() == 0);
  CHECK(fft::rfft(Tensor<2>::empty({2, 0}), {.n = 4}).to_vector() == std::vector<double>(2 * 3 * 2, 0));
}

TEST_CASE("gradients of Fourier transforms, and theirs") {
  const auto x = numbers<2>({2, 5}, 3);
  const auto z = numbers<3>({2, 4, 2}, 4);
  for (const Index n : {3, 4, 7, 8}) {
    CAPTURE(n);
    const fft::Options options{.n = n, .norm = fft::Norm::ortho};
    check_operator([&](const auto& a) { return fft::rfft(a, options); }, x);
    check_operator([&](const auto& a) { return fft::irfft(a, options); }, z);
    check_operator([&](const auto& a) { return fft::fft(a, options); }, z);
    check_operator([&](const auto& a) { return fft::ifft(a, options); }, z);
  }
  check_second([](const auto& a) { return fft::irfft(ch::square(fft::rfft(ch::square(a))), {.n = 5}); }, x);
}

TEST_CASE("Fourier transforms of two axes, and a convolution by products") {
  const auto x = numbers<3>({2, 3, 5}, 5);
  check_operator([](const auto& a) { return fft::rfft2(a); }, x);
  const auto y = fft::rfft2(x);
  CHECK(y.shape() == Shape<4>{2, 3, 3, 2});
  CHECK(distance(values(fft::irfft2(y, {.s = Shape<2>{3, 5}})), values(x)) < 1e-12);
  CHECK(distance(values(fft::ifft2(fft::fft2(y))), values(y)) < 1e-12);

  const auto signal = Tensor<1>::from({1, 2, 3, 4}, {4}), filter = Tensor<1>::from({1, -1}, {2});
  const auto convolved = [](const auto& a, const auto& b) {
    return fft::irfft(fft::mul(fft::rfft(a), fft::rfft(b, {.n = 4})));
  };
  CHECK(distance(values(convolved(signal, filter)), {-3, 1, 1, 1}) < 1e-12);
  check_operator(convolved, signal, filter);
}

TEST_CASE("a thread that meets many lengths still has each length's numbers") {
  for (const Index n : {40, 3, 40})
    for (Index more = 0; more < 20; ++more) {
      const auto x = numbers<2>({1, n + more}, 6);
      CHECK(distance(values(fft::irfft(fft::rfft(x), {.n = n + more})), values(x)) < 1e-12);
    }
}

TEST_CASE("Fourier transforms refuse lengths below 1 and what holds no pairs") {
  CHECK(message_of<ch::ShapeError>([] { fft::rfft(Tensor<2>::empty({3, 0})); }) ==
        "rfft: expected a length of 1 to 2147483647, got n = 0 for an operand of shape [3, 0]");
  CHECK(message_of<ch::ShapeError>([] { fft::irfft(Tensor<2>::zeros({1, 2})); }) ==
        "irfft: expected a length of 1 to 2147483647, got n = 0 for an operand of shape [1, 2]");
  CHECK(message_of<ch::ShapeError>([] { fft::fft(Tensor<2>::zeros({1, 2}), {.n = -1}); }) ==
        "fft: expected a length of 1 to 2147483647, got n = -1 for an operand of shape [1, 2]");
  CHECK(message_of<ch::ShapeError>([] { fft::ifft(Tensor<2>::zeros({2, 3})); }) ==
        "ifft: expected complex numbers as pairs of real and imaginary part, [..., n, 2], got shape [2, 3]");
  CHECK(message_of<ch::ShapeError>([] { fft::mul(Tensor<2>::zeros({2, 2}), Tensor<1>::zeros({1})); }) ==
        "fft::mul: expected complex numbers as pairs, [..., 2], got shapes [2, 2] and [1]");
}

}  // namespace fft_test
