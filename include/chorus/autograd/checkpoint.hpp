#pragma once
/// Activation checkpointing (Chen, Xu, Zhang, Guestrin 2016): memory for time. What a part of a model computes is
/// forgotten and computed again when backward needs it.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/random.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI {

namespace detail {

/// The random numbers of a part of a forward pass, to be drawn again.
class RandomReplay {
 public:
  RandomReplay() : outer_(random_context()) {
    if (outer_ != nullptr) {
      context_ = *outer_;
      // Asked for once, while its answer holds; not at all if no random operation asks.
      if (context_.first_sample)
        context_.first_sample = [ask = context_.first_sample, known = std::optional<std::int64_t>()]() mutable {
          if (!known) known = ask();
          return *known;
        };
    } else {
      constexpr std::uint32_t outside_of_policies = 0x80000000u;
      context_ = {.seed = initial_seed(),
                  .step = next_random_stream(),
                  .next_operation = outside_of_policies,
                  .first_sample = {}};
    }
    start_ = context_.next_operation;
  }
  /// Runs the part, each time with the same numbers.
  template <class Function>
  auto run(const Function& function) {
    context_.next_operation = start_;
    context_.passes = &passes_;
    passes_.rewind(outer_ != nullptr ? outer_->passes : nullptr);
    const RandomScope scope(context_);
    return function();
  }
  /// After the first run: the rest of the pass goes on behind it.
  void leave() {
    if (outer_ != nullptr) outer_->next_operation = context_.next_operation;
    outer_ = nullptr;
  }

 private:
  RandomContext* outer_;
  RandomContext context_;
  std::uint32_t start_ = 0;
  PassNumbers passes_;
};

template <Operand X>
auto fresh_leaf(const X& x) {
  if constexpr (AnyTensor<X>)
    return x;
  else
    return Variable(value_of(x), static_cast<bool>(node_of(x)));
}

/// The leaves behind a value, recorded after `start`, that existed then. Throws UsageError where it was made from an
/// older one.
inline std::vector<Ref<Node>> older_leaves(const Ref<Node>& root, std::uint64_t start) {
  struct Walk {
    std::vector<Ref<Node>> nodes, leaves;
    std::unordered_set<const Node*> known;
  } walk;
  walk.nodes.push_back(root);
  for (std::size_t next = 0; next < walk.nodes.size(); ++next) {
    const auto node = walk.nodes[next];
    if (node->is_leaf()) {
      if (node->sequence() < start) walk.leaves.push_back(node);
      continue;
    }
    check<UsageError>(node->sequence() > start, "checkpoint: the function uses what '", node->operation(),
                      "' has recorded before it; give that as an input");
    const auto see = [](Node& input, void* context) {
      auto& w = *static_cast<Walk*>(context);
      if (w.known.insert(&input).second) w.nodes.emplace_back(&input);
    };
    node->for_each_input(see, &walk);
    node->for_each_far_leaf(see, &walk);
  }
  return std::move(walk.leaves);
}

template <class Function, class T, int Rank, class D, class... Inputs>
class CheckpointNode final : public GradNode<T, Rank, D> {
 public:
  CheckpointNode(const Tensor<T, Rank, D>& value, Function function, RandomReplay random,
                 std::vector<Ref<Node>> parameters, const Inputs&... inputs)
      : GradNode<T, Rank, D>("checkpoint", value.shape(), value.device()),
        saved_(std::in_place,
               Saved{std::move(function), std::move(random), {inputs...}, std::move(parameters), batch_group()}) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(saved_.has_value(), "backward: the graph behind 'checkpoint' was freed by an earlier backward; ",
                      "pass retain_graph = true to that one");
    const auto dy = this->take_grad();
    const auto leaves = std::apply([](const auto&... x) { return std::tuple{fresh_leaf(x)...}; }, saved_->inputs);
    {
      const GradMode recording(true);
      const auto& group = saved_->group;
      const BatchGroupScope scope(group && group->is_here() ? group : nullptr);
      const auto again = saved_->random.run([&] { return std::apply(saved_->function, leaves); });
      check<UsageError>(again.requires_grad() && again.shape() == dy.shape(), "checkpoint: the function gave shape ",
                        dy.shape(), " at first and then shape ", again.shape());
      again.node()->add(dy);
      const Ref<Node> root = again.node();
      run_backward({&root, 1}, {.hooks = false});
    }
    [&]<std::size_t... I>(std::index_sequence<I...>) { (give(std::get<I>(leaves), std::get<I>(saved_->inputs)), ...); }
    (std::index_sequence_for<Inputs...>{});
    if (!keep) saved_.reset();
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    if (!saved_) return;
    const auto see = [&](const auto& x) {
      if (const auto node = node_of(x)) visit(*node, context);
    };
    std::apply([&](const auto&... x) { (see(x), ...); }, saved_->inputs);
    for (const auto& parameter : saved_->parameters) visit(*parameter, context);
  }
  bool only_to_inputs() const override { return false; }

 private:
  template <class Leaf, class Input>
  static void give(const Leaf& leaf, const Input& input) {
    if constexpr (!AnyTensor<Leaf>)
      if (leaf.requires_grad() && leaf.grad().defined()) node_of(input)->add(leaf.grad());
  }

  struct Saved {
    Function function;
    RandomReplay random;
    std::tuple<Inputs...> inputs;
    std::vector<Ref<Node>> parameters;
    std::shared_ptr<BatchGroup> group;
  };
  std::optional<Saved> saved_;
};

}  // namespace detail

/// `function(inputs...)`, a Variable, of which only the inputs and the result are kept: backward runs it a second time,
/// with the same random numbers, to have what lies between. Parameters that the function uses get their gradients as
/// ever. Other recorded values must be inputs; what the function refers to must live until backward. A batch norm
/// inside it sees its batch twice. Throws UsageError for a value that is no input.
///   for (const auto& block : blocks) x = ch::checkpoint([&](const auto& in) { return block(in); }, x);
template <class Function, Operand... Inputs>
auto checkpoint(const Function& function, const Inputs&... inputs) {
  const auto start = Node::next_sequence();
  const std::tuple leaves{detail::fresh_leaf(inputs)...};
  detail::RandomReplay random;
  const auto value = random.run([&] { return std::apply(function, leaves); });
  random.leave();
  using Output = std::remove_const_t<decltype(value)>;
  static_assert(AnyVariable<Output>, "checkpoint: the function returns one Variable");
  if (!value.requires_grad()) return Output(value.value());
  auto parameters = detail::older_leaves(value.node(), start);
  using T = typename Output::value_type;
  using D = typename Output::device_type;
  using Made = detail::CheckpointNode<Function, T, Output::rank, D, Inputs...>;
  return Output(value.value(), Ref<GradNode<T, Output::rank, D>>(new Made(value.value(), function, std::move(random),
                                                                          std::move(parameters), inputs...)));
}

}  // namespace chorus::inline CHORUS_ABI
