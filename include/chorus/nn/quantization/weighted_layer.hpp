#pragma once
/// What a layer with weights (Linear, convolutions) does while its model computes with fake quantisation.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/quantization/fold_batch_norm.hpp>
#include <chorus/nn/quantization/integer_product.hpp>
#include <chorus/nn/quantization/pass.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/quantization_pass.hpp>
#include <chorus/ops/shape.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace chorus::nn {

namespace quantization {

/// What a layer makes of x, a weight and a bias, or an empty Variable in its place.
template <int XRank, int WRank>
using LayerFunction = std::function<Variable<float, XRank, Cpu>(
    const Variable<float, XRank, Cpu>&, const Variable<float, WRank, Cpu>&, const Variable<float, 1, Cpu>&)>;

/// `product(x, w, no bias)` in integers, in evaluation; null where they have none. x and w are on their levels.
template <int XRank, int WRank>
std::shared_ptr<IntegerProduct> evaluated_product(Pass& pass, const LayerPlace& place,
                                                  const Variable<float, XRank, Cpu>& x,
                                                  const Variable<float, WRank, Cpu>& w,
                                                  const LayerFunction<XRank, WRank>& product) {
  // Of these layers there are integer forms.
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

/// What a layer makes of x by `f(x, weight, bias)`.
template <int XRank, int WRank>
Variable<float, XRank, Cpu> layer_output(Pass& pass, const LayerPlace& place, const Variable<float, XRank, Cpu>& x,
                                         const Variable<float, WRank, Cpu>& weight,
                                         const Variable<float, 1, Cpu>& bias, const LayerFunction<XRank, WRank>& f) {
  const auto input = pass.input(place, x);
  const bool any = value_of(x).numel() > 0;
  const auto norm = place.foldable == nullptr ? std::nullopt : place.foldable->folded();
  if (!norm) {
    const auto w = pass.weight(place, weight, any);
    auto product = evaluated_product(pass, place, input, w, f);
    if (product != nullptr && value_of(bias).defined())
      std::copy_n(value_of(bias).data(), product->bias.size(), product->bias.begin());
    auto y = f(input, w, bias);
    pass.output(place, value_of(y).storage(), nullptr, std::move(product));
    return y;
  }
  const auto numbers = [](const auto& tensor) { return tensor.defined() ? tensor.data() : nullptr; };
  const FoldFactors factors(value_of(norm->gamma), norm->running_var, norm->eps);
  const auto w = pass.weight(place, fold(weight, norm->gamma, factors), any);
  auto product = evaluated_product(pass, place, input, w, f);
  if (product != nullptr) {
    product->bias = folded_biases(product->shape.channels, numbers(value_of(bias)),
                                  numbers(value_of(norm->gamma)), numbers(norm->beta), norm->running_mean.data(),
                                  norm->running_var.data(), norm->eps);
    product->nothing = factors.nothing;
  }
  auto y = unfold(f(input, w, Variable<float, 1, Cpu>()), norm->gamma, factors);
  if (value_of(bias).defined()) {
    auto shape = value_of(y).shape();
    shape.fill(1);
    shape[1] = value_of(bias).numel();
    y = y + reshape(bias, shape);
  }
  pass.output(place, value_of(y).storage(), place.norm, std::move(product));
  return y;
}

}  // namespace quantization

namespace detail {

/// `f(x, weight, bias)`, which is what `layer` computes; in a pass with fake quantisation of rounded numbers.
template <Operand X, class W, class B, class F>
auto weighted(const void* layer, const X& x, const W& weight, const B& bias, const F& f) {
  using Result = decltype(f(x, weight, bias));
  if (auto* const pass = quantization::current_pass(layer)) [[unlikely]] {
    if (const auto* const place = pass->find(layer)) {
      if constexpr (std::is_same_v<typename tensor_of<X>::value_type, float> &&
                    std::is_same_v<typename tensor_of<X>::device_type, Cpu> &&
                    !chorus::detail::is_graph_variable<X>) {
        return Result(quantization::layer_output<Result::rank, W::rank>(
            *pass, *place, chorus::detail::variable_of(x), weight.as_variable(), bias.as_variable(), f));
      } else {
        fail<UsageError>("QuantizationAware: '", place->ranges->name,
                         "' gets numbers of another type, or gradients of gradients: expected float on the CPU, and ",
                         "no MixedPrecision");
      }
    }
  }
  return f(x, weight, bias);
}

/// `f(weight)`, which looks up `rows` rows of a table's weight; in a pass with fake quantisation of a rounded one.
template <class W, class F>
auto looked_up(const void* layer, const W& weight, Index rows, const F& f) {
  using Result = decltype(f(weight));
  using Weight = tensor_of<W>;
  if (auto* const pass = quantization::current_pass(layer)) [[unlikely]]
    if (const auto* const place = pass->find(layer))
      if constexpr (std::is_same_v<typename Weight::value_type, float> &&
                    std::is_same_v<typename Weight::device_type, Cpu>)
        return Result(f(pass->table(*place, weight.as_variable(), rows)));
  return f(weight);
}

/// `f(weight, input, operand)`: what attention makes of its in_proj_weight. `weight()` gives it, once `input(x)` has
/// taken what is projected; `operand(part, y)` takes what projection `part` gives. With fake quantisation all that is
/// rounded, and so are the weights of values; else it is as it was.
template <class W, class F>
auto attended(const void* layer, const W& weight, bool any, const F& f) {
  if constexpr (std::is_same_v<typename tensor_of<W>::value_type, float> &&
                std::is_same_v<typename tensor_of<W>::device_type, Cpu>) {
    if (auto* const pass = quantization::current_pass(layer)) [[unlikely]]
      if (const auto* const place = pass->find(layer)) {
        const chorus::detail::Replaced<const quantization::LayerPlace*> scope(pass->attending(), place);
        const auto variable = [place]<class X>(const X& x) {
          if constexpr (!chorus::detail::may_be_quantized<X>)
            fail<UsageError>("QuantizationAware: '", place->ranges->name,
                             "' gets numbers of another type, or gradients of gradients: expected float on the CPU, ",
                             "and no MixedPrecision");
          if constexpr (chorus::detail::may_be_quantized<X>)
            return chorus::detail::variable_of(x);
          else
            return x;
        };
        const auto round = [&]<class X>(const X& x, const auto& how) {
          if constexpr (chorus::detail::may_be_quantized<X>)
            return how(variable(x));
          else
            return variable(x);
        };
        return f([&] { return pass->weight(*place, weight.as_variable(), any); },
                 [&](const auto& x) {
                   return round(x, [&](const auto& v) { return pass->attention_input(*place, v); });
                 },
                 [&](std::size_t part, const auto& y) {
                   return round(y, [&](const auto& v) { return pass->at_site(place->ranges->attention[part], v); });
                 });
      }
  }
  return f([&]() -> const W& { return weight; }, [](const auto& x) -> const auto& { return x; },
           [](std::size_t, const auto& y) -> const auto& { return y; });
}

/// The place of a batch norm that is folded, which takes `x`; null elsewhere.
template <Operand X>
const quantization::LayerPlace* folded_place(const Module* norm, const X& x) {
  if (auto* const pass = quantization::current_pass(norm)) [[unlikely]]
    if (const auto* const place = pass->find(norm))
      if constexpr (chorus::detail::may_be_quantized<X>) {
        pass->check_norm_takes(norm, *place, value_of(x).storage());
        return place;
      }
  return nullptr;
}
/// The normalised `y`, maybe after a ReLU, which is the result of the layer and the batch norm together.
template <Operand Y>
Y folded_result(const quantization::LayerPlace* place, Y y, bool relu = false) {
  if constexpr (chorus::detail::may_be_quantized<Y>)
    if (place != nullptr) [[unlikely]] {
      auto* const pass = quantization::current_pass(place->norm);
      pass->output(*place, value_of(y).storage(), nullptr, pass->taken_product(), relu);
    }
  return y;
}
/// relu(y + residual), of which all three are rounded.
template <Operand Y, Operand R>
auto folded_sum(const quantization::LayerPlace& place, const Y& y, const R& residual) {
  auto sum = relu(chorus::detail::plain_sum(chorus::detail::rounded(folded_result(&place, y)),
                                            chorus::detail::rounded(residual)));
  if constexpr (chorus::detail::may_be_quantized<decltype(sum)>)
    quantization::current_pass(place.norm)->sum(place, value_of(sum).storage());
  return sum;
}

}  // namespace detail

}  // namespace chorus::nn
