#pragma once
/// Initialisation of parameters.

#include <chorus/core/random.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <type_traits>

namespace chorus::nn::init {

namespace detail {
/// Initial values come from a random stream that is independent of samples and devices. In a forward pass all ranks
/// would draw the same numbers, and threads in any order.
inline void check_no_pass(const char* function, const char* instead) {
  check<UsageError>(chorus::detail::random_context() == nullptr, "nn::init::", function,
                    ": it was called in a forward pass of a policy: construct layers before it, and draw random "
                    "numbers in a pass by ch::",
                    instead);
}
}  // namespace detail

namespace detail {
/// A tensor filled by `draw(out, first, count)`: drawn here, or later for a deferred model.
template <class T, Device D, int Rank, class Draw>
Tensor<T, Rank, D> drawn(const Shape<Rank>& shape, D device, const Draw& draw) {
  const MemoryScope scope(trace::Memory::parameters);
  if constexpr (std::is_same_v<D, Cpu>)
    if (auto* const promises = PromisedNumbers::current()) return promises->template promise<T, Rank>(shape, draw);
  auto host = Tensor<T, Rank, Cpu>::empty(shape);
  draw(host.data(), Index{0}, host.numel());
  return to_device(host, device);
}
}  // namespace detail

/// Uniform in [-bound, bound), from the next random stream: the same on every device. Throws UsageError within a
/// policy's forward pass: use rand there.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> uniform(const Shape<Rank>& shape, double bound, D device = {}) {
  detail::check_no_pass("uniform", "rand or ch::rand_like");
  return detail::drawn<T, D, Rank>(
      shape, device, [seed = initial_seed(), stream = next_random_stream(), bound](T* out, Index first, Index n) {
        kernels::fill_uniform(Cpu{}, seed, stream, first, n, out, static_cast<T>(-bound), static_cast<T>(bound));
      });
}

/// N(mean, deviation²), from the next random stream. Throws UsageError within a policy's forward pass: use randn there.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> normal(const Shape<Rank>& shape, double mean, double deviation, D device = {}) {
  detail::check_no_pass("normal", "randn or ch::randn_like");
  return detail::drawn<T, D, Rank>(
      shape, device,
      [seed = initial_seed(), stream = next_random_stream(), mean, deviation](T* out, Index first, Index n) {
        kernels::fill_normal(Cpu{}, seed, stream, first, n, out, static_cast<T>(mean), static_cast<T>(deviation));
      });
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
