#pragma once
/// What is known of each layer with weights while its model computes with fake quantisation.

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

/// What becomes integers: a weight, [out, ...]; a table's, [entries, features], of which some rows are looked up; the
/// operands of attention's first projections and products.
enum class LayerKind { weighted, table, attention };

/// The ranges of one layer: what comes in where no other layer has rounded it, what goes out (after batch norm and
/// ReLU), the sum that is made of that and a residual (in a batch norm or with +), what it is concatenated to, and the
/// folded weights, by output channel; of a table weights alone, of attention what its products take. A sum has no name:
/// it is that of the last layer whose result it takes.
struct LayerRanges {
  LayerRanges(const std::string& layer, Index channels, LayerKind kind);

  /// Moves the ranges towards those of these weights: [channels, ...]. Throws NonFiniteError.
  void observe_weights(const float* weights, Index count, float share) const;
  /// By output channel, or one for all. Throws UsageError where no range is known.
  std::vector<quantized::Levels> weight_levels(const Scheme& scheme) const;
  void visit(Visitor& visitor);

  std::string name, weight_name, min_name, max_name;
  ActivationSite input, output, sum, concatenation;
  std::vector<ActivationSite> attention;  ///< query, key, value, and the weights of values
  Buffer<float, 1, Cpu> weight_min, weight_max;

 private:
  LayerKind kind_;
};

/// A layer's place in the model: its ranges, and the batch norm after it, if it is folded with one.
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
