#pragma once
/// How backward walks.

#include <algorithm>
#include <atomic>
#include <chorus/autograd/tape.hpp>
#include <chorus/core/error.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {
/// What is to be done when the backward run of this thread has ended; null outside of one.
inline std::vector<std::function<void()>>*& backward_end_actions() {
  thread_local std::vector<std::function<void()>>* actions = nullptr;
  return actions;
}
/// Runs a node and throws NonFiniteError where what it sends to an input is not finite.
[[gnu::noinline, gnu::cold]] inline void backward_with_checks(Node& node, bool keep) {
  check<NonFiniteError>(node.gradient_is_finite(), "anomaly: a NaN or an infinity in the gradient by the output of '",
                        node.operation(), "': that with which backward began, or what a hook made of it");
  std::vector<Ref<Node>> inputs;
  node.for_each_input([](Node& input, void* list) { static_cast<std::vector<Ref<Node>>*>(list)->emplace_back(&input); },
                      &inputs);
  node.backward(keep);
  for (const auto& input : inputs)
    check<NonFiniteError>(input->gradient_is_finite(), "anomaly: backward of '", node.operation(),
                          "' made a NaN or an infinity in the gradient by what '", input->operation(), "' gave it");
}
}  // namespace detail

CHORUS_INLINE void at_backward_end(std::function<void()> action) {
  auto* actions = detail::backward_end_actions();
  check<UsageError>(actions != nullptr, "at_backward_end: no backward is running in this thread");
  actions->push_back(std::move(action));
}

CHORUS_INLINE void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options) {
  static std::atomic<std::uint64_t> runs{0};
  const std::uint64_t run = runs.fetch_add(1, std::memory_order_relaxed) + 1;

  // Nested runs (DataParallel's replicas) use lists of their own; all are kept for the next run.
  struct Lists {
    std::vector<Ref<Node>> nodes;
    std::vector<Node*> final_leaves, final_far_leaves;
    struct Count {
      Ref<Node> node;
      int pending;
      bool reached;
    };
    std::vector<Count> outer_counts;  // what the run around this one still waits for
    std::uint64_t run = 0;
    bool count = true, nested = false;

    void count_anew(Node& node) {
      if (nested) outer_counts.push_back({Ref<Node>(&node), node.pending_, node.reached_});
      node.pending_ = 0;
      node.reached_ = false;
    }
  };
  thread_local std::vector<std::unique_ptr<Lists>> spare;
  if (spare.empty()) spare.push_back(std::make_unique<Lists>());
  struct Borrowed {
    std::unique_ptr<Lists> lists;
    ~Borrowed() {
      lists->nodes.clear();
      lists->final_leaves.clear();
      lists->final_far_leaves.clear();
      for (auto& [node, pending, reached] : lists->outer_counts) {
        node->pending_ = pending;
        node->reached_ = reached;
      }
      lists->outer_counts.clear();
      spare.push_back(std::move(lists));
    }
  } borrowed{std::move(spare.back())};
  spare.pop_back();
  Lists& lists = *borrowed.lists;
  lists.run = run;
  lists.count = options.hooks;
  lists.nested = detail::backward_end_actions() != nullptr;

  for (const auto& root : roots) {
    if (root->visited_by_ == run) continue;
    root->visited_by_ = run;
    if (lists.count) lists.count_anew(*root);
    lists.nodes.push_back(root);
  }
  for (std::size_t next = 0; next < lists.nodes.size(); ++next) {
    const auto find = [](Node& input, void* context) {
      auto& found = *static_cast<Lists*>(context);
      if (input.visited_by_ != found.run) {
        input.visited_by_ = found.run;
        if (found.count) found.count_anew(input);
        found.nodes.emplace_back(&input);
      }
      if (found.count) ++input.pending_;
    };
    const Node& node = *lists.nodes[next];
    node.for_each_input(find, &lists);
    if (lists.count) node.for_each_far_leaf(find, &lists);
  }
  std::sort(lists.nodes.begin(), lists.nodes.end(),
            [](const Ref<Node>& a, const Ref<Node>& b) { return a->sequence() > b->sequence(); });

  // Where an operator's backward runs another one, gradients are not complete before the outermost has ended.
  std::vector<std::function<void()>> actions;
  struct Scope {
    std::vector<std::function<void()>>* outer;
    ~Scope() { detail::backward_end_actions() = outer; }
  } scope{detail::backward_end_actions()};
  if (!lists.nested) detail::backward_end_actions() = &actions;

  const NoGrad no_grad;
  if (options.hooks)
    for (const auto& root : roots)
      if (root->is_leaf() && root->pending_ == 0) root->gradient_is_final();
  for (Ref<Node>& node : lists.nodes) {
    if (node->is_leaf()) {
      if (!lists.count) node->set_reached();  // in the run around this one
      continue;
    }
    if (node->gradient_hooks_) node->run_gradient_hooks();
    // Counted before the node runs, since it then forgets its inputs.
    if (lists.count) {
      node->for_each_input(
          [](Node& input, void* context) {
            input.reached_ = true;
            if (--input.pending_ == 0 && input.is_leaf()) static_cast<Lists*>(context)->final_leaves.push_back(&input);
          },
          &lists);
      node->for_each_far_leaf(
          [](Node& leaf, void* context) {
            if (--leaf.pending_ == 0) static_cast<Lists*>(context)->final_far_leaves.push_back(&leaf);
          },
          &lists);
    }
    if (detail::detects_anomalies()) [[unlikely]]
      detail::backward_with_checks(*node, options.retain_graph);
    else
      node->backward(options.retain_graph);
    for (Node* leaf : lists.final_leaves) leaf->gradient_is_final();
    for (Node* leaf : lists.final_far_leaves)
      if (leaf->reached_) leaf->gradient_is_final();
    lists.final_leaves.clear();
    lists.final_far_leaves.clear();
    node = {};
  }
  for (const auto& action : actions) action();
}

}  // namespace chorus
