#pragma once
/// Finds the layers of a model that become integers.

#include <chorus/core/error.hpp>
#include <chorus/nn/attention.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/convolutions.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/quantization/pass.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::nn::quantization {

/// A layer with weights. If a batch norm with the same number of channels and running statistics is listed directly
/// after it in the same module, that is folded into it.
struct FoundLayer {
  std::string name, norm_name;
  Module* layer = nullptr;
  Module* norm = nullptr;
  const BatchNorm<Cpu, float>* foldable = nullptr;
  Index channels = 0;
  LayerKind kind = LayerKind::weighted;
};

namespace detail {
template <template <class, class> class... Layers>
bool is_one(const Module& module) {
  return ((dynamic_cast<const Layers<Cpu, float>*>(&module) != nullptr ||
           dynamic_cast<const Layers<Cpu, double>*>(&module) != nullptr) ||
          ...);
}
}  // namespace detail

/// All such layers, in the order in which they are listed; a layer listed twice at its first place. Throws UsageError
/// for weights that are not float.
inline std::vector<FoundLayer> find_layers(Module& model) {
  struct Find final : nn::detail::Walker {
    std::vector<FoundLayer> found;
    const Module* before = nullptr;  // the layer entered last, and the module that lists it
    std::string listed_in;

    void enter(Module& module) override {
      std::string name = prefix();
      if (!name.empty()) name.pop_back();
      const auto dot = name.rfind('.');
      const std::string parent = dot == std::string::npos ? "" : name.substr(0, dot);
      const auto* const last = std::exchange(before, &module);
      const bool neighbours = std::exchange(listed_in, parent) == parent && last != nullptr && !found.empty() &&
                              found.back().layer == last;
      if (const auto* const norm = dynamic_cast<const BatchNorm<Cpu, float>*>(&module);
          norm != nullptr && neighbours && found.back().kind == LayerKind::weighted &&
          norm->channels() == found.back().channels && norm->tracks_running_stats()) {
        found.back().norm = &module;
        found.back().foldable = norm;
        found.back().norm_name = name;
      } else if (const auto kind = kind_of(module)) {
        for (const auto& known : found)
          if (known.layer == &module) return;
        if (name.empty()) name = "model";
        const Index channels = output_channels(module, name, *kind);
        found.push_back({std::move(name), "", &module, nullptr, nullptr, channels, *kind});
      }
    }
    static std::optional<LayerKind> kind_of(const Module& module) {
      if (detail::is_one<Linear, Conv1d, Conv2d, Conv3d>(module)) return LayerKind::weighted;
      if (detail::is_one<Embedding>(module)) return LayerKind::table;
      if (detail::is_one<MultiheadAttention>(module)) return LayerKind::attention;
      return std::nullopt;
    }
    static Index output_channels(Module& layer, const std::string& layer_name, LayerKind kind) {
      struct Weight final : Visitor {
        const ParameterOn<Cpu>* found = nullptr;
        std::string_view wanted = "weight";
        void module(std::string_view, Module&) override {}
        void parameter(std::string_view name, AnyParameter& handle) override {
          if (name == wanted) found = &handle.on<Cpu>();
        }
        void buffer(std::string_view, AnyBuffer&) override {}
      } weight;
      if (kind == LayerKind::attention) weight.wanted = "in_proj_weight";
      layer.visit(weight);
      check<UsageError>(weight.found->dtype() == DType::f32, "QuantizationAware: '", layer_name, "' has a weight of ",
                        weight.found->dtype(), ": expected F32");
      return weight.found->extents()[0];
    }
  } find;
  find.inner(model);
  find.walk(model);
  return std::move(find.found);
}

/// The data of a model's layers, by address. A copy is empty, as its model's layers have other addresses.
class Places {
 public:
  Places() = default;
  Places(const Places&) {}
  Places& operator=(const Places&) {
    layers_.clear();
    return *this;
  }

  /// `ranges`: in the order of find_layers.
  const Pass::Layers& of(Module& model, std::span<const LayerRanges> ranges) {
    if (!layers_.empty() || ranges.empty()) return layers_;
    const auto found = find_layers(model);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const LayerPlace place{&ranges[i], found[i].norm, found[i].foldable, found[i].norm_name};
      layers_.emplace(found[i].layer, place);
      if (found[i].norm != nullptr) layers_.emplace(found[i].norm, place);
    }
    return layers_;
  }

 private:
  Pass::Layers layers_;
};

}  // namespace chorus::nn::quantization
