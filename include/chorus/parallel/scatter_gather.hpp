#pragma once
/// Cutting a batch into shares for several devices, and joining what comes back, in both directions of the tape.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus::inline CHORUS_ABI::detail {

/// Where share `i` of `shares` begins among `count` samples: sizes differ by at most one, the first ones are larger.
constexpr Index share_begin(Index count, std::size_t shares, std::size_t i) {
  const auto n = static_cast<Index>(shares), at = static_cast<Index>(i);
  return at * (count / n) + std::min(at, count % n);
}

/// A dense copy of `x` on `device`; `x` itself where it is one already.
template <Scalar T, int Rank, Device From, Device D>
Tensor<T, Rank, D> on_device(const Tensor<T, Rank, From>& x, D device, trace::Traffic traffic) {
  const auto dense = contiguous(x);
  if constexpr (std::is_same_v<From, D>)  // what comes from the host is no traffic between devices
    if (dense.device() != device) trace::sent(dense.device().index, traffic, dense.bytes());
  return to_device(dense, device);
}

/// Whether an argument is cut up: a Tensor or Variable that has the axis. Others go to every replica as they are.
template <class X>
bool is_scattered(const X& x, int dim) {
  if constexpr (Operand<X>)
    return dim < static_cast<int>(value_of(x).shape().size());
  else
    return false;
}

/// The size that all scattered arguments have along `dim`; 1 where there are none. Throws ShapeError where they differ.
template <class... Inputs>
Index batch_size(int dim, const Inputs&... inputs) {
  Index batch = -1;
  const auto look = [&](const auto& x) {
    if constexpr (Operand<decltype(x)>) {
      if (!is_scattered(x, dim)) return;
      const Index size = value_of(x).size(dim);
      check<ShapeError>(batch == -1 || batch == size, "DataParallel: inputs have ", batch, " and ", size,
                        " samples along axis ", dim);
      batch = size;
    }
  };
  (look(inputs), ...);
  return batch == -1 ? 1 : batch;
}

/// Share `i` of an argument, on `device`. A Variable that wants a gradient becomes a leaf, whose gradient goes back later.
template <class X, Device D>
decltype(auto) scatter(const X& x, int dim, std::size_t shares, std::size_t i, D device) {
  if constexpr (!Operand<X>) {
    return x;  // by reference
  } else {
    const auto share = [&] {
      const auto& whole = value_of(x);
      if (!is_scattered(x, dim)) return on_device(whole, device, trace::Traffic::inputs);
      const Index size = whole.size(dim);
      return on_device(whole.slice(dim, share_begin(size, shares, i), share_begin(size, shares, i + 1)), device,
                       trace::Traffic::inputs);
    }();
    if constexpr (AnyTensor<X>)
      return share;
    else
      return Variable(share, static_cast<bool>(node_of(x)) && grad_enabled());
  }
}

/// Stands on the tape for everything that ran on the replicas: gathered outputs leave their gradients' shares with the
/// replicas' outputs, then this node runs backward on all replicas.
class ReplicaBackward final : public Node {
 public:
  using Roots = std::vector<std::vector<Ref<Node>>>;

  explicit ReplicaBackward(std::size_t replicas) : Node("data_parallel"), roots(replicas) {}

  void backward(bool keep) override {
    run(roots, keep);
    for (auto& list : roots) list.clear();
    for (const auto& give_back : gradient_returns) give_back();
    if (!keep) {
      gradient_returns.clear();
      inputs.clear();
    }
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& input : inputs) visit(*input, context);
  }
  bool only_to_inputs() const override { return false; }

  Roots roots;                                              // of each replica, the outputs that have a gradient
  std::function<void(const Roots&, bool keep)> run;         // backward on all replicas
  std::vector<std::function<void()>> gradient_returns;      // from the replicas' inputs to the inputs
  std::vector<Ref<Node>> inputs;
};

