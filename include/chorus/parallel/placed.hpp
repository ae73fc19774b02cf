#pragma once
/// Moves a model to the device that a run names for its process.

#include <chorus/nn/copy_of.hpp>
#include <utility>

namespace chorus::detail {

/// Moves `model` to the device that `run` names for this process, if it names one.
template <class Model, class Run>
Model placed(Model model, const Run& run) {
  using D = typename Model::device_type;
  if (const auto device = run.own_device()) return moved_to(std::move(model), D{*device});
  return model;
}

}  // namespace chorus::detail
