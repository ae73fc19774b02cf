#pragma once
/// Parameters that have options of their own, and how to choose them.

#include <chorus/core/config.hpp>
#include <optional>
#include <string>

namespace chorus::optim {

/// What some parameters have of their own: see Optimizer::set_group.
struct GroupOptions {
  /// Their learning rate is that of the optimizer times this one, whatever schedules set.
  double lr_scale = 1;
  /// Their weight decay, instead of the optimizer's.
  std::optional<double> weight_decay = {};
};

/// Whether a parameter is a bias or belongs to a normalisation: those have at most one axis.
struct IsBiasOrNorm {
  bool operator()(const auto& named) const { return named.parameter->extents().size() <= 1; }
};
/// Whether a parameter's name begins so: `encoder.` stands for all below that module.
struct NameBegins {
  std::string prefix;
  bool operator()(const auto& named) const { return named.name.starts_with(prefix); }
};

}  // namespace chorus::optim
