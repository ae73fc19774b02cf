#pragma once
/// Dropout (Srivastava et al. 2014).

#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/shared_places.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/dropout.hpp>
#include <chorus/kernels/dropout_part.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/ops/shape.hpp>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct Dropout {
  static constexpr const char* name = "dropout";
  double p;  // 0: no dropout
  RandomKey key;
};
}  // namespace operations

namespace detail {

/// The axis of this pass's samples: the policy's `dim` if the first axis does not have their number, but `dim` has.
template <std::size_t Rank>
int samples_axis(const std::array<Index, Rank>& shape) {
  const auto* context = random_context();
  if (context == nullptr || context->dim == 0 || context->dim >= static_cast<int>(Rank)) return 0;
  const Index samples = context->samples;
  return shape[0] != samples && shape[static_cast<std::size_t>(context->dim)] == samples ? context->dim : 0;
}

/// Dropout with samples along the first axis.
template <Operand X>
auto dropout_of_rows(const X& x, double p, bool drops) {
  const auto input = contiguous(value_of(x));
  constexpr bool same_on_all = std::is_base_of_v<AnyParameter, X>;
  const auto places = drops && !same_on_all ? places_here() : nullptr;
  constexpr bool plain = !is_graph_variable<X> && std::is_same_v<typename tensor_of<X>::device_type, Cpu>;
  constexpr DType type = dtype<typename tensor_of<X>::value_type>;
  const auto key =
      places ? places->next_key_of_dropout(input.shape(), plain) : next_random_key(input.size(0), drops, same_on_all);
  if (!drops)
    return record(
        operations::Dropout{0, {}}, input, [](const auto& dy, auto dx) { dx->add(dy); }, x);
  const Index of_pass = samples_here(), samples = input.size(0), inner = samples == 0 ? 0 : input.numel() / samples;
  const auto device = input.device();
  auto out = tensor_of<X>::empty(input.shape(), device);
  if (places) [[unlikely]]
    places->dropout(type, of_pass, samples, inner, p, key, input.data(), out.data(), false);
  else
    kernels::dropout_forward(device, samples, inner, input.data(), out.data(), p, key);
  return record(
      operations::Dropout{p, key}, std::move(out),
      [samples, inner, p, key, places, of_pass](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        if (places) [[unlikely]]
          return places->dropout(type, of_pass, samples, inner, p, key, dy.data(), grad.data(), accumulate);
        kernels::dropout_backward(dy.device(), samples, inner, dy.data(), grad.data(), p, key, accumulate);
      },
      x);
}

/// Dropout of a sharded value: [samples, ...], with `row.count` of each `row.width` neighbouring elements of the whole.
/// Drops the same elements as dropout of the whole.
template <Operand X>
X dropout_part(const X& x, double p, const kernels::ColumnsOfRow& row) {
  if constexpr (is_graph_variable<X>) {
    fail<UsageError>("dropout: gradients of gradients do not support values that ranks share");
  } else {
    const auto input = contiguous(value_of(x));
    check<UsageError>(samples_axis(input.shape()) == 0,
                      "dropout: expected the samples along the first axis of a value that ranks share");
    const auto places = places_here();
    constexpr DType type = dtype<typename tensor_of<X>::value_type>;
    const auto key =
        places ? places->next_key_of_dropout(input.shape(), std::is_same_v<typename tensor_of<X>::device_type, Cpu>)
               : next_random_key(input.size(0));
    const Index of_pass = samples_here(), samples = input.size(0), numbers = samples * row.count;
    const Index rows = numbers == 0 ? 0 : input.numel() / numbers;
    auto out = tensor_of<X>::empty(input.shape(), input.device());
    const ColumnsOfPlaces part{row.width, row.begin, row.count};
    if (places) [[unlikely]]
      places->dropout(type, of_pass, samples, rows * row.count, p, key, input.data(), out.data(), false, part);
    else
      kernels::dropout_columns(input.device(), samples, rows, row, input.data(), out.data(), p, key, false);
    return record(
        "dropout", std::move(out),
        [samples, rows, row, p, key, places, of_pass, part](const auto& dy, auto dx) {
          const auto [grad, accumulate] = dx->target();
          if (places) [[unlikely]]
            return places->dropout(type, of_pass, samples, rows * row.count, p, key, dy.data(), grad.data(), accumulate,
                                   part);
          kernels::dropout_columns(dy.device(), samples, rows, row, dy.data(), grad.data(), p, key, accumulate);
        },
        x);
  }
}

}  // namespace detail

/// In training, zeroes each element with probability p and scales the others by 1 / (1 - p); else returns x. x: [batch,
/// ...], or [batch * n, ...]. The choice depends on the seed, the pass and the sample's index in the global batch, not
/// on the device. Samples lie along the policy's `dim` if that axis has their number and the first one does not. A
/// Parameter, or a value with another number of rows, drops the same elements on all devices. Throws UsageError unless
/// 0 <= p < 1.
template <Operand X>
auto dropout(const X& x, double p, bool training = true) {
  static_assert(tensor_of<X>::rank >= 1, "dropout: expected an input with a batch axis");
  check<UsageError>(p >= 0 && p < 1, "dropout: expected a probability in [0, 1), got ", p);
  const bool drops = training && p > 0;
  const int axis = drops ? detail::samples_axis(value_of(x).shape()) : 0;
  // Fake quantisation rounds x first, so that its range is that of evaluation.
  const auto& input = detail::taken(x);
  auto y = axis == 0 ? detail::dropout_of_rows(input, p, drops)
                     : transpose(detail::dropout_of_rows(transpose(input, 0, axis), p, drops), 0, axis);
  return detail::derived(input, std::move(y), /*exact=*/true);
}

}  // namespace chorus
