#pragma once
/// Options of some parameters, and how to select those.

#include <chorus/core/config.hpp>
#include <optional>
#include <string>

namespace chorus::optim {

/// The options of some parameters: see Optimizer::set_group.
struct GroupOptions {
  /// Their learning rate is the optimizer's times this one, also under schedules.
  double lr_scale = 1;
  /// Their weight decay, instead of the optimizer's.
  std::optional<double> weight_decay = {};
};

/// Whether a parameter is a bias or belongs to a normalisation: those have at most one axis.
struct IsBiasOrNorm {
  bool operator()(const auto& named) const { return named.parameter->extents().size() <= 1; }
};
/// Whether a parameter's name begins with it: `encoder.` stands for all parameters of that module.
struct NameBegins {
  std::string prefix;
  bool operator()(const auto& named) const { return named.name.starts_with(prefix); }
};

}  // namespace chorus::optim
