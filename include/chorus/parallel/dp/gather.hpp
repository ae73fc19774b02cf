#pragma once
/// Step 4, gather: the outputs of all devices are joined on one. In backward each device gets its part of the gradient.

#include <chorus/kernels/axis_shape.hpp>
#include <chorus/ops/device_copy.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/parallel/dp/backward.hpp>
#include <chorus/parallel/dp/joined_axis.hpp>
#include <chorus/parallel/dp/mean_loss.hpp>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace chorus::dp {

/// The node of a gathered output.
template <Real T, int Rank, Device D>
class GatherNode final : public GradNode<T, Rank, D>, public detail::OfDeviceScalars {
 public:
  GatherNode(const Tensor<T, Rank, D>& value, std::size_t axis, std::vector<Variable<T, Rank, D>> parts,
             Ref<BackwardNode> backward)
      : GradNode<T, Rank, D>("gather", value.shape(), value.device()),
        axis_(static_cast<int>(axis)),
        parts_(std::move(parts)),
        backward_(std::move(backward)) {}

  std::vector<Node*> scalars() const override {
    std::vector<Node*> nodes;
    for (const auto& part : parts_) nodes.push_back(part.node().get());
    return nodes;
  }

  void backward(bool) override {
    if (!this->has_grad()) return;
    const auto grad = this->take_grad();
    Index begin = 0;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const auto& part = parts_[i];
      const Index first = std::exchange(begin, begin + part.size(axis_));
      if (!part.requires_grad()) continue;
      part.node()->add(detail::on_device(grad.slice(axis_, first, begin), part.device(), trace::Traffic::outputs));
      backward_->roots[i].push_back(part.node());
    }
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override { visit(*backward_, context); }

 private:
  int axis_;
  std::vector<Variable<T, Rank, D>> parts_;
  Ref<BackwardNode> backward_;
};

/// A device's output in the form that is joined: a scalar gets an axis. Throws UsageError for an undefined one.
template <Operand X>
auto with_axis(const X& x, std::size_t device) {
  if constexpr (tensor_of<X>::rank > 0) {
    return x;
  } else {
    check<UsageError>(value_of(x).defined(), "DataParallel: replica ", device, " returned an undefined scalar");
    return reshape(x, Shape<1>{1});
  }
}

/// Joins outputs along `axis` on `device`.
template <Operand Part, Device D>
auto join(const std::vector<Part>& parts, std::size_t axis, D device) {
  if (parts.size() == 1) return detail::on_device(value_of(parts[0]), device, trace::Traffic::outputs);
  auto shape = value_of(parts[0]).shape();
  for (std::size_t i = 1; i < parts.size(); ++i) shape[axis] += value_of(parts[i]).shape()[axis];
  auto out = tensor_of<Part>::empty(shape, device);
  const auto whole = detail::around_axis(shape, axis);
  auto* to = out.data();
  for (const Part& part : parts) {
    const auto dense = contiguous(value_of(part));
    const Index row = dense.shape()[axis] * whole.inner;
    for (Index o = 0; o < whole.outer; ++o)
      copy_bytes(device, to + o * whole.axis * whole.inner, dense.device(), dense.data() + o * row,
                 static_cast<std::size_t>(row) * sizeof(*to));
    if (dense.device() != device)
      trace::sent(dense.device().index, device.index, trace::Traffic::outputs, dense.bytes());
    to += row;
  }
  return out;
}

/// Joins one output of all devices. Values that are no tensors are returned in a vector, one per device.
template <class D>
struct JoinOutputs : detail::TensorFunction {
  const Split& split;
  D device;
  Ref<BackwardNode> backward;

  JoinOutputs(const Split& how, D to, Ref<BackwardNode> on_tape)
      : split(how), device(to), backward(std::move(on_tape)) {}

  template <class X>
  static constexpr bool opens =
      !Operand<X> && (detail::holds_operands<X> || detail::is_list<X> || detail::HasFields<X>);
  template <class X>
  static constexpr bool adds_axis = detail::holds_scalars<X>;

  template <class X>
  auto operator()(const std::vector<const X*>& outputs) const {
    if constexpr (AnyTensor<X>) {
      const auto parts = with_axes(
          outputs, [](const X& output) -> const auto& { return value_of(output); });
      return detail::with_batch_axis_of<X>(join(parts, axis_of(outputs), device));
    } else if constexpr (detail::is_variable<X> || detail::is_graph_variable<X>) {
      auto parts = with_axes(
          outputs, [](const X& output) -> const auto& { return detail::variable_of(output); });
      bool wanted = false;
      for (auto& part : parts) {
        // A parameter that the model returns gets its gradient together with the others, in its copy's backward.
        if (part.node() && part.node()->is_leaf()) part = reshape(part, part.shape());
        wanted = wanted || part.requires_grad();
      }
      const auto axis = axis_of(outputs);
      const auto value = join(parts, axis, device);
      return detail::with_batch_axis_of<X>(on_tape(value, axis, std::move(parts), wanted));
    } else {
      std::vector<X> values;
      for (const X* output : outputs) values.push_back(*output);
      return values;
    }
  }

 protected:
  template <class X>
  std::size_t axis_of(const std::vector<const X*>& outputs) const {
    if constexpr (tensor_of<X>::rank == 0)
      return 0;
    else
      return joined_axis(outputs, split);
  }
  /// Applies `take` to each output and gives scalars an axis.
  template <class X, class Take>
  static auto with_axes(const std::vector<const X*>& outputs, const Take& take) {
    std::vector<decltype(with_axis(take(*outputs[0]), 0))> parts;
    for (const X* output : outputs) parts.push_back(with_axis(take(*output), parts.size()));
    return parts;
  }

 private:
  template <Real T, int Rank>
  Variable<T, Rank, D> on_tape(const Tensor<T, Rank, D>& value, std::size_t axis,
                               std::vector<Variable<T, Rank, D>> parts, bool wanted) const {
    if (!wanted) return Variable<T, Rank, D>(value);
    return {value, Ref<GradNode<T, Rank, D>>(new GatherNode<T, Rank, D>(value, axis, std::move(parts), backward))};
  }
};

/// Joins the model's outputs of all devices on `device`: tensors at any depth of tuples, pairs, arrays, vectors, maps,
/// optionals and structs with `fields()`. A struct keeps its type, so none of its fields may be a scalar, which would
/// become a vector. Throws ShapeError if outputs can't be joined (`joined_axis`, `map_tensors`). Backward of the result
/// continues with `backward`.
template <template <class> class Join = JoinOutputs, class Output, Device D>
auto gather(const std::vector<std::optional<Output>>& outputs, const Split& split, D device,
            const Ref<BackwardNode>& backward) {
  const trace::Span span(trace::Lane::communication, "copy", "gather");
  return detail::map_tensors(detail::pointers_to(outputs), Join<D>(split, device, backward));
}

}  // namespace chorus::dp
