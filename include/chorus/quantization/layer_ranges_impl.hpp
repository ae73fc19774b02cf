#pragma once
/// How the range of a layer's weights is updated, and where it is stored.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/quantization/activation_site.hpp>
#include <chorus/quantization/layer_ranges.hpp>
#include <chorus/quantization/scheme.hpp>
#include <string>
#include <vector>

namespace chorus::nn::quantization {

CHORUS_INLINE LayerRanges::LayerRanges(const std::string& layer, Index channels, LayerKind kind)
    : name(layer),
      weight_name(cat(layer, ".weight")),
      input(cat(layer, ".input")),
      output(cat(layer, ".output")),
      sum(cat(layer, ".sum")),
      concatenation(cat(layer, ".concatenation")),
      kind_(kind) {
  if (kind == LayerKind::attention)
    for (const char* what : {".query", ".key", ".value", ".attention"}) attention.emplace_back(cat(layer, what));
  weight_min = Buffer(Tensor<float, 1, Cpu>::full({channels}, Range{}.min));
  weight_max = Buffer(Tensor<float, 1, Cpu>::full({channels}, Range{}.max));
  min_name = cat(layer, ".weight_min");
  max_name = cat(layer, ".weight_max");
}

CHORUS_INLINE void LayerRanges::observe_weights(const float* weights, Index count, float share) const {
  const auto& min = value_of(weight_min);
  const auto& max = value_of(weight_max);
  const Index channels = min.numel();
  for (Index i = 0; i < channels; ++i) {
    Range seen;
    kernels::min_max(Cpu{}, {1, 1, count / channels}, weights + i * (count / channels), &seen.min, &seen.max);
    check<NonFiniteError>(seen.finite(), "QuantizationAware: '", weight_name,
                          "': got a NaN or an infinity, expected finite numbers");
    const Range now = observed({min.data()[i], max.data()[i]}, seen, share);
    min.data()[i] = now.min;
    max.data()[i] = now.max;
  }
  weight_min.on<Cpu>().touch();
  weight_max.on<Cpu>().touch();
}

CHORUS_INLINE std::vector<quantized::Levels> LayerRanges::weight_levels(const Scheme& scheme) const {
  const auto& min = value_of(weight_min);
  const auto& max = value_of(weight_max);
  std::vector<quantized::Levels> out;
  for (Index i = 0; i < min.numel(); ++i) {
    check<UsageError>(min.data()[i] <= max.data()[i], "QuantizationAware: '", weight_name,
                      "' has no range yet: expected a forward pass in training, with observe(true), or a file that ",
                      "has one");
    out.push_back(scheme.weight_levels(min.data()[i], max.data()[i]));
  }
  return out;
}

CHORUS_INLINE void LayerRanges::visit(Visitor& visitor) {
  if (kind_ == LayerKind::weighted)
    for (auto* const site : {&input, &output, &sum, &concatenation}) site->visit(visitor);
  if (kind_ == LayerKind::attention) input.visit(visitor);
  for (auto& site : attention) site.visit(visitor);
  visitor.buffer(min_name, weight_min);
  visitor.buffer(max_name, weight_max);
}

}  // namespace chorus::nn::quantization
