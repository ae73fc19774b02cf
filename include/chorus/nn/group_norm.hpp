#pragma once
/// Layers that normalise within a sample: GroupNorm, InstanceNorm, RMSNorm.

#include <chorus/nn/elsewhere.hpp>
#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/normalization.hpp>

namespace chorus::nn {

/// Normalises groups of adjacent channels of x: [batch, channels, ...], then scales and shifts each channel.
template <Device D, Real T>
class GroupNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;

  /// Throws ShapeError unless `groups` divides the channels.
  GroupNorm(Index groups, Index channels, double eps = 1e-5) : groups_(groups), eps_(eps) {
    check<ShapeError>(groups > 0 && channels > 0 && channels % groups == 0, "GroupNorm: ", groups,
                      " groups do not divide ", channels, " channels");
    weight = Parameter(init::constant<T, D, 1>({channels}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({channels}, T{0}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return group_norm(x, groups_, weight, bias, eps_); });
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    visitor.parameter("bias", bias);
  }
  std::string describe() const override { return cat("GroupNorm(", groups_, ", ", weight.shape()[0], ")"); }

 private:
  Index groups_;
  double eps_;
};

/// Options of InstanceNorm.
struct InstanceNormOptions {
  double eps = 1e-5;
  /// Whether channels are scaled and shifted; off by default, as in PyTorch.
  bool affine = false;
};

/// Normalises each channel of each sample of x: [batch, channels, ...].
template <Device D, Real T>
class InstanceNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;

  /// Throws ShapeError unless `channels` is positive.
  explicit InstanceNorm(Index channels, const InstanceNormOptions& options = {})
      : channels_(channels), eps_(options.eps) {
    check<ShapeError>(channels > 0, "InstanceNorm: ", channels, " channels: must be positive");
    if (!options.affine) return;
    weight = Parameter(init::constant<T, D, 1>({channels}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({channels}, T{0}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      check<ShapeError>(value_of(x).size(1) == channels_, "InstanceNorm: an input of shape ", value_of(x).shape(),
                        " does not have ", channels_, " channels");
      return instance_norm(x, weight, bias, eps_);
    });
  }
  void visit(Visitor& visitor) override {
    if (weight) visitor.parameter("weight", weight);
    if (bias) visitor.parameter("bias", bias);
  }
  std::string describe() const override { return cat("InstanceNorm(", channels_, ")"); }

 private:
  Index channels_;
  double eps_;
};

/// PyTorch's name for sequences. The number of inner axes is the input's.
template <Device D, Real T = float>
using InstanceNorm1d = InstanceNorm<D, T>;
/// PyTorch's name for images.
template <Device D, Real T = float>
using InstanceNorm2d = InstanceNorm<D, T>;

/// Divides the last axis of x: [..., features] by its root mean square, then scales it.
template <Device D, Real T>
class RMSNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight;

  /// Throws ShapeError unless `features` is positive.
  explicit RMSNorm(Index features, double eps = 1e-6) : eps_(eps) {
    check<ShapeError>(features > 0, "RMSNorm: ", features, " features: must be positive");
    weight = Parameter(init::constant<T, D, 1>({features}, T{1}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return rms_norm(x, weight, eps_); });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override { return cat("RMSNorm(", weight.shape()[0], ")"); }

 private:
  double eps_;
};

}  // namespace chorus::nn
