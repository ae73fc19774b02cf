#pragma once
/// Random numbers on GPUs: the words, and the uniform floats, are those of the CPU.

#include <chorus/core/philox.hpp>
#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/random.hpp>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace chorus::inline CHORUS_ABI::kernels {

namespace cuda {

/// One draw of four words, from which `numbers` makes `Numbers::count` numbers.
template <class T, class Numbers>
struct FillFromStream {
  std::uint64_t seed, stream;
  Index first_draw, offset, count;
  T* out;
  Numbers numbers;
  __device__ void operator()(Index i) const {
    const Index draw = first_draw + i;
    const auto counter = static_cast<std::uint64_t>(draw);
    const PhiloxWords words =
        philox(seed, {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                      static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)});
    compute_type<T> drawn[Numbers::count];
    numbers(words, drawn);
    for (int k = 0; k < Numbers::count; ++k) {
      const Index at = draw * Numbers::count + k - offset;
      if (at >= 0 && at < count) put(out, at, drawn[k]);
    }
  }
};

template <class C>
struct Uniform {
  static constexpr int count = sizeof(C) == 4 ? 4 : 2;
  double start, width;
  C last;
  __device__ void operator()(const PhiloxWords& words, C* out) const {
    for (int k = 0; k < count; ++k) {
      double unit;
      if constexpr (sizeof(C) == 4)
        unit = static_cast<double>(unit_float(words[k]));
      else
        unit = static_cast<double>((std::uint64_t{words[2 * k]} << 32 | words[2 * k + 1]) >> 11) * 0x1p-53;
      const C value = static_cast<C>(start + width * unit);
      out[k] = value < last ? value : last;
    }
  }
};

template <class C>
struct Normal {
  static constexpr int count = 4;
  double mean, deviation;
  __device__ void operator()(const PhiloxWords& words, C* out) const {
    for (int k = 0; k < count; k += 2) {
      const double radius = deviation * std::sqrt(-2 * std::log((words[k] + 1.0) * 0x1p-32));
      const double angle = 2 * std::numbers::pi * (words[k + 1] * 0x1p-32);
      out[k] = static_cast<C>(mean + radius * std::cos(angle));
      out[k + 1] = static_cast<C>(mean + radius * std::sin(angle));
    }
  }
};

template <class T, class Numbers>
void fill_from_stream(Cuda device, const char* name, std::uint64_t seed, std::uint64_t stream, Index offset,
                      Index count, T* out, const Numbers& numbers) {
  const Index first = offset / Numbers::count;
  for_each(device, name, count > 0 ? divide_up(offset + count, Numbers::count) - first : 0,
           FillFromStream<T, Numbers>{seed, stream, first, offset, count, out, numbers});
}

}  // namespace cuda

template <class T>
void fill_uniform(Cuda device, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T lo,
                  T hi) {
  using C = compute_type<T>;
  const C low = static_cast<C>(lo), high = static_cast<C>(hi);
  cuda::fill_from_stream(
      device, "fill_uniform", seed, stream, offset, count, out,
      cuda::Uniform<C>{static_cast<double>(low), static_cast<double>(high) - static_cast<double>(low),
                       std::nextafter(high, low)});
}

template <class T>
void fill_normal(Cuda device, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T mean,
                 T deviation) {
  cuda::fill_from_stream(device, "fill_normal", seed, stream, offset, count, out,
                         cuda::Normal<compute_type<T>>{static_cast<double>(mean), static_cast<double>(deviation)});
}

}  // namespace chorus::inline CHORUS_ABI::kernels
