#pragma once
/// Joining what several devices return, and handing gradients back to them.

#include <chorus/parallel/dp/mean_loss.hpp>
#include <chorus/parallel/dp/nested.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::detail {

/// A gathered output's node.
template <Real T, int Rank, int PartRank, Device D>
class GatherNode final : public GradNode<T, Rank, D>, public chorus::detail::OfDeviceScalars {
 public:
  GatherNode(const Tensor<T, Rank, D>& value, int dim, std::vector<Variable<T, PartRank, D>> parts,
             Ref<ReplicaBackward> backward)
      : GradNode<T, Rank, D>("gather", value.shape(), value.device()),
        dim_(dim),
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
      const auto share = [&] {
        if constexpr (PartRank == 0) {
          return grad.select(0, static_cast<Index>(i));
        } else {
          const Index first = std::exchange(begin, begin + part.size(dim_));
          return grad.slice(dim_, first, begin);
        }
      }();
      if (!part.requires_grad()) continue;
      part.node()->add(on_device(share, part.device(), trace::Traffic::outputs));
      backward_->roots[i].push_back(part.node());
    }
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override { visit(*backward_, context); }

 private:
  int dim_;
  std::vector<Variable<T, PartRank, D>> parts_;
  Ref<ReplicaBackward> backward_;
};

/// The shape of what is joined along `dim`, which is checked.
template <Operand Part>
auto joined_shape(const std::vector<Part>& parts, int dim) {
  auto shape = parts.front().shape();
  if constexpr (tensor_of<Part>::rank > 0) {
    const auto axis = normalize_axis("DataParallel", dim, tensor_of<Part>::rank);
    for (std::size_t i = 1; i < parts.size(); ++i) {
      auto expected = parts.front().shape();
      expected[axis] = parts[i].shape()[axis];
      check<ShapeError>(parts[i].shape() == expected, "DataParallel: replica ", i, "'s output of shape ",
                        parts[i].shape(), " can't be joined to replica 0's of shape ", parts.front().shape(),
                        " along axis ", dim);
      shape[axis] += expected[axis];
    }
  }
  return shape;
}

/// Joins tensors of several devices along `dim` on one of them; scalars become a vector.
template <Scalar T, int Rank, Device D>
auto gather_tensors(const std::vector<Tensor<T, Rank, D>>& parts, int dim, D device) {
  if constexpr (Rank == 0) {
    auto out = Tensor<T, 1, D>::empty({static_cast<Index>(parts.size())}, device);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      check<UsageError>(parts[i].defined(), "DataParallel: replica ", i, " returned an undefined scalar");
      copy_bytes(device, out.data() + i, parts[i].device(), parts[i].data(), sizeof(T));
      if (parts[i].device() != device) trace::sent(parts[i].device().index, trace::Traffic::outputs, sizeof(T));
    }
    return out;
  } else {
    if (parts.size() == 1) return on_device(parts.front(), device, trace::Traffic::outputs);
    const auto shape = joined_shape(parts, dim);
    const auto axis = normalize_axis("DataParallel", dim, Rank);
    auto out = Tensor<T, Rank, D>::empty(shape, device);
    const auto whole = around_axis(shape, axis);
    Index begin = 0;
    for (const auto& part : parts) {
      const auto dense = contiguous(part);
      const Index row = part.shape()[axis] * whole.inner;
      for (Index o = 0; o < whole.outer; ++o)
        copy_bytes(device, out.data() + (o * whole.axis + begin) * whole.inner, dense.device(), dense.data() + o * row,
                   static_cast<std::size_t>(row) * sizeof(T));
      if (dense.device() != device) trace::sent(dense.device().index, trace::Traffic::outputs, dense.bytes());
      begin += part.shape()[axis];
    }
    return out;
  }
}

/// What stands for a ReplicaBackward where the forward pass was recorded: each operation is on the tape by itself.
struct RecordedReplicas {};

template <Scalar T, int Rank, Device D, class Back>
auto gather(const std::vector<Tensor<T, Rank, D>>& parts, int dim, D device, const Back&) {
  return gather_tensors(parts, dim, device);
}

template <Real T, int Rank, Device D>
auto gather(const std::vector<Variable<T, Rank, D>>& parts, int dim, D device, const RecordedReplicas&) {
  joined_shape(parts, dim);
  return gather_recorded(parts, dim, device).as_variable();
}
template <Real T, int Rank, Device D>
auto gather(const std::vector<GraphVariable<T, Rank, D>>& parts, int dim, D device, const RecordedReplicas&) {
  joined_shape(parts, dim);
  return gather_recorded(parts, dim, device);
}

template <Real T, int Rank, Device D>
auto gather(std::vector<Variable<T, Rank, D>> parts, int dim, D device, const Ref<ReplicaBackward>& backward) {
  std::vector<Tensor<T, Rank, D>> values;
  bool wanted = false;
  for (auto& part : parts) {
    // A parameter that the model returns gets its gradient with the others', in its copy's own backward pass.
    if (part.node() && part.node()->is_leaf()) part = reshape(part, part.shape());
    values.push_back(part.value());
    wanted = wanted || part.requires_grad();
  }
  auto value = gather_tensors(values, dim, device);
  constexpr int rank = decltype(value)::rank;
  if (!wanted) return Variable<T, rank, D>(std::move(value));
  Ref<GradNode<T, rank, D>> node(new GatherNode<T, rank, Rank, D>(value, dim, std::move(parts), backward));
  return Variable<T, rank, D>(std::move(value), std::move(node));
}

