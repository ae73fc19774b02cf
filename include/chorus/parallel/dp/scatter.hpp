#pragma once
/// Step 1, scatter: each device gets its share of the inputs. Backward returns the gradients of the shares.

#include <array>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/ops/device_copy.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/parallel/dp/backward.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <cstddef>
#include <tuple>
#include <utility>

namespace chorus::dp {

/// Adds the gradient of a device's share to the input's gradient: to the range of `axis` that begins at sample `begin`,
/// or to all of it if the input was not cut.
template <class T, int Rank, class D>
void return_gradient(const Variable<T, Rank, D>& share, GradNode<T, Rank, D>& input, bool cut, int axis, Index begin) {
  if (!share.grad().defined()) return;
  const auto grad = detail::on_device(share.grad(), input.device(), trace::Traffic::inputs);
  share.zero_grad();
  if (input.skipped()) return;
  if (!cut) return input.add(grad);
  const bool first = !input.has_grad();
  const auto target = input.target();
  if (first) zero_bytes(input.device(), target.data(), target.grad.bytes());
  kernels::put_block(input.device(), detail::around_axis(input.shape(), static_cast<std::size_t>(axis)), begin,
                     grad.size(axis), grad.data(), target.data(), true);
}

/// Makes device `number`'s share of each tensor in an input: its own samples, or all of a tensor without samples. The
/// share of a Variable that wants a gradient is a leaf; its gradient is returned later. All devices share objects
/// without tensors.
template <class D>
struct MakeShare : detail::TensorFunction {
  const Split& split;
  std::size_t number;
  D device;
  GradientReturns& returns;

  MakeShare(const Split& how, std::size_t i, D to, GradientReturns& back)
      : split(how), number(i), device(to), returns(back) {}

  template <class X>
  decltype(auto) operator()(const std::array<const X*, 1>& input) const {
    const X& x = *input[0];
    if constexpr (!Operand<X>) {
      return (x);
    } else {
      const bool cut = split.cuts(x);
      const int axis = detail::batch_axis_of<X>(split.dim);
      const Index begin = split.begin(number);
      const auto& whole = value_of(x);
      const auto share = detail::on_device(cut ? whole.slice(axis, begin, begin + split.size(number)) : whole, device,
                                           trace::Traffic::inputs);
      if constexpr (AnyTensor<X>) {
        return detail::with_batch_axis_of<X>(share);
      } else {
        const auto node = node_of(x);
        const Variable leaf(share, node && grad_enabled());
        if (leaf.requires_grad()) returns.push_back({node, [=] { return_gradient(leaf, *node, cut, axis, begin); }});
        return detail::with_batch_axis_of<X>(leaf);
      }
    }
  }
};

/// Device `number`'s share of the inputs, as a tuple. `returns` gets the functions that return the gradients.
template <template <class> class Make = MakeShare, Device D, class... Inputs>
auto scatter(const Split& split, std::size_t number, D device, GradientReturns& returns, const Inputs&... inputs) {
  const trace::Span span(trace::Lane::communication, "copy", "scatter");
  const Make<D> share(split, number, device, returns);
  return std::tuple<decltype(detail::map_tensors(std::array{&inputs}, share))...>{
      detail::map_tensors(std::array{&inputs}, share)...};
}

/// The result type of `scatter` for these inputs.
template <template <class> class Make, Device D, class... Inputs>
using Shares =
    decltype(scatter<Make>(Split{}, 0, D{}, std::declval<GradientReturns&>(), std::declval<const Inputs&>()...));

}  // namespace chorus::dp
