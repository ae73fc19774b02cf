#pragma once
/// How layers ask the interceptor of their forward pass for another weight or another computation.

#include <chorus/autograd/interceptor.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <type_traits>

namespace chorus::nn::detail {

/// `f(x, weight, bias)`, the layer's computation, which may be intercepted.
template <Operand X, class W, class B, class F>
auto weighted(const void* layer, const X& x, const W& weight, const B& bias, const F& f) {
  using Result = decltype(f(x, weight, bias));
  const void* part = nullptr;
  if (auto* const interceptor = chorus::detail::interceptor_of(layer, part)) [[unlikely]] {
    if constexpr (chorus::detail::may_be_intercepted<X>) {
      using V = Variable<float, Result::rank, Cpu>;
      using Weight = Variable<float, W::rank, Cpu>;
      const auto xs = chorus::detail::variable_of(x);
      const auto apply = [](const void* call, const FloatVariable& input, const FloatVariable& w,
                            const Variable<float, 1, Cpu>& b, void* result) {
        *static_cast<V*>(result) =
            (*static_cast<const F*>(call))(input.as<Result::rank>(), w.as<Weight::rank>(), b);
      };
      V result;
      interceptor->layer(part, {xs, weight.as_variable(), bias.as_variable(), &f, apply}, &result);
      return Result(result);
    } else {
      interceptor->refuse_numbers(part);
    }
  }
  return f(x, weight, bias);
}

/// `f(weight)`, which looks up `rows` rows of an embedding table.
template <class W, class F>
auto looked_up(const void* layer, const W& weight, Index rows, const F& f) {
  using Result = decltype(f(weight));
  using Weight = tensor_of<W>;
  const void* part = nullptr;
  if (auto* const interceptor = chorus::detail::interceptor_of(layer, part)) [[unlikely]]
    if constexpr (std::is_same_v<typename Weight::value_type, float> &&
                  std::is_same_v<typename Weight::device_type, Cpu>)
      return Result(f(interceptor->table(part, weight.as_variable(), rows)));
  return f(weight);
}

/// `f(weight, input, operand)`: attention's computation with its in_proj_weight. `input(x)` reads a projection's input,
/// then `weight()` returns the weight; `operand(number, y)` reads the result of projection `number`.
template <class W, class F>
auto attended(const void* layer, const W& weight, bool any, const F& f) {
  if constexpr (std::is_same_v<typename tensor_of<W>::value_type, float> &&
                std::is_same_v<typename tensor_of<W>::device_type, Cpu>) {
    const void* part = nullptr;
    if (auto* const interceptor = chorus::detail::interceptor_of(layer, part)) [[unlikely]] {
      const struct Scope {
        Interceptor& pass;
        const void* const before;
        ~Scope() { pass.begin_attention(before); }
      } scope{*interceptor, interceptor->begin_attention(part)};
      const auto changed = [&]<class X>(const X& x, const auto& change) {
        if constexpr (chorus::detail::may_be_intercepted<X>) {
          Variable<float, tensor_of<X>::rank, Cpu> result;
          change(chorus::detail::variable_of(x), &result);
          return result;
        } else {
          interceptor->refuse_numbers(part);
          return x;
        }
      };
      return f([&] { return interceptor->attention_weight(part, weight.as_variable(), any); },
               [&](const auto& x) {
                 return changed(x, [&](const auto& v, void* to) { interceptor->attention_input(part, v, to); });
               },
               [&](std::size_t number, const auto& y) {
                 return changed(
                     y, [&](const auto& v, void* to) { interceptor->attention_operand(part, number, v, to); });
               });
    }
  }
  return f([&]() -> const W& { return weight; }, [](const auto& x) -> const auto& { return x; },
           [](std::size_t, const auto& y) -> const auto& { return y; });
}

/// Reports that a batch norm reads x. Returns the interceptor's state for it, or null.
template <Operand X>
const void* norm_takes(const Module* norm, const X& x) {
  const void* part = nullptr;
  if (auto* const interceptor = chorus::detail::interceptor_of(norm, part)) [[unlikely]]
    if constexpr (chorus::detail::may_be_intercepted<X>) {
      interceptor->norm_takes(norm, part, value_of(x).storage());
      return part;
    }
  return nullptr;
}
/// Reports that a batch norm, maybe with a ReLU, returns `y`.
template <Operand Y>
Y norm_gives(const void* part, Y y, bool relu = false) {
  if constexpr (chorus::detail::may_be_intercepted<Y>)
    if (part != nullptr) [[unlikely]]
      chorus::detail::interceptor->norm_gives(part, value_of(y).storage(), relu);
  return y;
}

}  // namespace chorus::nn::detail
