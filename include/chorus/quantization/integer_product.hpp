#pragma once
/// A layer's product in integers, for evaluation with fake quantisation: it rounds the same numbers in the same order
/// as an integer model.

#include <chorus/core/config.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/exact_sums.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/quantization/kernels/fake_quantize.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace chorus::nn::quantization {

/// Sums of products of integers minus zero points. A sum represents sum x_scale weight_scale + bias.
struct IntegerProduct {
  kernels::ChannelShape shape;
  std::vector<std::int32_t> sums;  ///< [batch, channels, inner]
  float x_scale = 1;
  std::vector<float> weight_scale, bias;  ///< [channels]; for a folded layer the bias is its batch norm's
  /// Channels that batch norm multiplies by 0: only their bias is left.
  std::vector<char> nothing;

  /// y = the float values of the integers with `levels` that an integer model computes, optionally after a ReLU.
  void rounded(const quantized::Levels& levels, bool relu, float* y) const;

 private:
  std::int32_t sum(Index i) const { return sums[static_cast<std::size_t>(i)]; }
  template <class F>
  void for_rows(const F& f) const {
    parallel_for(
        shape.batch * shape.channels,
        [&](Index row) { f(static_cast<std::size_t>(row % shape.channels), row * shape.inner); },
        shape.numel() > 32768);
  }
};

namespace detail {

/// w = the sum of base^i parts[i], integers, such that float sums of products with numbers up to `reach` are exact:
/// below 2^24 for each output; w is [outputs, terms]. `parts` is empty if no base works.
struct ExactParts {
  float base = 256;
  std::vector<std::vector<float>> parts;

  ExactParts(const std::vector<float>& w, Index outputs, float reach);

 private:
  bool split(const std::vector<float>& w, Index outputs, float reach);
};

}  // namespace detail

/// A layer's weight levels, and the levels of the numbers that are multiplied by it.
struct IntegerFactors {
  quantized::Levels in;
  std::vector<quantized::Levels> weights;  ///< one, or one per output
  Index outputs = 0;
};

/// The product of x and weight, both on their levels, in integers, without bias. `product`: the layer's function of two
/// such arrays without a bias: [batch, outputs, ...]. Null if sums don't fit into 32 bits: such a layer has no integer
/// form.
std::shared_ptr<IntegerProduct> integer_product(
    const IntegerFactors& factors, const Tensor<float, 1, Cpu>& x, const Tensor<float, 1, Cpu>& weight,
    const std::function<Tensor<float, 1, Cpu>(const Tensor<float, 1, Cpu>&, const Tensor<float, 1, Cpu>&)>& product);

}  // namespace chorus::nn::quantization

#if !CHORUS_COMPILED
#include <chorus/quantization/integer_product_impl.hpp>
#endif
