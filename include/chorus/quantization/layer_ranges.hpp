#pragma once
/// The ranges and places of the layers with weights under fake quantisation.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/quantization/activation_site.hpp>
#include <chorus/quantization/scheme.hpp>
#include <string>
#include <vector>

namespace chorus::nn::quantization {

/// The quantised parts of a layer: a weight, [out, ...]; a table, [entries, features], of which some rows are looked
/// up; the operands of attention's first projections and products.
enum class LayerKind { weighted, table, attention };

/// The ranges of one layer: its input if no other layer has rounded it; its output, after batch norm and ReLU; the sum
/// of that and a residual (in a batch norm or with +); the concatenation with others; and its folded weights, by output
/// channel. A table has weights only, attention the operands of its products. A sum's range belongs to the last layer
/// whose result it adds.
struct LayerRanges {
  LayerRanges(const std::string& layer, Index channels, LayerKind kind);

  /// Moves the ranges towards those of these weights: [channels, ...]. Throws NonFiniteError.
  void observe_weights(const float* weights, Index count, float share) const;
  /// By output channel, or one for all. Throws UsageError if a range is unknown.
  std::vector<quantized::Levels> weight_levels(const Scheme& scheme) const;
  void visit(Visitor& visitor);

  std::string name, weight_name, min_name, max_name;
  ActivationSite input, output, sum, concatenation;
  std::vector<ActivationSite> attention;  ///< query, key, value and attention weights
  Buffer<float, 1, Cpu> weight_min, weight_max;

 private:
  LayerKind kind_;
};

/// A layer's data in the model: its ranges, and the batch norm that is folded into it, if any.
struct LayerPlace {
  const LayerRanges* ranges = nullptr;
  Module* norm = nullptr;
  const BatchNorm<Cpu, float>* foldable = nullptr;
  std::string norm_name;
};

}  // namespace chorus::nn::quantization

#if !CHORUS_COMPILED
#include <chorus/quantization/layer_ranges_impl.hpp>
#endif
