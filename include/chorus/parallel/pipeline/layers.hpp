#pragma once
/// The layers of a model with CHORUS_PIPELINE, in order, and the members of a stage.

#include <chorus/nn/chain.hpp>
#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// A layer's position: the link, and its index if the link is a list of modules.
struct Place {
  std::size_t link = 0, index = 0;
};

/// Calls `f(place, name, layer)` for each layer.
template <class Model, class F>
void for_each_layer(Model& model, const F& f) {
  std::string_view names = Model::pipeline_names;
  std::size_t number = 0;
  const auto each = [&](auto& link) {
    const std::string name(nn::detail::next_name(names));
    if constexpr (nn::detail::is_module_list<std::remove_cvref_t<decltype(link)>>)
      for (std::size_t i = 0; i < link.size(); ++i) f(Place{number, i}, cat(name, '.', i), link[i]);
    else
      f(Place{number, 0}, name, link);
    ++number;
  };
  std::apply([&](auto&... links) { (each(links), ...); }, model.pipeline_links());
}

template <class Model>
std::vector<Place> places_of(Model& model) {
  std::vector<Place> places;
  for_each_layer(model, [&](Place place, const auto&, auto&) { places.push_back(place); });
  return places;
}

/// Some of a model's layers, under their names in the model.
template <class Model>
class SomeLayers final : public nn::Module {
 public:
  /// `counts[i]`: whether layer i is included.
  SomeLayers(Model& model, std::vector<bool> counts) : model_(model), counts_(std::move(counts)) {}
  void visit(nn::Visitor& visitor) override {
    std::size_t number = 0;
    for_each_layer(model_, [&](Place, const std::string& name, auto& layer) {
      if constexpr (std::is_base_of_v<nn::Module, std::remove_cvref_t<decltype(layer)>>)
        if (counts_[number]) visitor.module(name, layer);
      ++number;
    });
  }

 private:
  Model& model_;
  std::vector<bool> counts_;
};

}  // namespace chorus::pipeline
