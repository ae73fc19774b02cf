#pragma once
/// The numbers that parameters start with.

#include <cmath>

#include <chorus/core/random.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/tensor/tensor.hpp>

namespace chorus::nn::init {

namespace detail {
/// Initial numbers come from a stream that knows nothing of samples and devices: in a forward pass all ranks would draw
/// the same ones, and threads in any order.
inline void check_no_pass(const char* function, const char* instead) {
  check<UsageError>(chorus::detail::random_context() == nullptr, "nn::init::", function,
                    ": makes initial parameters, got called within a forward pass of a policy (layers are made before "
                    "it); random numbers of a pass are drawn by ch::", instead);
}
}  // namespace detail

/// Uniform in [-bound, bound), from the next random stream: the same numbers on every device. Throws UsageError within
/// a forward pass of a policy: see rand.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> uniform(const Shape<Rank>& shape, double bound, D device = {}) {
  detail::check_no_pass("uniform", "rand or ch::rand_like");
  const MemoryScope scope(trace::Memory::parameters);
  auto host = Tensor<T, Rank, Cpu>::empty(shape);
  kernels::fill_uniform(Cpu{}, initial_seed(), next_random_stream(), 0, host.numel(), host.data(),
                        static_cast<T>(-bound), static_cast<T>(bound));
  return to_device(host, device);
}

/// From N(mean, deviation²), from the next random stream. Throws UsageError within a forward pass of a policy: see
/// randn.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> normal(const Shape<Rank>& shape, double mean, double deviation, D device = {}) {
  detail::check_no_pass("normal", "randn or ch::randn_like");
  const MemoryScope scope(trace::Memory::parameters);
  auto host = Tensor<T, Rank, Cpu>::empty(shape);
  kernels::fill_normal(Cpu{}, initial_seed(), next_random_stream(), 0, host.numel(), host.data(), static_cast<T>(mean),
                       static_cast<T>(deviation));
  return to_device(host, device);
}

/// PyTorch's default for weights and biases of linear and convolution layers: uniform within 1 / sqrt(fan_in)
/// (He et al. 2015 with a = sqrt(5)).
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> default_uniform(const Shape<Rank>& shape, Index fan_in, D device = {}) {
  return uniform<T, D, Rank>(shape, fan_in > 0 ? 1 / std::sqrt(static_cast<double>(fan_in)) : 0, device);
}

template <Scalar T, Device D, int Rank>
Tensor<T, Rank, D> constant(const Shape<Rank>& shape, T value, D device = {}) {
  const MemoryScope scope(trace::Memory::parameters);
  return Tensor<T, Rank, D>::full(shape, value, device);
}

}  // namespace chorus::nn::init
