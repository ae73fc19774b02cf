#pragma once
/// The fully connected layer.

#include <chorus/nn/init.hpp>
#include <chorus/nn/intercepted.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/matmul.hpp>

namespace chorus::nn {

/// Options of the layer Linear.
struct LinearOptions {
  bool bias = true;
};

/// y = x weightᵀ + bias for x: [..., in]; weight: [out, in], bias: [out].
template <Device D, Real T = float>
class Linear : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight;
  Parameter<T, 1, D> bias;

  /// Throws ShapeError unless both sizes are positive.
  Linear(Index in_features, Index out_features, const LinearOptions& options = {});

  template <Operand X>
  [[gnu::noinline]] auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return apply(x); });
  }
  template <class X, class... Kinds>
  auto operator()(const Placed<X, Kinds...>& x) const {
    return linear(x, weight, bias);  // does not compile, with an explanation
  }
  void visit(Visitor& visitor) override;
  std::string describe() const override;

 protected:
  template <Operand X>
  auto apply(const X& x) const {
    return detail::weighted(this, x, weight, bias, [](const auto&... xs) { return linear(xs...); });
  }
};

template <Device D, Real T>
Linear<D, T>::Linear(Index in_features, Index out_features, const LinearOptions& options) {
  check<ShapeError>(in_features > 0 && out_features > 0, "Linear: ", in_features, " inputs and ", out_features,
                    " outputs: both must be positive");
  weight = Parameter(init::default_uniform<T, D, 2>({out_features, in_features}, in_features));
  if (options.bias) bias = Parameter(init::default_uniform<T, D, 1>({out_features}, in_features));
}

template <Device D, Real T>
std::string Linear<D, T>::describe() const {
  return cat("Linear(", weight.shape()[1], ", ", weight.shape()[0], bias ? ")" : ", bias=false)");
}

template <Device D, Real T>
void Linear<D, T>::visit(Visitor& visitor) {
  visitor.parameter("weight", weight);
  if (bias) visitor.parameter("bias", bias);
}

}  // namespace chorus::nn
