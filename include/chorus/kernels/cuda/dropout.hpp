#pragma once
/// Dropout on GPUs, with the same mask as on the CPU.

#include <chorus/core/error.hpp>
#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/dropout.hpp>

namespace chorus::kernels {

namespace cuda {

/// Four elements of a sample, which share a Philox counter.
template <class T>
struct Dropout {
  Index inner, quads;
  const T* in;
  T* out;
  RandomKey key;
  std::uint32_t threshold;
  compute_type<T> scale;
  bool accumulate;
  __device__ void operator()(Index i) const {
    using C = compute_type<T>;
    const Index sample = i / quads, quad = i - sample * quads;
    const PhiloxWords words = philox(key.seed, dropout_counter(key, key.first_sample + sample, quad));
    const Index begin = sample * inner + 4 * quad, left = inner - 4 * quad;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k >= left) continue;
      const bool keeps = dropout_keeps(words[static_cast<std::size_t>(k)], threshold);
      put(out, begin + k, get(in, begin + k) * (keeps ? scale : C(0)), accumulate);
    }
  }
};

template <class T>
void dropout(Cuda device, Index samples, Index inner, const T* in, T* out, double p, const RandomKey& key,
             bool accumulate) {
  check<UsageError>(p >= 0 && p <= 1, "dropout: p must be in [0, 1], got ", p);
  const Index quads = divide_up(inner, 4);
  for_each(device, "dropout", samples * quads,
           Dropout<T>{inner, quads, in, out, key, dropout_threshold(p), static_cast<compute_type<T>>(dropout_scale(p)),
                      accumulate});
}

}  // namespace cuda

template <class T>
void dropout_forward(Cuda device, Index samples, Index inner, const T* x, T* y, double p, const RandomKey& key) {
  cuda::dropout(device, samples, inner, x, y, p, key, false);
}

template <class T>
void dropout_backward(Cuda device, Index samples, Index inner, const T* dy, T* dx, double p, const RandomKey& key,
                      bool accumulate) {
  cuda::dropout(device, samples, inner, dy, dx, p, key, accumulate);
}

}  // namespace chorus::kernels
