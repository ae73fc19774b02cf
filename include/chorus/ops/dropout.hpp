#pragma once
/// Dropout (Srivastava et al. 2014).

#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/random.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/dropout.hpp>
#include <chorus/kernels/dropout_part.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/ops/shape.hpp>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace chorus {

// What the tape remembers of these operations beside their backward functions: see ops/higher_order.hpp.
namespace operations {
struct Dropout {
  static constexpr const char* name = "dropout";
  double p;  // 0: nothing was dropped
  RandomKey key;
};
}  // namespace operations

namespace detail {

/// The axis of a tensor along which this pass's samples lie: the policy's `dim` where the first axis is none.
template <std::size_t Rank>
int samples_axis(const std::array<Index, Rank>& shape) {
  const auto* context = random_context();
  if (context == nullptr || context->dim == 0 || context->dim >= static_cast<int>(Rank)) return 0;
  const Index samples = context->samples;
  return shape[0] != samples && shape[static_cast<std::size_t>(context->dim)] == samples ? context->dim : 0;
}

/// Dropout where samples lie along the first axis.
template <Operand X>
auto dropout_of_rows(const X& x, double p, bool drops) {
  const auto input = contiguous(value_of(x));
  const auto key = next_random_key(input.size(0), drops, std::is_base_of_v<AnyParameter, X>);
  if (!drops)
    return record(
        operations::Dropout{0, {}}, input, [](const auto& dy, auto dx) { dx->add(dy); }, x);
  const Index samples = input.size(0), inner = samples == 0 ? 0 : input.numel() / samples;
  const auto device = input.device();
  auto out = tensor_of<X>::empty(input.shape(), device);
  kernels::dropout_forward(device, samples, inner, input.data(), out.data(), p, key);
  return record(
      operations::Dropout{p, key}, std::move(out),
      [samples, inner, p, key](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::dropout_backward(dy.device(), samples, inner, dy.data(), grad.data(), p, key, accumulate);
      },
      x);
}

/// Of a value that ranks share: [samples, ...] with `row.count` of each `row.width` neighbouring numbers of the whole
/// one. What goes is what goes of that.
template <Operand X>
X dropout_part(const X& x, double p, const kernels::ColumnsOfRow& row) {
  if constexpr (is_graph_variable<X>) {
    fail<UsageError>("dropout: gradients of gradients do not support values that ranks share");
  } else {
    const auto input = contiguous(value_of(x));
    check<UsageError>(samples_axis(input.shape()) == 0,
                      "dropout: expected the samples along the first axis of a value that ranks share");
    const auto key = next_random_key(input.size(0));
    const Index samples = input.size(0), numbers = samples * row.count;
    const Index rows = numbers == 0 ? 0 : input.numel() / numbers;
    auto out = tensor_of<X>::empty(input.shape(), input.device());
    kernels::dropout_columns(input.device(), samples, rows, row, input.data(), out.data(), p, key, false);
    return record(
        "dropout", std::move(out),
        [samples, rows, row, p, key](const auto& dy, auto dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::dropout_columns(dy.device(), samples, rows, row, dy.data(), grad.data(), p, key, accumulate);
        },
        x);
  }
}

}  // namespace detail

/// In training, zeroes each element with probability p and scales the others by 1 / (1 - p); else x itself. x: [batch,
/// ...], or [batch * n, ...]. Which elements go depends on the seed, the pass, and the sample's place in the global
/// batch, not on the device that holds it. Samples lie along the policy's `dim` where that axis has their number and
/// the first one has not. Of a Parameter, and of what has another number of rows, the same go on all devices. Throws
/// UsageError unless 0 <= p < 1.
template <Operand X>
auto dropout(const X& x, double p, bool training = true) {
  static_assert(tensor_of<X>::rank >= 1, "dropout: expected an input with a batch axis");
  check<UsageError>(p >= 0 && p < 1, "dropout: expected a probability in [0, 1), got ", p);
  const bool drops = training && p > 0;
  const int axis = drops ? detail::samples_axis(value_of(x).shape()) : 0;
  // With fake quantisation x is rounded first, so that its range is that of evaluation, where nothing is dropped.
  const auto& input = detail::taken(x);
  auto y = axis == 0 ? detail::dropout_of_rows(input, p, drops)
                     : transpose(detail::dropout_of_rows(transpose(input, 0, axis), p, drops), 0, axis);
  return detail::derived(input, std::move(y), /*exact=*/true);
}

}  // namespace chorus
