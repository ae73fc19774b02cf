#pragma once
/// The output of a layer with weights (Linear, convolutions) under fake quantisation.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/quantization/fold_batch_norm.hpp>
#include <chorus/quantization/integer_product.hpp>
#include <chorus/quantization/pass.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace chorus::nn::quantization {

/// A layer's function of x, a weight and a bias, which may be an empty Variable.
template <int XRank, int WRank>
using LayerFunction = std::function<Variable<float, XRank, Cpu>(
    const Variable<float, XRank, Cpu>&, const Variable<float, WRank, Cpu>&, const Variable<float, 1, Cpu>&)>;

/// `product(x, w, no bias)` in integers, for evaluation; null if there is no integer form. x and w are on their levels.
template <int XRank, int WRank>
std::shared_ptr<IntegerProduct> evaluated_product(Pass& pass, const LayerPlace& place,
                                                  const Variable<float, XRank, Cpu>& x,
                                                  const Variable<float, WRank, Cpu>& w,
                                                  const LayerFunction<XRank, WRank>& product) {
  // Only these layers have integer forms.
  if constexpr ((XRank == 4 && WRank == 4) || (XRank == 2 && WRank == 2)) {
    const auto& input = value_of(x);
    const auto& weight = value_of(w);
    const auto factors = pass.factors(place, input.storage(), weight.size(0));
    if (!factors || (place.norm != nullptr && place.norm->training())) return nullptr;
    const auto flat = [](const auto& numbers) { return contiguous(numbers).view(Shape<1>{numbers.numel()}); };
    Shape<XRank> shape{};
    auto out = integer_product(*factors, flat(input), flat(weight), [&](const auto& steps, const auto& part) {
      const Variable<float, XRank, Cpu> xs(steps.view(input.shape()));
      const Variable<float, WRank, Cpu> ws(part.view(weight.shape()));
      const auto y = contiguous(value_of(product(xs, ws, Variable<float, 1, Cpu>())));
      shape = y.shape();
      return y.view(Shape<1>{y.numel()});
    });
    if (out != nullptr) out->shape = chorus::detail::channels_along(shape, 1);
    return out;
  } else {
    return nullptr;
  }
}

/// A layer's output for x, computed with `f(x, weight, bias)`.
template <int XRank, int WRank>
Variable<float, XRank, Cpu> layer_output(Pass& pass, const LayerPlace& place, const Variable<float, XRank, Cpu>& x,
                                         const Variable<float, WRank, Cpu>& weight,
                                         const Variable<float, 1, Cpu>& bias, const LayerFunction<XRank, WRank>& f) {
  const auto input = pass.input(place, x);
  const bool any = value_of(x).numel() > 0;
  if (place.foldable == nullptr || !place.foldable->tracks_running_stats()) {
    const auto w = pass.weight(place, weight, any);
    auto product = evaluated_product(pass, place, input, w, f);
    if (product != nullptr && value_of(bias).defined())
      std::copy_n(value_of(bias).data(), product->bias.size(), product->bias.begin());
    auto y = f(input, w, bias);
    pass.output(place, value_of(y).storage(), nullptr, std::move(product));
    return y;
  }
  const auto numbers = [](const auto& tensor) { return tensor.defined() ? tensor.data() : nullptr; };
  const auto& norm = *place.foldable;
  const auto gamma = norm.weight.as_variable();
  const auto &mean = value_of(norm.running_mean), &var = value_of(norm.running_var);
  const auto eps = static_cast<float>(norm.eps());
  const FoldFactors factors(value_of(gamma), var, eps);
  const auto w = pass.weight(place, fold(weight, gamma, factors), any);
  auto product = evaluated_product(pass, place, input, w, f);
  if (product != nullptr) {
    product->bias = folded_biases(product->shape.channels, numbers(value_of(bias)), numbers(value_of(gamma)),
                                  norm.weight ? value_of(norm.bias).data() : nullptr, mean.data(), var.data(), eps);
    product->nothing = factors.nothing;
  }
  auto y = unfold(f(input, w, Variable<float, 1, Cpu>()), gamma, factors);
  if (value_of(bias).defined()) {
    auto shape = value_of(y).shape();
    shape.fill(1);
    shape[1] = value_of(bias).numel();
    y = y + reshape(bias, shape);
  }
  pass.output(place, value_of(y).storage(), place.norm, std::move(product));
  return y;
}

}  // namespace chorus::nn::quantization
