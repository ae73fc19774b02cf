#pragma once
/// The layer LayerNorm.

#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/normalization.hpp>

namespace chorus::nn {

/// Normalises the last axis of x: [..., features], then scales and shifts it.
template <Device D, Real T = float>
class LayerNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;

  /// Throws ShapeError unless `features` is positive.
  explicit LayerNorm(Index features, double eps = 1e-5) : eps_(eps) {
    check<ShapeError>(features > 0, "LayerNorm: ", features, " features: must be positive");
    weight = Parameter(init::constant<T, D, 1>({features}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({features}, T{0}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return layer_norm(x, weight, bias, eps_); });
  }
  template <class X, class... Kinds>
  auto operator()(const Placed<X, Kinds...>& x) const {
    return detail::watched(*this, [&] { return layer_norm_of_whole(x, weight, bias, eps_); });
  }
  /// For sharded sequences; the gradients of weight and bias are summed over all positions.
  template <class X>
  auto operator()(const SequencePart<X>& x) const {
    return detail::watched(*this, [&] {
      if (x.group() == nullptr) return x.with(layer_norm(x.part(), weight, bias, eps_));
      return x.with(layer_norm(x.part(), enter_tensor_region(weight, x.group()), enter_tensor_region(bias, x.group()),
                               eps_));
    });
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    visitor.parameter("bias", bias);
  }
  std::string describe() const override { return cat("LayerNorm(", weight.shape()[0], ")"); }

 private:
  double eps_;
};

}  // namespace chorus::nn