/// Hands the gradients by the replicas' shares of an input back to the input.
template <class X, class Share>
void return_gradient(const X& x, int dim, std::vector<Share> shares, ReplicaBackward& backward) {
  if constexpr (AnyVariable<X>) {
    const auto node = node_of(x);
    if (!node || !grad_enabled()) return;
    backward.inputs.push_back(node);
    backward.gradient_returns.push_back([node, dim, shares = std::move(shares), cut = is_scattered(x, dim)] {
      const auto whole = around_axis(node->shape(), cut ? static_cast<std::size_t>(dim) : 0);
      for (std::size_t i = 0; i < shares.size(); ++i) {
        if (!shares[i].grad().defined()) continue;
        const auto part = on_device(shares[i].grad(), node->device(), trace::Traffic::inputs);
        shares[i].zero_grad();
        if (!cut) {
          node->add(part);
          continue;
        }
        const bool fresh = !node->has_grad();
        const auto target = node->target();
        if (fresh) zero_bytes(node->device(), target.data(), target.grad.bytes());
        kernels::put_block(node->device(), whole, share_begin(whole.axis, shares.size(), i), part.size(dim), part.data(),
                           target.data(), true);
      }
    });
  }
}

/// A gathered output's node.
template <Real T, int Rank, int PartRank, Device D>
class GatherNode final : public GradNode<T, Rank, D> {
 public:
  GatherNode(const Tensor<T, Rank, D>& value, int dim, std::vector<Variable<T, PartRank, D>> parts, Ref<ReplicaBackward> backward)
      : GradNode<T, Rank, D>("gather", value.shape(), value.device()),
        dim_(dim),
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

/// Joins tensors of several devices along `dim` on one of them; scalars become a vector.
template <Scalar T, int Rank, Device D>
auto gather_tensors(const std::vector<Tensor<T, Rank, D>>& parts, int dim, D device) {
  if constexpr (Rank == 0) {
    auto out = Tensor<T, 1, D>::empty({static_cast<Index>(parts.size())}, device);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      copy_bytes(device, out.data() + i, parts[i].device(), parts[i].data(), sizeof(T));
      if (parts[i].device() != device) trace::sent(parts[i].device().index, trace::Traffic::outputs, sizeof(T));
    }
    return out;
  } else {
    if (parts.size() == 1) return on_device(parts.front(), device, trace::Traffic::outputs);
    const auto axis = normalize_axis("DataParallel", dim, Rank);
    auto shape = parts.front().shape();
    for (std::size_t i = 1; i < parts.size(); ++i) {
      auto expected = parts.front().shape();
      expected[axis] = parts[i].shape()[axis];
      check<ShapeError>(parts[i].shape() == expected, "DataParallel: replica ", i, "'s output of shape ", parts[i].shape(),
                        " can't be joined to replica 0's of shape ", parts.front().shape(), " along axis ", dim);
      shape[axis] += expected[axis];
    }
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

template <Scalar T, int Rank, Device D>
auto gather(const std::vector<Tensor<T, Rank, D>>& parts, int dim, D device, const Ref<ReplicaBackward>&) {
  return gather_tensors(parts, dim, device);
}

template <Real T, int Rank, Device D>
auto gather(const std::vector<Variable<T, Rank, D>>& parts, int dim, D device, const Ref<ReplicaBackward>& backward) {
  std::vector<Tensor<T, Rank, D>> values;
  bool wanted = false;
  for (const auto& part : parts) {
    values.push_back(part.value());
    wanted = wanted || part.requires_grad();
  }
  auto value = gather_tensors(values, dim, device);
  constexpr int rank = decltype(value)::rank;
  if (!wanted) return Variable<T, rank, D>(std::move(value));
  Ref<GradNode<T, rank, D>> node(new GatherNode<T, rank, Rank, D>(value, dim, parts, backward));
  return Variable<T, rank, D>(std::move(value), std::move(node));
}

/// Tuples are gathered member by member.
template <class... Members, Device D>
auto gather(const std::vector<std::tuple<Members...>>& parts, int dim, D device, const Ref<ReplicaBackward>& backward) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto member = [&]<std::size_t At>(std::integral_constant<std::size_t, At>) {
      std::vector<std::tuple_element_t<At, std::tuple<Members...>>> list;
      for (const auto& part : parts) list.push_back(std::get<At>(part));
      return gather(list, dim, device, backward);
    };
    return std::tuple(member(std::integral_constant<std::size_t, I>{})...);
  }(std::index_sequence_for<Members...>{});
}

}  // namespace chorus::inline CHORUS_ABI::detail
