#pragma once
/// Cutting a batch into shares for several devices, and bringing the gradients of the shares back.

#include <algorithm>
#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/parallel/dp/nested.hpp>
#include <chorus/parallel/dp/recorded_copies.hpp>
#include <cstddef>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Where share `i` of `shares` begins among `count` samples: sizes differ by at most one, the first ones are larger.
constexpr Index share_begin(Index count, std::size_t shares, std::size_t i) {
  const auto n = static_cast<Index>(shares), at = static_cast<Index>(i);
  return at * (count / n) + std::min(at, count % n);
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
  [[maybe_unused]] const auto look = [&](const auto& x) {
    if (!is_scattered(x, dim)) return;
    const Index size = value_of(x).size(dim);
    check<ShapeError>(batch == -1 || batch == size, "inputs have ", batch, " and ", size, " samples along axis ", dim);
    batch = size;
  };
  (for_each_operand(inputs, look), ...);
  return batch == -1 ? 1 : batch;
}

/// How many samples a rank's inputs have: the size of the first of them that has the axis. Others, of any size, belong
/// to the samples or to the batch as a whole: a rank's model takes all as they are.
template <class... Inputs>
Index samples_of(int dim, const Inputs&... inputs) {
  std::optional<Index> samples;
  [[maybe_unused]] const auto look = [&](const auto& x) {
    if (!samples && is_scattered(x, dim)) samples = value_of(x).size(dim);
  };
  (for_each_operand(inputs, look), ...);
  return samples.value_or(1);
}

