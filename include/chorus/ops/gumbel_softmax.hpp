#pragma once
/// gumbel_softmax: differentiable samples of categories.

#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/random.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/softmax.hpp>
#include <limits>
#include <type_traits>

namespace chorus {

/// Samples of the categories of an axis: softmax((logits + Gumbel noise) / tau) (Jang et al. 2017). With `hard` the
/// largest becomes 1, the others 0, with the gradient of the soft sample. Throws UsageError unless tau is positive.
template <Operand X>
auto gumbel_softmax(const X& logits, double tau = 1, bool hard = false, Index axis = -1,
                    const RandomOptions& options = {}) {
  using Numbers = tensor_of<X>;
  using T = typename Numbers::value_type;
  check<UsageError>(tau > 0, "gumbel_softmax: expected a tau above 0, got ", tau);
  if constexpr (NarrowOperand<X>) {
    return to<T>(gumbel_softmax(to<float>(logits), tau, hard, axis, options));
  } else {
    // log(0) would be infinite.
    const auto uniform =
        maximum(rand_like(logits, options), Tensor<T, 0, typename Numbers::device_type>::full(
                                                {}, std::numeric_limits<T>::min(), value_of(logits).device()));
    const auto soft = softmax((logits - log(-log(uniform))) / tau, axis);
    if (!hard) return soft;
    const auto& value = value_of(soft);
    auto one = value.shape();
    one[normalize_axis("gumbel_softmax", axis, Numbers::rank)] = 1;
    const auto zeros = Numbers::zeros(value.shape(), value.device());
    const auto chosen = scatter(zeros, axis, argmax(value, axis).view(one), Numbers::ones(one, value.device()));
    return std::remove_const_t<decltype(soft)>(soft + (chosen - value));
  }
}

}  // namespace chorus
