#pragma once
/// How operators ask the interceptor of their forward pass to replace operands and to follow results.

#include <algorithm>
#include <chorus/autograd/interceptor.hpp>
#include <chorus/autograd/node.hpp>
#include <chorus/autograd/operation_watch.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <span>
#include <type_traits>
#include <vector>

namespace chorus::detail {

/// The operand that an operator uses for x: x, or the interceptor's replacement.
template <Operand X>
std::conditional_t<may_be_intercepted<X>, X, const X&> taken(const X& x) {
  if constexpr (may_be_intercepted<X>)
    if (interceptor != nullptr) [[unlikely]] {
      Variable<float, tensor_of<X>::rank, Cpu> out;
      if (interceptor->take(variable_of(x), &out)) {
        if constexpr (AnyTensor<X>)
          return out.value();
        else
          return out;
      }
    }
  return x;
}

/// Reports that `result` was computed from `x` and returns it: see Interceptor::derived.
template <Operand X, Operand Y>
Y derived(const X& x, Y result, bool exact) {
  if constexpr (may_be_intercepted<X> && may_be_intercepted<Y>)
    if (interceptor != nullptr) [[unlikely]]
      interceptor->derived(value_of(x).storage(), value_of(result).storage(), exact);
  return result;
}

/// A joint operation `f(x...)` on the replaced operands.
template <class F, Operand... X>
auto joined(Interceptor::Joint how, const F& f, const X&... x) {
  if constexpr ((may_be_intercepted<X> && ...)) {
    if (interceptor != nullptr && (value_of(x).defined() && ...)) [[unlikely]] {
      constexpr auto first = [](const auto& shape, const auto&...) { return std::vector(shape.begin(), shape.end()); };
      const auto shape = first(value_of(x).shape()...);
      const bool alike = (std::ranges::equal(shape, value_of(x).shape()) && ...);
      const Interceptor::JointOperand operands[] = {
          {value_of(x).storage(), value_of(x).data(), value_of(x).numel()}...};
      if (interceptor->joins(how, operands, alike)) {
        auto y = f(taken(x)...);
        interceptor->joined(value_of(y).storage());
        return y;
      }
    }
  }
  return f(x...);
}

/// The same for a list that is concatenated.
template <class F, Operand X>
X joined_list(const F& f, std::span<const X> list) {
  if constexpr (may_be_intercepted<X>) {
    constexpr auto is_defined = [](const X& x) { return value_of(x).defined(); };
    if (interceptor != nullptr && std::ranges::all_of(list, is_defined)) [[unlikely]] {
      std::vector<Interceptor::JointOperand> operands;
      for (const X& x : list) operands.push_back({value_of(x).storage(), value_of(x).data(), value_of(x).numel()});
      if (interceptor->joins(Interceptor::Joint::concatenation, operands, /*alike=*/false)) {
        std::vector<X> parts;
        for (const X& x : list) parts.push_back(taken(x));
        X y = f(std::span<const X>(parts));
        interceptor->joined(value_of(y).storage());
        return y;
      }
    }
  }
  return f(list);
}

/// While it lives, this thread's operations are neither observed nor recorded.
class Unobserved {
  const NoGrad no_grad_;
  const Replaced<OperationWatch*> unwatched_{operation_watch, nullptr};
  const Replaced<LayerWatch*> uncounted_{layer_watch, nullptr};
};

/// y, the means of x over `count` elements each. If the interceptor wants, computed from integers, with
/// `sums(integers)`.
template <Operand X, Operand Y, class F>
Y exact_means(const X& x, Y y, Index count, const F& sums) {
  if constexpr (may_be_intercepted<X> && may_be_intercepted<Y>)
    if (interceptor != nullptr) [[unlikely]] {
      const auto input = contiguous(value_of(x));
      const auto integers = tensor_of<X>::empty(input.shape());
      const auto& storage = value_of(x).storage();
      if (interceptor->integers_of(storage, input.data(), input.numel(), integers.data())) {
        const Unobserved unobserved;
        const auto all = sums(integers);
        interceptor->means_of_integers(storage, all.data(), all.numel(), count, value_of(y).data());
      }
    }
  return y;
}

}  // namespace chorus::detail
