#pragma once
/// Activation checkpointing (Chen, Xu, Zhang, Guestrin 2016) trades time for memory: activations of a part of the model
/// are dropped and recomputed in backward.

#include <chorus/autograd/parameter.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/core/shared_places.hpp>
#include <chorus/core/tensor_group.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {

/// Replays a part of a forward pass: its random numbers and what its layers recorded in the first run.
class PassReplay {
 public:
  PassReplay() : outer_(random_context()), outer_run_(first_run) {
    if (outer_ != nullptr) {
      context_ = *outer_;
      // Asked at most once, in the first run, while the answer is valid.
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
  /// Runs the part with the same random numbers each time.
  template <class Function>
  auto run(const Function& function) {
    context_.next_operation = start_;
    context_.passes = &passes_;
    passes_.rewind(outer_ != nullptr ? outer_->passes : nullptr);
    const RandomScope scope(context_);
    findings_.begin(outer_run_, ran_);
    const FirstRunScope run_scope(findings_);
    return function();
  }
  /// After the first run: the pass continues with the random numbers after the part's.
  void leave() {
    if (outer_ != nullptr) {
      outer_->next_operation = context_.next_operation;
      outer_->drew = context_.drew;
    }
    context_.is_share = nullptr;  // already asked; during backward the batch may be another one
    outer_ = nullptr;
    outer_run_ = nullptr;
    ran_ = true;
  }

 private:
  RandomContext* outer_;
  FirstRun* outer_run_;
  FirstRun findings_;
  bool ran_ = false;
  RandomContext context_;
  std::uint32_t start_ = 0;
  PassNumbers passes_;
};

/// The parameters that a part of a forward pass uses, with their versions: recomputation needs the same values.
class SeenParameters final : public ParameterWatch {
 public:
  SeenParameters() : outer_(std::exchange(parameter_watch, this)) {}
  SeenParameters(const SeenParameters&) = delete;
  SeenParameters& operator=(const SeenParameters&) = delete;
  ~SeenParameters() { parameter_watch = outer_; }

  void saw(const void* parameter, Node& node, std::span<const Index> extents, bool wants_grad) override {
    if (outer_ != nullptr) outer_->saw(parameter, node, extents, wants_grad);
    for (const auto& known : list)
      if (known.node.get() == &node) return;
    list.push_back({Ref<Node>(&node), node.numbers_version()});
  }

  struct Seen {
    Ref<Node> node;
    std::uint64_t version;
  };
  std::vector<Seen> list;

 private:
  ParameterWatch* outer_;
};

template <Operand X>
auto fresh_leaf(const X& x) {
  if constexpr (AnyTensor<X>)
    return x;
  else
    return Variable(value_of(x), static_cast<bool>(node_of(x)));
}

/// The leaves behind a value recorded after `start` that are older than `start`. Throws UsageError if the value depends
/// on an older operation.
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
    check<UsageError>(node->sequence() > start, "checkpoint: the function uses a value that '", node->operation(),
                      "' recorded before it; pass it as an input");
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
  CheckpointNode(const Tensor<T, Rank, D>& value, Function function, PassReplay random,
                 std::vector<Ref<Node>> parameters, std::vector<SeenParameters::Seen> seen, const Inputs&... inputs)
      : GradNode<T, Rank, D>("checkpoint", value.shape(), value.device()),
        saved_(std::in_place,
               Saved{std::move(function), std::move(random), {inputs...}, std::move(parameters), std::move(seen),
                     batch_group(), tensor_group(), places_here()}) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(saved_.has_value(), "backward: the graph behind 'checkpoint' was freed by an earlier backward; ",
                      "pass retain_graph = true to that one");
    for (const auto& [node, version] : saved_->seen) {
      const auto now = node->numbers_version();
      check<UsageError>(now == version, "backward of 'checkpoint': it must compute again with '", node->numbers_name(),
                        "' as it was in the forward pass, at version ", version,
                        ", but it has been written since, and is at version ", now,
                        ": call backward before an optimizer steps or numbers are assigned");
    }
    const auto dy = this->take_grad();
    const auto leaves = std::apply([](const auto&... x) { return std::tuple{fresh_leaf(x)...}; }, saved_->inputs);
    {
      const GradMode recording(true);
      const auto& group = saved_->group;
      const BatchGroupScope scope(group && group->is_here() ? group : nullptr);
      const TensorGroupScope layers(saved_->layers);
      const SharedPlacesScope places(saved_->places.get());
      const auto again = saved_->random.run([&] { return std::apply(saved_->function, leaves); });
      check<UsageError>(again.requires_grad() && again.shape() == dy.shape(),
                        "checkpoint: the function returned shape ", dy.shape(), " and then ", again.shape());
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
    PassReplay random;
    std::tuple<Inputs...> inputs;
    std::vector<Ref<Node>> parameters;
    std::vector<SeenParameters::Seen> seen;
    std::shared_ptr<BatchGroup> group;
    std::shared_ptr<TensorGroup> layers;  // the ranks that share them
    std::shared_ptr<SharedPlaces> places;  // and the tokens of each sample
  };
  std::optional<Saved> saved_;
};

}  // namespace detail

/// Computes `function(inputs...)`, a Variable, but keeps only the inputs and the result. Backward runs the function
/// again with the same random numbers to recompute the rest. Parameters that the function uses get their gradients as
/// usual. Other recorded values must be inputs. Objects that the function references must live until backward. The
/// second run is in training or evaluation mode as the first was, and batch norm counts its batch once. A user's layer
/// that changes buffers asks `is_recomputed`. Throws UsageError for a recorded value that is no input, and in backward
/// if a parameter was written in between.
///   for (const auto& block : blocks) x = ch::checkpoint([&](const auto& in) { return block(in); }, x);
template <class Function, Operand... Inputs>
auto checkpoint(const Function& function, const Inputs&... inputs) {
  const auto start = Node::next_sequence();
  const std::tuple leaves{detail::fresh_leaf(inputs)...};
  detail::PassReplay random;
  std::vector<detail::SeenParameters::Seen> seen;
  const auto value = random.run([&] {
    detail::SeenParameters watch;
    auto made = std::apply(function, leaves);
    seen = std::move(watch.list);
    return made;
  });
  random.leave();
  using Output = std::remove_const_t<decltype(value)>;
  static_assert(AnyVariable<Output>, "checkpoint: the function returns one Variable");
  if (!value.requires_grad()) return Output(value.value());
  auto parameters = detail::older_leaves(value.node(), start);
  using T = typename Output::value_type;
  using D = typename Output::device_type;
  using Made = detail::CheckpointNode<Function, T, Output::rank, D, Inputs...>;
  Ref<GradNode<T, Output::rank, D>> node(new Made(value.value(), function, std::move(random), std::move(parameters),
                                                  std::move(seen), inputs...));
  node->take_mean(*value.node());  // for functions that return a loss
  return Output(value.value(), std::move(node));
}

}  // namespace chorus