/// From Tensors alone come GraphVariables where a model computes with some by itself.
template <Real T, int Rank, Device D>
auto gather(const std::vector<GraphVariable<T, Rank, D>>& parts, int dim, D device,
            const Ref<ReplicaBackward>& backward) {
  return gather(std::vector<Variable<T, Rank, D>>(parts.begin(), parts.end()), dim, device, backward);
}

template <class Part, Device D, class Back>
auto gather(const std::vector<Part>& parts, int dim, D device, const Back& backward);

/// One member of all parts, picked by `pick(part)`, gathered.
template <class Part, class Pick, Device D, class Back>
auto gather_member(const std::vector<Part>& parts, const Pick& pick, int dim, D device, const Back& backward) {
  std::vector<std::remove_cvref_t<decltype(pick(parts.front()))>> list;
  for (const auto& part : parts) list.push_back(pick(part));
  return gather(list, dim, device, backward);
}

/// The same for one of a struct's `fields()`.
template <std::size_t At, class Part, Device D, class Back>
void gather_field(Part& out, std::vector<Part>& parts, int dim, D device, const Back& backward) {
  using Field = std::remove_cvref_t<std::tuple_element_t<At, decltype(out.fields())>>;
  static_assert(!holds_scalars<Field>,
                "DataParallel: a field of a struct that the model returns has no axes, where a number for each device "
                "would go: return a tuple in the struct's place, or give the field one axis, of size 1");
  if constexpr (holds_operands<Field> && !holds_scalars<Field>) {
    std::vector<Field> list;
    for (auto& part : parts) list.push_back(std::get<At>(part.fields()));
    std::get<At>(out.fields()) = gather(list, dim, device, backward);
  }
}

/// Tuples, pairs, arrays, vectors, maps, optionals and structs with `fields()` are gathered member by member; a struct
/// stays the same type, so that none of its fields may be a scalar, which becomes a vector: let it have an axis of size
/// 1. Of anything else all devices' values are returned, in a vector. Throws ShapeError where devices return vectors or
/// maps of different sizes, or some a value and others none.
template <class Part, Device D, class Back>
auto gather(const std::vector<Part>& parts, int dim, D device, const Back& backward) {
  if constexpr (IsTuple<Part> && (holds_operands<Part> || !is_array<Part>)) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return tuple_like<Part>(gather_member(
          parts, [](const Part& p) -> const auto& { return std::get<I>(p); }, dim, device, backward)...);
    }
    (std::make_index_sequence<std::tuple_size_v<Part>>{});
  } else if constexpr (is_vector<Part> && holds_operands<Part>) {
    for (const auto& part : parts)
      check<ShapeError>(part.size() == parts.front().size(), "DataParallel: replica ", &part - parts.data(),
                        " returned ", part.size(), " values where replica 0 returned ", parts.front().size());
    const auto member = [&](std::size_t at) {
      return gather_member(
          parts, [&](const Part& p) -> const auto& { return p[at]; }, dim, device, backward);
    };
    std::vector<decltype(member(0))> out;
    for (std::size_t i = 0; i < parts.front().size(); ++i) out.push_back(member(i));
    return out;
  } else if constexpr (is_map<Part> && holds_operands<Part>) {
    for (const auto& part : parts)
      for (const auto& [key, value] : parts.front())
        check<ShapeError>(part.size() == parts.front().size() && part.contains(key), "DataParallel: replica ",
                          &part - parts.data(), " returned a map with other keys than replica 0");
    const auto member = [&](const auto& key) {
      return gather_member(
          parts, [&](const Part& p) -> const auto& { return p.at(key); }, dim, device, backward);
    };
    map_like<Part, decltype(member(parts.front().begin()->first))> out;
    for (const auto& [key, value] : parts.front()) out.emplace(key, member(key));
    return out;
  } else if constexpr (is_optional<Part> && holds_operands<Part>) {
    for (const auto& part : parts)
      check<ShapeError>(
          part.has_value() == parts.front().has_value(), "DataParallel: replica ", &part - parts.data(),
          part ? " returned a value where replica 0 returned none" : " returned none where replica 0 returned a value");
    const auto member = [&] {
      return gather_member(
          parts, [](const Part& p) -> const auto& { return *p; }, dim, device, backward);
    };
    return parts.front() ? std::optional(member()) : std::optional<decltype(member())>();
  } else if constexpr (HasFields<Part>) {
    Part out = parts.front();
    std::vector<Part> copies = parts;  // of handles
    [&]<std::size_t... I>(std::index_sequence<I...>) { (gather_field<I>(out, copies, dim, device, backward), ...); }
    (std::make_index_sequence<std::tuple_size_v<decltype(out.fields())>>{});
    return out;
  } else {
    return parts;
  }
}

}  // namespace chorus::detail
