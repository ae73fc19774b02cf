#pragma once
/// Step 4, gather: the outputs of all devices are joined on one. In backward each device gets the gradient of its own.

#include <algorithm>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/ops/device_copy.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/parallel/dp/backward.hpp>
#include <chorus/parallel/dp/joined_axis.hpp>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::dp {

/// The node of a gathered output.
template <Real T, int Rank, int PartRank, Device D>
class GatherNode final : public GradNode<T, Rank, D> {
 public:
  GatherNode(const Tensor<T, Rank, D>& value, std::size_t axis, std::vector<Variable<T, PartRank, D>> parts,
             Ref<BackwardNode> backward)
      : GradNode<T, Rank, D>("gather", value.shape(), value.device()),
        axis_(static_cast<int>(axis)),
        parts_(std::move(parts)),
        backward_(std::move(backward)) {}

  void backward(bool) override {
    if (!this->has_grad()) return;
    const auto grad = this->take_grad();
    Index begin = 0;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const auto& part = parts_[i];
      const auto share = [&] {
        if constexpr (PartRank == 0) {
          return grad.select(0, static_cast<Index>(i));
        } else {
          const Index first = std::exchange(begin, begin + part.size(axis_));
          return grad.slice(axis_, first, begin);
        }
      }();
      if (!part.requires_grad()) continue;
      part.node()->add(detail::on_device(share, part.device(), trace::Traffic::outputs));
      backward_->roots[i].push_back(part.node());
    }
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override { visit(*backward_, context); }

 private:
  int axis_;
  std::vector<Variable<T, PartRank, D>> parts_;
  Ref<BackwardNode> backward_;
};

/// Joins outputs along `axis` on `device`. Those without axes become a vector. Throws UsageError for an undefined one.
template <Operand Part, Device D>
auto join(const std::vector<const Part*>& parts, std::size_t axis, D device) {
  using T = typename tensor_of<Part>::value_type;
  constexpr int rank = tensor_of<Part>::rank;
  Shape<rank == 0 ? 1 : rank> shape{};
  if constexpr (rank > 0) {
    if (parts.size() == 1) return detail::on_device(value_of(*parts[0]), device, trace::Traffic::outputs);
    shape = value_of(*parts[0]).shape();
    shape[axis] = 0;
    for (const Part* part : parts) shape[axis] += value_of(*part).shape()[axis];
  } else {
    shape[0] = static_cast<Index>(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i)
      check<UsageError>(value_of(*parts[i]).defined(), "DataParallel: replica ", i, " returned an undefined scalar");
  }
  const auto out = Tensor < T, rank == 0 ? 1 : rank, D > ::empty(shape, device);
  const auto whole = detail::around_axis(shape, axis);
  T* to = out.data();
  for (const Part* part : parts) {
    const auto dense = contiguous(value_of(*part));
    const Index row = dense.numel() / std::max<Index>(whole.outer, 1);
    for (Index o = 0; o < whole.outer; ++o)
      copy_bytes(device, to + o * whole.axis * whole.inner, dense.device(), dense.data() + o * row,
                 static_cast<std::size_t>(row) * sizeof(T));
    if (dense.device() != device) trace::sent(dense.device().index, trace::Traffic::outputs, dense.bytes());
    to += row;
  }
  return out;
}

/// The same for Variables: the result stands on the tape, if one of them has a gradient.
template <Real T, int Rank, Device D>
auto join_variables(std::vector<Variable<T, Rank, D>> parts, std::size_t axis, D device,
                    const Ref<BackwardNode>& backward) {
  std::vector<const Variable<T, Rank, D>*> places;
  bool wanted = false;
  for (auto& part : parts) {
    // A parameter that the model returns gets its gradient with the others', in its copy's own backward pass.
    if (part.node() && part.node()->is_leaf()) part = reshape(part, part.shape());
    places.push_back(&part);
    wanted = wanted || part.requires_grad();
  }
  const auto value = join(places, axis, device);
  constexpr int rank = decltype(join(places, axis, device))::rank;
  if (!wanted) return Variable<T, rank, D>(std::move(value));
  Ref<GradNode<T, rank, D>> node(new GatherNode<T, rank, Rank, D>(value, axis, std::move(parts), backward));
  return Variable<T, rank, D>(std::move(value), std::move(node));
}

/// Makes one output of those of all devices. Of what is no tensor all devices' values are returned, in a vector.
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
  auto operator()(const std::vector<const X*>& parts) const {
    if constexpr (!AnyTensor<X> && !detail::is_variable<X> && !detail::is_graph_variable<X>) {
      std::vector<X> values;
      for (const X* part : parts) values.push_back(*part);
      return values;
    } else {
      std::size_t axis = 0;
      if constexpr (tensor_of<X>::rank > 0) axis = joined_axis(parts, split);
      if constexpr (AnyTensor<X>) {
        return detail::with_batch_axis_of<X>(join(parts, axis, device));
      } else {
        std::vector<std::remove_cvref_t<decltype(detail::variable_of(*parts[0]))>> variables;
        for (const X* part : parts) variables.push_back(detail::variable_of(*part));
        return detail::with_batch_axis_of<X>(join_variables(std::move(variables), axis, device, backward));
      }
    }
  }
};

/// What the model returned on all devices as one value on `device`: tensors are joined, at any depth of tuples, pairs,
/// arrays, vectors, maps, optionals and structs with `fields()`. A struct stays the same type, so that none of its
/// fields may be a scalar, which becomes a vector. Throws ShapeError for what can't be joined (`joined_axis`,
/// `map_tensors`). Backward goes on from the result to `backward`.
template <template <class> class Join = JoinOutputs, class Output, Device D>
auto gather(const std::vector<std::optional<Output>>& outputs, const Split& split, D device,
            const Ref<BackwardNode>& backward) {
  return detail::map_tensors(detail::pointers_to(outputs), Join<D>(split, device, backward));
}

}  // namespace chorus::dp
