#pragma once
/// Fourier transforms with torch.fft's names, float or double, on the CPU, differentiable any number of times: rfft,
/// irfft, fft, ifft along the last axis, rfft2, irfft2, fft2, ifft2 over the last two. Complex numbers have an extra
/// last axis, [..., 2], for real and imaginary part, as in torch.view_as_real. `norm(y, -1)` is the absolute value,
/// `fft::mul` a product. Lengths with small prime factors take n log n steps, a prime n takes n².

#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/cpu/fft.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/shape.hpp>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>

namespace chorus {

namespace operations {
// Which side of the transform is real.
enum class Fourier : std::uint8_t { complex, from_real, to_real };

// The tape's record, in addition to the backward function: see ops/higher_order.hpp.
template <Fourier Kind>
struct FourierTransform {
  static constexpr const char* name = Kind == Fourier::complex ? "fft" : Kind == Fourier::from_real ? "rfft" : "irfft";
  static constexpr bool linear = true;
  kernels::FourierPlan plan;
};
}  // namespace operations

namespace fft {

/// Where the scale goes: backward: 1/n on the inverse; ortho: 1/sqrt(n) on both; forward: 1/n on the transform.
enum class Norm : std::uint8_t { backward, ortho, forward };

/// Options of transforms along the last axis.
struct Options {
  std::optional<Index> n = {};  ///< signal length; longer signals are cut, shorter ones padded with zeros
  Norm norm = Norm::backward;
};
/// Options of transforms over the last two axes.
struct Options2 {
  std::optional<Shape<2>> s = {};  ///< n of the last two axes
  Norm norm = Norm::backward;
};

namespace detail {

using operations::Fourier;

constexpr Fourier transposed(Fourier kind) {
  return kind == Fourier::from_real ? Fourier::to_real : kind == Fourier::to_real ? Fourier::from_real : kind;
}

template <Operand X>
constexpr void check_type() {
  using Of = tensor_of<X>;
  static_assert(std::is_same_v<typename Of::device_type, Cpu>,
                "fft: expected an operand on the CPU; to_device(x, Cpu{}) copies it");
  static_assert(std::floating_point<typename Of::value_type>, "fft: expected an operand of float or double");
}

template <Fourier Kind, Operand X>
auto transform(const X& x, const kernels::FourierPlan& plan) {
  constexpr int rank = tensor_of<X>::rank;
  constexpr auto axes = static_cast<std::size_t>(Kind == Fourier::from_real ? rank : rank - 1);
  const auto input = contiguous(value_of(x));
  Shape<rank + (Kind == Fourier::from_real) - (Kind == Fourier::to_real)> shape{};
  Index count = 1;
  for (std::size_t i = 0; i + 1 < axes; ++i) count *= shape[i] = input.shape()[i];
  shape[axes - 1] = plan.out;
  if constexpr (Kind != Fourier::to_real) shape[axes] = 2;
  auto out = Tensor<typename tensor_of<X>::value_type, static_cast<int>(shape.size())>::empty(shape);
  if constexpr (Kind == Fourier::complex)
    kernels::fft(count, plan, input.data(), out.data());
  else if constexpr (Kind == Fourier::from_real)
    kernels::rfft(count, plan, input.data(), out.data());
  else
    kernels::irfft(count, plan, input.data(), out.data());
  return record(
      operations::FourierTransform<Kind>{plan}, std::move(out),
      [plan](const auto& dy, auto dx) { dx->add(transform<transposed(Kind)>(dy, plan.adjoint())); }, x);
}

// The length of a signal in x, which is real or complex (pairs).
template <bool Real, Operand X>
Index length(const char* operation, const X& x) {
  check_type<X>();
  static_assert(tensor_of<X>::rank >= (Real ? 1 : 2),
                "fft: expected an axis for a real operand, two for a complex one (real and imaginary part)");
  const auto& input = value_of(x);
  chorus::detail::check_defined(operation, input);
  if constexpr (Real) {
    return input.shape().back();
  } else {
    check<ShapeError>(input.shape().back() == 2, operation,
                      ": expected complex numbers as pairs of real and imaginary part, [..., n, 2], got shape ",
                      input.shape());
    return input.shape()[input.shape().size() - 2];
  }
}

template <Operand X>
kernels::FourierPlan plan(const char* operation, const X& x, Index in, Index n, Norm norm, bool inverse) {
  check<ShapeError>(n >= 1 && n <= std::numeric_limits<int>::max(), operation,
                    ": expected a length of 1 to 2147483647, got n = ", n, " for an operand of shape ",
                    value_of(x).shape());
  const double whole = 1 / static_cast<double>(n);
  const double scale = norm == Norm::ortho ? std::sqrt(whole) : (norm == Norm::forward) != inverse ? whole : 1;
  return {in, n, n, inverse, scale, 1};
}

template <Operand X>
auto complex(const char* operation, const X& x, const Options& options, bool inverse) {
  const Index in = length<false>(operation, x);
  return transform<Fourier::complex>(x, plan(operation, x, in, options.n.value_or(in), options.norm, inverse));
}
template <Operand X>
auto from_real(const char* operation, const X& x, const Options& options) {
  const Index in = length<true>(operation, x);
  auto made = plan(operation, x, in, options.n.value_or(in), options.norm, false);
  made.out = made.half();
  return transform<Fourier::from_real>(x, made);
}
template <Operand X>
auto to_real(const char* operation, const X& x, const Options& options) {
  const Index in = length<false>(operation, x);
  auto made = plan(operation, x, in, options.n.value_or(2 * (in - 1)), options.norm, true);
  made.middle = 2;
  return transform<Fourier::to_real>(x, made);
}

// The complex transform of the second last axis.
template <Operand X>
auto along_rows(const char* operation, const X& x, const Options& options, bool inverse) {
  static_assert(tensor_of<X>::rank >= 3, "fft: expected an operand with two axes to transform");
  return transpose(complex(operation, transpose(x, -3, -2), options, inverse), -3, -2);
}

inline Options option_of(const Options2& options, std::size_t axis) {
  return {options.s ? std::optional<Index>((*options.s)[axis]) : std::nullopt, options.norm};
}

}  // namespace detail

/// y_k = Σ_j x_j exp(-2πi jk/n) of complex x: [..., n, 2] -> [..., n, 2]. Throws ShapeError if the last axis does not
/// hold pairs or a length is below 1.
template <Operand X>
auto fft(const X& x, const Options& options = {}) {
  return detail::complex("fft", x, options, false);
}

/// The inverse of fft: x_j = 1/n Σ_k y_k exp(2πi jk/n): [..., n, 2] -> [..., n, 2]. Throws as fft does.
template <Operand X>
auto ifft(const X& x, const Options& options = {}) {
  return detail::complex("ifft", x, options, true);
}

/// fft of real x. Returns the first n/2 + 1 values, the others are conjugates: [..., n] -> [..., n/2 + 1, 2]. Throws
/// ShapeError if a length is below 1.
template <Operand X>
auto rfft(const X& x, const Options& options = {}) {
  return detail::from_real("rfft", x, options);
}

/// The inverse of rfft: [..., n/2 + 1, 2] -> [..., n]. By default n is even, 2 (size - 1); for an odd length pass `n`.
/// The imaginary part of the first value is ignored, and for even n that of the last. Throws as fft does.
template <Operand X>
auto irfft(const X& x, const Options& options = {}) {
  return detail::to_real("irfft", x, options);
}

/// fft over the last two axes of complex x: [..., h, w, 2] -> [..., h, w, 2].
template <Operand X>
auto fft2(const X& x, const Options2& options = {}) {
  return detail::along_rows("fft2", detail::complex("fft2", x, detail::option_of(options, 1), false),
                            detail::option_of(options, 0), false);
}

/// The inverse of fft2.
template <Operand X>
auto ifft2(const X& x, const Options2& options = {}) {
  return detail::along_rows("ifft2", detail::complex("ifft2", x, detail::option_of(options, 1), true),
                            detail::option_of(options, 0), true);
}

/// fft2 of real x: [..., h, w] -> [..., h, w/2 + 1, 2].
template <Operand X>
auto rfft2(const X& x, const Options2& options = {}) {
  return detail::along_rows("rfft2", detail::from_real("rfft2", x, detail::option_of(options, 1)),
                            detail::option_of(options, 0), false);
}

/// The inverse of rfft2: [..., h, w/2 + 1, 2] -> [..., h, w]; pass `s` if w is odd.
template <Operand X>
auto irfft2(const X& x, const Options2& options = {}) {
  return detail::to_real("irfft2", detail::along_rows("irfft2", x, detail::option_of(options, 0), true),
                         detail::option_of(options, 1));
}

/// The broadcast product of complex numbers, [..., 2] each. A circular convolution is irfft(mul(rfft(x), rfft(y))).
template <Operand A, Operand B>
auto mul(const A& a, const B& b) {
  static_assert(tensor_of<A>::rank >= 1 && tensor_of<B>::rank >= 1, "fft::mul: expected an axis of pairs");
  for (const Index pairs : {value_of(a).shape().back(), value_of(b).shape().back()})
    check<ShapeError>(pairs == 2, "fft::mul: expected complex numbers as pairs, [..., 2], got shapes ",
                      value_of(a).shape(), " and ", value_of(b).shape());
  const auto part = [](const auto& x, Index i) { return slice(x, -1, i, i + 1); };
  const auto ar = part(a, 0), ai = part(a, 1);
  const auto br = part(b, 0), bi = part(b, 1);
  return concat(-1, ar * br - ai * bi, ar * bi + ai * br);
}

}  // namespace fft

template <operations::Fourier Kind, class Dy, class Y, class X>
auto derivatives(const operations::FourierTransform<Kind>& operation, const Dy& dy, const Y&, const X&) {
  using namespace fft::detail;
  return std::tuple{[&] { return transform<transposed(Kind)>(dy, operation.plan.adjoint()); }};
}

}  // namespace chorus