/// Share `i` of an argument, on `device`: of each tensor in it; all else as it is. A Variable that wants a gradient
/// becomes a leaf, whose gradient goes back later; where the forward pass is `Recorded`, a GraphVariable.
template <bool Recorded, class X, Device D>
decltype(auto) scatter(const X& x, int dim, std::size_t shares, std::size_t i, D device) {
  if constexpr (!holds_operands<X>) {
    return x;  // by reference
  } else if constexpr (IsTuple<X>) {
    return std::apply(
        [&](const auto&... members) { return tuple_like<X>(scatter<Recorded>(members, dim, shares, i, device)...); },
        x);
  } else if constexpr (is_vector<X>) {
    std::vector<std::remove_cvref_t<decltype(scatter<Recorded>(x.front(), dim, shares, i, device))>> out;
    for (const auto& element : x) out.push_back(scatter<Recorded>(element, dim, shares, i, device));
    return out;
  } else if constexpr (is_map<X>) {
    map_like<X, std::remove_cvref_t<decltype(scatter<Recorded>(x.begin()->second, dim, shares, i, device))>> out;
    for (const auto& [key, value] : x) out.emplace(key, scatter<Recorded>(value, dim, shares, i, device));
    return out;
  } else if constexpr (is_optional<X>) {
    std::optional<std::remove_cvref_t<decltype(scatter<Recorded>(*x, dim, shares, i, device))>> out;
    if (x) out.emplace(scatter<Recorded>(*x, dim, shares, i, device));
    return out;
  } else if constexpr (!Operand<X>) {
    X out = x;
    const auto cut = [&](auto& member) {
      if constexpr (holds_operands<decltype(member)>) member = scatter<Recorded>(member, dim, shares, i, device);
    };
    std::apply([&](auto&... members) { (cut(members), ...); }, out.fields());
    return out;
  } else if constexpr (Recorded && AnyVariable<X>) {
    if (!is_scattered(x, dim)) return copy_recorded(variable_of(x), device, trace::Traffic::inputs);
    const Index size = value_of(x).size(dim);
    return scatter_recorded(variable_of(x), dim, share_begin(size, shares, i), share_begin(size, shares, i + 1),
                            device);
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

/// Who runs backward on the replicas.
class ReplicaRunner {
 public:
  /// Of each replica, the outputs that have a gradient.
  using Roots = std::vector<std::vector<Ref<Node>>>;

  /// Adds to the parameters' gradients.
  virtual void backward(const Roots& roots, bool keep) = 0;
  /// The same without hooks, for those parameters that are not skipped.
  virtual void backward_to_wanted(const Roots& roots, bool keep) = 0;
  virtual void for_each_parameter(void (*visit)(Node&, void*), void* context) const = 0;

  ReplicaRunner() = default;
  ReplicaRunner(const ReplicaRunner&) = delete;
  virtual ~ReplicaRunner() = default;
  /// What is empty once this one is gone.
  std::weak_ptr<ReplicaRunner> living() const { return self_; }

 private:
  std::shared_ptr<ReplicaRunner> self_{this, [](ReplicaRunner*) {}};
};

/// Stands on the tape for everything that ran on the replicas: gathered outputs leave their gradients' shares with the
/// replicas' outputs, then this node runs backward on all replicas.
class ReplicaBackward final : public Node {
 public:
  ReplicaBackward(ReplicaRunner& runner, std::size_t replicas)
      : Node("data_parallel"), roots(replicas), runner_(runner.living()) {}

  void backward(bool keep) override {
    runner()->backward(roots, keep);
    go_on(keep);
  }
  void backward_to_wanted(bool keep) override {
    runner()->backward_to_wanted(roots, keep);
    go_on(keep);
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& input : inputs) visit(*input, context);
  }
  void for_each_far_leaf(void (*visit)(Node&, void*), void* context) const override {
    runner()->for_each_parameter(visit, context);
  }

  ReplicaRunner::Roots roots;
  std::vector<std::function<void()>> gradient_returns;  // from the replicas' inputs to the inputs
  std::vector<Ref<Node>> inputs;

 private:
  void go_on(bool keep) {
    for (auto& list : roots) list.clear();
    for (const auto& give_back : gradient_returns) give_back();
    if (!keep) {
      gradient_returns.clear();
      inputs.clear();
    }
  }
  std::shared_ptr<ReplicaRunner> runner() const {
    auto living = runner_.lock();
    check<UsageError>(living != nullptr, "backward: the DataParallel that made this output is gone; it has to outlive ",
                      "the losses made through it");
    return living;
  }
  std::weak_ptr<ReplicaRunner> runner_;
};

// Member I of a share that is a tuple, or a struct with fields.
template <std::size_t I>
struct PickMember {
  auto& operator()(auto& share) const { return std::get<I>(share); }
};
template <std::size_t I>
struct PickField {
  auto& operator()(auto& share) const { return std::get<I>(share.fields()); }
};

/// Hands the gradients by the replicas' shares of an input back to the input: of each Variable in it. `shares` are what
/// `scatter` has made of `x` for each device.
template <class X, class Share>
void return_gradient(const X& x, int dim, const std::vector<Share*>& shares, ReplicaBackward& backward) {
  const auto member = [&](const auto& inner, const auto& pick) {
    std::vector<std::remove_reference_t<decltype(pick(*shares.front()))>*> list;
    for (Share* share : shares) list.push_back(&pick(*share));
    return_gradient(inner, dim, list, backward);
  };
  if constexpr (!holds_operands<X> || AnyTensor<X>) {
    return;
  } else if constexpr (IsTuple<X>) {
    [&]<std::size_t... I>(std::index_sequence<I...>) { (member(std::get<I>(x), PickMember<I>{}), ...); }
    (std::make_index_sequence<std::tuple_size_v<X>>{});
  } else if constexpr (is_vector<X>) {
    for (std::size_t i = 0; i < x.size(); ++i)
      member(
          x[i], [i](auto& share) -> auto& { return share[i]; });
  } else if constexpr (is_map<X>) {
    for (const auto& [key, value] : x)
      member(
          value, [&key = key](auto& share) -> auto& { return share.at(key); });
  } else if constexpr (is_optional<X>) {
    if (x)
      member(
          *x, [](auto& share) -> auto& { return *share; });
  } else if constexpr (!AnyVariable<X>) {
    X copy = x;
    const auto fields = copy.fields();
    [&]<std::size_t... I>(std::index_sequence<I...>) { (member(std::get<I>(fields), PickField<I>{}), ...); }
    (std::make_index_sequence<std::tuple_size_v<std::remove_const_t<decltype(fields)>>>{});
  } else {
    const auto node = node_of(x);
    if (!node || !grad_enabled()) return;
    std::vector<Share> leaves;
    for (const Share* share : shares) leaves.push_back(*share);
    backward.inputs.push_back(node);
    backward.gradient_returns.push_back([node, dim, leaves = std::move(leaves), cut = is_scattered(x, dim)] {
      const auto whole = around_axis(node->shape(), cut ? static_cast<std::size_t>(dim) : 0);
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        if (!leaves[i].grad().defined()) continue;
        const auto part = on_device(leaves[i].grad(), node->device(), trace::Traffic::inputs);
        leaves[i].zero_grad();
        if (node->skipped()) continue;
        if (!cut) {
          node->add(part);
          continue;
        }
        const bool fresh = !node->has_grad();
        const auto target = node->target();
        if (fresh) zero_bytes(node->device(), target.data(), target.grad.bytes());
        kernels::put_block(node->device(), whole, share_begin(whole.axis, leaves.size(), i), part.size(dim),
                           part.data(), target.data(), true);
      }
    });
  }
}

}  // namespace chorus::detail
