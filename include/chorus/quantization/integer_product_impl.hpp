#pragma once
/// Computes a product of numbers on their levels in integers.

#include <algorithm>
#include <chorus/core/replaced.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/exact_sums.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/quantization/integer_product.hpp>
#include <chorus/quantization/kernels/fake_quantize.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace chorus::nn::quantization {

CHORUS_INLINE void IntegerProduct::rounded(const quantized::Levels& levels, bool relu, float* y) const {
  std::vector<quantized::Requantizer> to;
  for (std::size_t o = 0; o < bias.size(); ++o) to.emplace_back(x_scale, weight_scale[o], bias[o], levels, relu);
  for_rows([&](std::size_t channel, Index first) {
    for (Index i = first; i < first + shape.inner; ++i)
      y[i] = levels.number(to[channel](nothing[channel] != 0 ? 0 : sum(i)));
  });
}

}  // namespace chorus::nn::quantization

namespace chorus::nn::quantization::detail {

CHORUS_INLINE ExactParts::ExactParts(const std::vector<float>& w, Index outputs, float reach) {
  for (; base >= 2 && !split(w, outputs, reach); base = base == 256 ? 16 : base == 16 ? 4 : base - 2) continue;
}

CHORUS_INLINE bool ExactParts::split(const std::vector<float>& w, Index outputs, float reach) {
  parts.clear();
  const std::size_t terms = w.size() / static_cast<std::size_t>(outputs);
  auto rest = w;
  while (std::any_of(rest.begin(), rest.end(), [](float x) { return x != 0; }) || parts.empty()) {
    auto& part = parts.emplace_back(w.size());
    double sum = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const float above = std::nearbyint(rest[i] / base);
      part[i] = rest[i] - base * above;
      rest[i] = above;
      sum = i % terms == 0 ? std::abs(part[i]) : sum + std::abs(part[i]);
      if (sum * reach > 1 << 24) return parts.clear(), false;
    }
  }
  return true;
}

}  // namespace chorus::nn::quantization::detail

namespace chorus::nn::quantization {

CHORUS_INLINE std::shared_ptr<IntegerProduct> integer_product(
    const IntegerFactors& factors, const Tensor<float, 1, Cpu>& x, const Tensor<float, 1, Cpu>& weight,
    const std::function<Tensor<float, 1, Cpu>(const Tensor<float, 1, Cpu>&, const Tensor<float, 1, Cpu>&)>& product) {
  const chorus::detail::Unobserved unobserved;
  const chorus::detail::Replaced<bool> exact(kernels::exact_sums, true);
  const auto& weights = factors.weights;
  std::vector<float> w(static_cast<std::size_t>(weight.numel()));
  const Index scales = static_cast<Index>(weights.size());
  kernels::quantization_steps(Cpu{}, {1, scales, weight.numel() / scales}, weight.data(), weights, w.data());
  const auto& in = factors.in;
  const int reach = std::max(in.integers.most - in.zero_point, in.zero_point - in.integers.least);
  const detail::ExactParts exact_parts(w, factors.outputs, static_cast<float>(reach));
  if (exact_parts.parts.empty()) return nullptr;

  const auto steps = Tensor<float, 1, Cpu>::empty(x.shape());
  kernels::quantization_steps(Cpu{}, {1, 1, x.numel()}, x.data(), std::span(&in, 1), steps.data());
  const auto out = std::make_shared<IntegerProduct>();
  std::uint32_t factor = 1;  // modulo 2^32: the total fits 32 bits, even if a part's sum doesn't
  for (const auto& part : exact_parts.parts) {
    const auto y = product(steps, Tensor<float, 1, Cpu>::from(part, {weight.numel()}));
    out->sums.resize(static_cast<std::size_t>(y.numel()));
    for (Index i = 0; i < y.numel(); ++i) {
      auto& sum = out->sums[static_cast<std::size_t>(i)];
      const auto more = static_cast<std::uint32_t>(static_cast<std::int32_t>(y.data()[i]));
      sum = static_cast<std::int32_t>(static_cast<std::uint32_t>(sum) + factor * more);
    }
    factor *= static_cast<std::uint32_t>(exact_parts.base);
  }
  out->x_scale = in.scale;
  const auto outputs = static_cast<std::size_t>(factors.outputs);
  for (std::size_t o = 0; o < outputs; ++o) out->weight_scale.push_back(weights[weights.size() == 1 ? 0 : o].scale);
  out->bias.assign(outputs, 0);
  out->nothing.assign(outputs, 0);
  return out;
}

}  // namespace chorus::nn::quantization
