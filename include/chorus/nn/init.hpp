#pragma once
/// The numbers that parameters start with.

#include <cmath>

#include <chorus/core/random.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/tensor/tensor.hpp>

namespace chorus::inline CHORUS_ABI::nn::init {

/// Uniform in [-bound, bound), from the next random stream: the same numbers on every device.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> uniform(const Shape<Rank>& shape, double bound) {
  const MemoryScope scope(trace::Memory::parameters);
  auto host = Tensor<T, Rank, Cpu>::empty(shape);
  kernels::fill_uniform(Cpu{}, initial_seed(), next_random_stream(), 0, host.numel(), host.data(),
                        static_cast<T>(-bound), static_cast<T>(bound));
  return to_device(host, D{});
}

/// From N(mean, deviation²), from the next random stream.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> normal(const Shape<Rank>& shape, double mean, double deviation) {
  const MemoryScope scope(trace::Memory::parameters);
  auto host = Tensor<T, Rank, Cpu>::empty(shape);
  kernels::fill_normal(Cpu{}, initial_seed(), next_random_stream(), 0, host.numel(), host.data(), static_cast<T>(mean),
                       static_cast<T>(deviation));
  return to_device(host, D{});
}

/// PyTorch's default for weights and biases of linear and convolution layers: uniform within 1 / sqrt(fan_in)
/// (He et al. 2015 with a = sqrt(5)).
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> default_uniform(const Shape<Rank>& shape, Index fan_in) {
  return uniform<T, D, Rank>(shape, fan_in > 0 ? 1 / std::sqrt(static_cast<double>(fan_in)) : 0);
}

template <Scalar T, Device D, int Rank>
Tensor<T, Rank, D> constant(const Shape<Rank>& shape, T value) {
  const MemoryScope scope(trace::Memory::parameters);
  return Tensor<T, Rank, D>::full(shape, value);
}

}  // namespace chorus::inline CHORUS_ABI::nn::init
