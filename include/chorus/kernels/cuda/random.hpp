#pragma once
/// Random numbers on GPUs: words and uniform floats are identical to the CPU's.

#include <chorus/core/philox.hpp>
#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/random_numbers.hpp>
#include <cmath>
#include <cstdint>

namespace chorus::kernels {

namespace cuda {

/// One draw of four words, which `numbers` turns into `Numbers::count` numbers.
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

template <class T, class Numbers>
void fill_from_stream(Cuda device, const char* name, std::uint64_t seed, std::uint64_t stream, Index offset,
                      Index count, T* out, const Numbers& numbers) {
  const Index first = offset / Numbers::count;
  for_each(device, name, count > 0 ? divide_up(offset + count, Numbers::count) - first : 0,
           FillFromStream<T, Numbers>{seed, stream, first, offset, count, out, numbers});
}

/// The same for one draw of a row.
template <class T, class Numbers>
struct Draw {
  Index inner, draws;
  T* out;
  RandomKey key;
  Numbers numbers;
  __device__ void operator()(Index i) const {
    const Index row = i / draws, draw = i - row * draws;
    compute_type<T> drawn[Numbers::count];
    numbers(philox(key.seed, dropout_counter(key, key.first_sample + row, draw)), drawn);
    const Index begin = Numbers::count * draw, left = inner - begin;
    for (int k = 0; k < Numbers::count; ++k)
      if (k < left) put(out, row * inner + begin + k, drawn[k]);
  }
};

template <class T, class Numbers>
void draw(Cuda device, const char* name, Index rows, Index inner, T* out, const RandomKey& key,
          const Numbers& numbers) {
  const Index draws = divide_up(inner, Numbers::count);
  for_each(device, name, rows * draws, Draw<T, Numbers>{inner, draws, out, key, numbers});
}

template <class T>
struct IsBelow {
  const T* p;
  T* out;
  __device__ void operator()(Index i) const {
    using C = compute_type<T>;
    const C chance = get(p, i);
    put(out, i, chance >= C(0) && chance <= C(1) ? C(get(out, i) < chance ? 1 : 0) : C(NAN));
  }
};

}  // namespace cuda

template <class T>
void fill_uniform(Cuda device, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T lo,
                  T hi) {
  using C = compute_type<T>;
  const C low = static_cast<C>(lo), high = static_cast<C>(hi);
  cuda::fill_from_stream(
      device, "fill_uniform", seed, stream, offset, count, out,
      UniformNumbers<C>{static_cast<double>(low), static_cast<double>(high) - static_cast<double>(low),
                       std::nextafter(high, low)});
}

template <class T>
void fill_normal(Cuda device, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T mean,
                 T deviation) {
  cuda::fill_from_stream(device, "fill_normal", seed, stream, offset, count, out,
                         NormalNumbers<compute_type<T>>{static_cast<double>(mean), static_cast<double>(deviation)});
}

template <class T>
void draw_uniform(Cuda device, Index rows, Index inner, T* out, T last, const RandomKey& key) {
  using C = compute_type<T>;
  cuda::draw(device, "draw_uniform", rows, inner, out, key, UniformNumbers<C>{0, 1, static_cast<C>(last)});
}

template <class T>
void draw_normal(Cuda device, Index rows, Index inner, T* out, const RandomKey& key) {
  cuda::draw(device, "draw_normal", rows, inner, out, key, NormalNumbers<compute_type<T>>{0, 1});
}

template <class T>
void draw_integers(Cuda device, Index rows, Index inner, T* out, std::int64_t low, std::uint64_t range,
                   const RandomKey& key) {
  cuda::draw(device, "draw_integers", rows, inner, out, key, WholeNumbers<T>{low, range});
}

template <class T>
void is_below(Cuda device, Index count, const T* p, T* out) {
  cuda::for_each(device, "is_below", count, cuda::IsBelow<T>{p, out});
}

}  // namespace chorus::kernels
