#pragma once
/// Fourier transforms of lines on the CPU, with Eigen's FFT (kissfft). A complex number is an adjacent pair of real and
/// imaginary part.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <complex>
#include <concepts>
#include <type_traits>
#include <unsupported/Eigen/FFT>
#include <vector>

namespace chorus::kernels {

/// A transform of lines. y_k = scale w_k Σ_j x_j exp(∓2πi jk/n), with + for the inverse.
struct FourierPlan {
  Index in;      ///< length of an input line; it is cut or padded with zeros
  Index n;       ///< the length of the transform
  Index out;     ///< length of an output line, likewise
  bool inverse;  ///< the sign of the exponent
  double scale;
  /// w_k of the n/2 + 1 values that represent a real line: 1 for the first and, if n is even, the last; `middle` for
  /// the others, each of which represents two.
  double middle;

  /// The transform of the gradient: the transpose, acting on real and imaginary parts.
  FourierPlan adjoint() const { return {out, n, in, !inverse, scale, middle}; }
  Index half() const { return n / 2 + 1; }
  bool in_middle(Index k) const { return k != 0 && 2 * k != n; }
};

namespace detail {

/// A thread's memory, kept between calls: twiddle factors of recent lengths, and one line of each kind.
template <std::floating_point T>
struct FourierLines {
  static FourierLines& of(Index n) {
    thread_local FourierLines lines;
    if (std::find(lines.known.begin(), lines.known.end(), n) == lines.known.end()) {
      constexpr std::size_t most = 16;  // bounds the memory of programs with many lengths
      if (lines.known.size() == most) lines = {};
      lines.known.push_back(n);
      lines.fft.SetFlag(Eigen::FFT<T>::Unscaled);
      lines.fft.SetFlag(Eigen::FFT<T>::HalfSpectrum);
    }
    const auto size = static_cast<std::size_t>(n);
    lines.from.resize(size);
    lines.to.resize(size);
    lines.real.resize(size);
    return lines;
  }

  /// Transforms one line. Length 1 is a special case: kissfft would read out of bounds.
  template <class From, class To>
  void run(bool inverse, Index n, const From* in, To* out) {
    if constexpr (std::is_same_v<To, T>)
      n == 1 ? void(*out = in->real()) : fft.inv(out, in, n);
    else if constexpr (std::is_same_v<From, T>)
      n == 1 ? void(*out = *in) : fft.fwd(out, in, n);
    else
      n == 1 ? void(*out = *in) : inverse ? fft.inv(out, in, n) : fft.fwd(out, in, n);
  }

  Eigen::FFT<T> fft;
  std::vector<Index> known;
  std::vector<std::complex<T>> from, to;
  std::vector<T> real;
};

template <std::floating_point T>
void read_complex(const T* x, Index in, Index n, std::vector<std::complex<T>>& line) {
  const Index given = std::min(in, n);
  for (Index k = 0; k < n; ++k)
    line[static_cast<std::size_t>(k)] = k < given ? std::complex<T>(x[2 * k], x[2 * k + 1]) : std::complex<T>();
}

/// Calls `f` with the thread's lines and the line's index, for all `count` lines.
template <std::floating_point T, class F>
void for_lines(Index count, Index n, const F& f) {
  parallel_ranges(count, 1, thread_elements / n + 1, [&](Index first, Index lines) {
    auto& memory = FourierLines<T>::of(n);
    for (Index line = first; line < first + lines; ++line) f(memory, line);
  });
}

}  // namespace detail

/// Complex to complex. x: [count, in, 2], y: [count, out, 2].
template <std::floating_point T>
void fft(Index count, const FourierPlan& plan, const T* x, T* y) {
  detail::for_lines<T>(count, plan.n, [&](auto& lines, Index line) {
    detail::read_complex(x + line * plan.in * 2, plan.in, plan.n, lines.from);
    lines.run(plan.inverse, plan.n, lines.from.data(), lines.to.data());
    T* const out = y + line * plan.out * 2;
    for (Index k = 0; k < plan.out; ++k) {
      const auto value =
          k < plan.n ? lines.to[static_cast<std::size_t>(k)] * static_cast<T>(plan.scale) : std::complex<T>();
      out[2 * k] = value.real();
      out[2 * k + 1] = value.imag();
    }
  });
}

/// Real to complex, forward only; gives the first n/2 + 1 values. x: [count, in], y: [count, out, 2].
template <std::floating_point T>
void rfft(Index count, const FourierPlan& plan, const T* x, T* y) {
  detail::for_lines<T>(count, plan.n, [&](auto& lines, Index line) {
    const T* const from = x + line * plan.in;
    std::fill(std::copy(from, from + std::min(plan.in, plan.n), lines.real.begin()), lines.real.end(), T{0});
    lines.run(false, plan.n, lines.real.data(), lines.to.data());
    T* const out = y + line * plan.out * 2;
    for (Index k = 0; k < plan.out; ++k) {
      const auto factor = static_cast<T>(plan.scale * (plan.in_middle(k) ? plan.middle : 1));
      const auto value = k < plan.half() ? lines.to[static_cast<std::size_t>(k)] * factor : std::complex<T>();
      out[2 * k] = value.real();
      out[2 * k + 1] = plan.in_middle(k) ? value.imag() : 0;
    }
  });
}

/// Complex to real: the real part of the inverse of n/2 + 1 values. x: [count, in, 2], y: [count, out].
template <std::floating_point T>
void irfft(Index count, const FourierPlan& plan, const T* x, T* y) {
  detail::for_lines<T>(count, plan.n, [&](auto& lines, Index line) {
    detail::read_complex(x + line * plan.in * 2, plan.in, plan.half(), lines.from);
    for (Index k = 0; k < plan.half(); ++k)  // Eigen counts the middle ones twice
      lines.from[static_cast<std::size_t>(k)] *=
          static_cast<T>(plan.scale * (plan.in_middle(k) ? plan.middle / 2 : 1));
    lines.run(true, plan.n, lines.from.data(), lines.real.data());
    T* const out = y + line * plan.out;
    for (Index j = 0; j < plan.out; ++j) out[j] = j < plan.n ? lines.real[static_cast<std::size_t>(j)] : T{0};
  });
}

}  // namespace chorus::kernels
