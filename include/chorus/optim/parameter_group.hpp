#pragma once
/// Options of parameter groups, and selectors.

#include <chorus/core/config.hpp>
#include <optional>
#include <string>

namespace chorus::optim {

/// The options of a parameter group: see Optimizer::set_group.
struct GroupOptions {
  /// A factor on the optimizer's learning rate, also under schedules.
  double lr_scale = 1;
  /// The group's weight decay, instead of the optimizer's.
  std::optional<double> weight_decay = {};
};

/// Selects biases and normalisation parameters: those with at most one axis.
struct IsBiasOrNorm {
  bool operator()(const auto& named) const { return named.parameter->extents().size() <= 1; }
};
/// Selects parameters by a prefix of their names: `encoder.` for all parameters of that module.
struct NameBegins {
  std::string prefix;
  bool operator()(const auto& named) const { return named.name.starts_with(prefix); }
};

}  // namespace chorus::optim
