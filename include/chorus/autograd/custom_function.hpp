#pragma once
/// User-defined differentiable functions.

#include <chorus/autograd/saved.hpp>
#include <chorus/autograd/variable.hpp>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus {

// The tape's record of this operation, in addition to its backward function: see ops/higher_order.hpp.
namespace operations {
template <class Backward>
struct Custom {
  const char* name;
  Backward backward;
};
}  // namespace operations

namespace detail {
template <class... Xs>
std::tuple<Xs...> as_tuple(std::tuple<Xs...> several) {
  return several;
}
template <Operand X>
std::tuple<X> as_tuple(X one) {
  return std::tuple<X>(std::move(one));
}
}  // namespace detail

/// A user-defined function. `forward(x...)` and `backward(dy, y, x...)` work on Tensors. `forward` returns the value y;
/// `backward` returns the gradient w.r.t. x, or a tuple with one for each input (an undefined Tensor{} for none).
/// `inputs` are Tensors, Variables or Parameters; the result is a Tensor if all are Tensors, else a Variable. Inputs
/// and value are saved for backward. A `backward` that takes any operand (`const auto&`) can be differentiated again
/// with <chorus/ops/higher_order.hpp>. Throws ShapeError if a gradient's shape is not its input's.
///   auto clipped_exp(const auto& x) {  // exp(min(x, 3)), whose gradient never ends
///     return ch::custom_function(
///         "clipped_exp", [](const auto& in) { return ch::exp(ch::minimum(in, ceiling)); },
///         [](const auto& dy, const auto& y, const auto& in) { return dy * y; }, x);
///   }
template <class Forward, class Backward, Operand... Inputs>
auto custom_function(const char* name, const Forward& forward, const Backward& backward, const Inputs&... inputs) {
  const auto y = forward(value_of(inputs)...);
  static_assert(AnyTensor<decltype(y)>, "custom_function: forward gets Tensors and returns one");
  return record(
      operations::Custom<Backward>{name, backward}, y,
      [name, backward, result = detail::Saved(y), saved = std::tuple{detail::Saved(value_of(inputs))...}](
          const auto& dy, auto... nodes) {
        const auto give = [name](auto node, const auto& gradient) {
          if (!node || !gradient.defined()) return;
          check<ShapeError>(gradient.shape() == node->shape(), name, ": backward gave a gradient of shape ",
                            gradient.shape(), " for an input of shape ", node->shape());
          node->add(contiguous(gradient));
        };
        const auto gradients = detail::as_tuple(
            std::apply([&](const auto&... x) { return backward(dy, result.read(name), x.read(name)...); }, saved));
        static_assert(std::tuple_size_v<std::remove_const_t<decltype(gradients)>> == sizeof...(Inputs),
                      "custom_function: backward returns a gradient for each input");
        std::apply([&](const auto&... gradient) { (give(nodes, gradient), ...); }, gradients);
      },
      inputs...);
}

}  // namespace chorus
