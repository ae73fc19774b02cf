#pragma once
/// grad: returns gradients w.r.t. chosen values and accumulates nothing (PyTorch's torch.autograd.grad).

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus {

/// Options of grad.
struct GradOptions {
  /// Record the computation of the gradients, so that they can be differentiated again. For GraphVariables: see
  /// <chorus/ops/higher_order.hpp>.
  bool create_graph = false;
  /// Keep saved tensors, so that backward or grad can run again. Unset: as `create_graph`.
  std::optional<bool> retain_graph = {};
  /// Return an undefined gradient for an input that the value does not depend on, instead of an error.
  bool allow_unused = false;
};

namespace detail {

/// The part of the tape between a value and the chosen inputs. While it lives, branches that lead to no input are
/// skipped.
class GradPath {
 public:
  GradPath(const Ref<Node>& root, const std::vector<Node*>& inputs, bool allow_unused)
      : inputs_(inputs.begin(), inputs.end()) {
    check<UsageError>(inputs_.size() == inputs.size() && !inputs_.contains(nullptr),
                      "grad: expected different inputs that require a gradient; one does not, or appears twice");
    add(*root);
    const Node* freed = nullptr;
    for (std::size_t next = 0; next < nodes_.size(); ++next) {
      Node& node = *nodes_[next];
      any_input_ = false;
      for_each_behind(
          node, [](Node& input, void* path) { static_cast<GradPath*>(path)->add(input); }, this);
      if (!any_input_ && !node.is_leaf()) freed = &node;
    }
    for (const Node* input : inputs_) {
      if (known_.contains(input) || allow_unused) continue;
      check<UsageError>(freed == nullptr, "grad: the graph behind '", freed == nullptr ? "" : freed->operation(),
                        "' was freed by an earlier backward; pass retain_graph = true to that one");
      fail_unused();
    }
    std::sort(nodes_.begin(), nodes_.end(),
              [](const Ref<Node>& a, const Ref<Node>& b) { return a->sequence() > b->sequence(); });
    // From the first recorded to the last: an operation leads to an input if one of its own inputs is on the path.
    for (std::size_t i = nodes_.size(); i-- > 0;) {
      struct Search {
        const GradPath* path;
        bool found;
      } search{this, false};
      for_each_behind(
          *nodes_[i],
          [](Node& input, void* context) {
            auto& s = *static_cast<Search*>(context);
            s.found = s.found || s.path->contains(input);
          },
          &search);
      if (search.found) through_.insert(nodes_[i].get());
    }
    for (const auto& node : nodes_)
      check<UsageError>(
          !leads_on(*node) || node->only_to_inputs(), "grad: '", node->operation(),
          "' adds gradients to parameters itself; call grad inside the function that it runs, or call backward");
    // Only direct inputs: nodes behind them may be on another thread's path.
    for (const auto& node : nodes_)
      if (leads_on(*node))
        for_each_behind(
            *node, [](Node& input, void* path) { static_cast<GradPath*>(path)->skip(input); }, this);
  }
  ~GradPath() {
    for (const auto& node : skipped_) node->set_skipped(false);
  }
  GradPath(const GradPath&) = delete;
  GradPath& operator=(const GradPath&) = delete;

  /// All nodes, the last recorded first.
  const std::vector<Ref<Node>>& nodes() const { return nodes_; }
  bool is_input(const Node& node) const { return inputs_.contains(&node); }
  /// Whether an input lies behind this node.
  bool leads_on(const Node& node) const { return through_.contains(&node); }
  bool contains(const Node& node) const { return is_input(node) || leads_on(node); }
  [[noreturn, gnu::cold]] static void fail_unused() {
    fail<UsageError>(
        "grad: the value does not depend on one of the inputs; with allow_unused its gradient is undefined");
  }

 private:
  static void for_each_behind(const Node& node, void (*visit)(Node&, void*), void* context) {
    node.for_each_input(visit, context);
    node.for_each_far_leaf(visit, context);
  }
  void add(Node& node) {
    any_input_ = true;
    if (known_.insert(&node).second) nodes_.emplace_back(&node);
  }

  void skip(Node& node) {
    if (contains(node) || node.skipped()) return;
    node.set_skipped(true);
    skipped_.emplace_back(&node);
  }

  std::vector<Ref<Node>> nodes_, skipped_;
  std::unordered_set<const Node*> known_, inputs_, through_;
  bool any_input_ = false;
};

/// Sets an input's accumulated gradient aside while `grad` runs, and restores it.
template <class N>
class Divert {
 public:
  Divert(const Ref<N>& node) : node_(node), held_(node->exchange_grad({})) {}
  ~Divert() { node_->exchange_grad(std::move(held_)); }
  Divert(const Divert&) = delete;
  Divert& operator=(const Divert&) = delete;

 private:
  Ref<N> node_;
  typename N::Held held_;
};

template <class T, class D, class... Nodes>
auto grad_tensors(const Variable<T, 0, D>& value, const GradOptions& options, const Ref<Nodes>&... nodes) {
  check<UsageError>(value.requires_grad(), "grad: nothing behind the value requires a gradient");
  const GradPath path(value.node(), {nodes.get()...}, options.allow_unused);
  const std::tuple<Divert<Nodes>...> diverted{nodes...};
  std::tuple<typename Nodes::tensor_type...> gradients;
  if (path.contains(*value.node())) value.node()->add(Tensor<T, 0, D>::full({}, T{1}, value.device()));
  const NoGrad no_grad;
  for (const Ref<Node>& node : path.nodes()) {
    if (path.is_input(*node)) {
      const auto take = [&](auto& gradient, const auto& input) {
        if (node.get() == input.get()) gradient = input->grad();
      };
      std::apply([&](auto&... gradient) { (take(gradient, nodes), ...); }, gradients);
    }
    if (path.leads_on(*node)) node->backward_to_wanted(options.retain_graph.value_or(options.create_graph));
  }
  // Only now it is known whether a far leaf got a gradient.
  const bool all = std::apply([](const auto&... gradient) { return (gradient.defined() && ...); }, gradients);
  if (!all && !options.allow_unused) GradPath::fail_unused();
  return gradients;
}

}  // namespace detail

/// The gradients of `value`, a scalar, w.r.t. `inputs`, a tuple of Variables and Parameters, leaves or not. Returns a
/// tuple of Tensors. Does not change any `grad()` and runs no hooks. For a non-scalar value use `sum(value * seed)`.
/// Throws UsageError if an input requires no gradient, or if the value does not depend on it (see `allow_unused`).
///   const auto [dx, dw] = ch::grad(loss, std::tie(x, layer.weight));
template <AnyVariable Y, class... Inputs>
auto grad(const Y& value, const std::tuple<Inputs...>& inputs, const GradOptions& options = {}) {
  static_assert(tensor_of<Y>::rank == 0, "grad: expected a scalar; of another value take sum(value * seed)");
  check<UsageError>(!options.create_graph, "grad: create_graph is for GraphVariables: begin the computation with ",
                    "GraphVariable(x), of <chorus/ops/higher_order.hpp>");
  return std::apply([&](const auto&... x) { return detail::grad_tensors(value, options, node_of(x)...); }, inputs);
}
/// The same for one input; returns a Tensor.
template <AnyVariable Y, AnyVariable X>
auto grad(const Y& value, const X& input, const GradOptions& options = {}) {
  return std::get<0>(grad(value, std::tie(input), options));
}

}  // namespace chorus
