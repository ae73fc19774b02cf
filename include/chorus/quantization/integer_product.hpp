#pragma once
/// A layer's product in integers, as evaluation with fake quantisation has it: what is rounded then is what an integer
/// model rounds, in the same order.

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

/// Sums of products of integers, less zero points. They stand for sum x_scale weight_scale + bias.
struct IntegerProduct {
  kernels::ChannelShape shape;
  std::vector<std::int32_t> sums;  ///< [batch, channels, inner]
  float x_scale = 1;
  std::vector<float> weight_scale, bias;  ///< [channels]; of a folded layer the bias is its batch norm's
  /// Channels that batch norm multiplies by 0: what is left of them is the bias.
  std::vector<char> nothing;

  /// y = what the integers of `levels` stand for that an integer model gives, maybe after a ReLU.
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

/// w = the sum of base^i parts[i], of whole numbers, where float sums of products with numbers up to `reach` are exact:
/// below 2^24 for each output, w being [outputs, terms]. No parts where no base will do.
struct ExactParts {
  float base = 256;
  std::vector<std::vector<float>> parts;

  ExactParts(const std::vector<float>& w, Index outputs, float reach);

 private:
  bool split(const std::vector<float>& w, Index outputs, float reach);
};

}  // namespace detail

/// A layer's weight, times which numbers on the levels `in` are taken.
struct IntegerFactors {
  quantized::Levels in;
  std::vector<quantized::Levels> weights;  ///< one, or one for each output
  Index outputs = 0;
};

/// The product of x and weight, which are on their levels, in integers; the bias is yet to come. `product`: what the
/// layer computes of two such arrays, without a bias: [batch, outputs, ...]. Null where sums don't fit into 32 bits:
/// such a layer has no integer form.
std::shared_ptr<IntegerProduct> integer_product(
    const IntegerFactors& factors, const Tensor<float, 1, Cpu>& x, const Tensor<float, 1, Cpu>& weight,
    const std::function<Tensor<float, 1, Cpu>(const Tensor<float, 1, Cpu>&, const Tensor<float, 1, Cpu>&)>& product);

}  // namespace chorus::nn::quantization

#if !CHORUS_COMPILED
#include <chorus/quantization/integer_product_impl.hpp>
#endif
