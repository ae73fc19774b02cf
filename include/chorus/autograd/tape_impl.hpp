#pragma once
/// The backward walk.

#include <algorithm>
#include <atomic>
#include <chorus/autograd/tape.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/trace_listener.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {
/// An outermost backward run.
struct BackwardRun {
  std::uint64_t number;
  std::vector<std::function<void()>> end_actions;
  std::span<const Ref<Node>> means;
  std::vector<Ref<Node>>* scaled;
  std::uint64_t node = 0;  // the sequence number of the running node
};
/// This thread's run; null outside of one.
inline BackwardRun*& current_backward() {
  thread_local BackwardRun* run = nullptr;
  return run;
}

/// Observers of this thread's backward runs; null if there have never been any.
struct BackwardWatchers;
inline thread_local constinit BackwardWatchers* backward_watchers = nullptr;
struct BackwardWatchers {
  std::vector<std::weak_ptr<BackwardWatch>> list;
  BackwardWatchers() { backward_watchers = this; }
  ~BackwardWatchers() { backward_watchers = nullptr; }
};
[[gnu::noinline, gnu::cold]] inline void tell_watchers(std::span<const Ref<Node>> roots,
                                                       std::span<const Ref<Node>> nodes) {
  try {
    auto& list = backward_watchers->list;
    for (std::size_t i = 0; i < list.size(); ++i)  // a watcher may add another one
      if (const auto watch = list[i].lock()) watch->backward_begins(nodes);
  } catch (...) {
    for (const auto& root : roots) root->drop_grad();
    throw;
  }
}
/// Runs a node and throws NonFiniteError if it sends a non-finite gradient to an input.
[[gnu::noinline, gnu::cold]] inline void backward_with_checks(Node& node, bool keep) {
  check<NonFiniteError>(node.gradient_is_finite(), "anomaly: a NaN or an infinity in the gradient of the output of '",
                        node.operation(), "': the seed of backward or a hook has it");
  std::vector<Ref<Node>> inputs;
  node.for_each_input([](Node& input, void* list) { static_cast<std::vector<Ref<Node>>*>(list)->emplace_back(&input); },
                      &inputs);
  node.backward(keep);
  for (const auto& input : inputs)
    check<NonFiniteError>(input->gradient_is_finite(), "anomaly: backward of '", node.operation(),
                          "' made a NaN or an infinity in the gradient of the output of '", input->operation(), "'");
}
}  // namespace detail

CHORUS_INLINE void Node::dispose(Node* node) {
  thread_local std::vector<Node*> waiting;
  thread_local bool draining = false;
  waiting.push_back(node);
  if (draining) return;
  draining = true;
  while (!waiting.empty()) {
    Node* next = waiting.back();
    waiting.pop_back();
    delete next;
  }
  draining = false;
}

CHORUS_INLINE void at_backward_end(std::function<void()> action) {
  auto* run = detail::current_backward();
  check<UsageError>(run != nullptr, "at_backward_end: no backward is running in this thread");
  run->end_actions.push_back(std::move(action));
}

CHORUS_INLINE void scale_in_backward(Node& node, double scale) {
  auto* run = detail::current_backward();
  check<UsageError>(run != nullptr, "scale_in_backward: no backward is running in this thread");
  node.set_scale(scale);
  run->scaled->emplace_back(&node);
}

CHORUS_INLINE void watch_backward(const std::weak_ptr<BackwardWatch>& watch) {
  thread_local detail::BackwardWatchers watchers;
  std::weak_ptr<BackwardWatch>* free = nullptr;
  for (auto& known : watchers.list) {
    if (!known.owner_before(watch) && !watch.owner_before(known)) return;
    if (known.expired()) free = &known;
  }
  if (free != nullptr)
    *free = watch;
  else
    watchers.list.push_back(watch);
}

CHORUS_INLINE std::uint64_t backward_run() {
  const auto* run = detail::current_backward();
  return run != nullptr ? run->number : 0;
}

CHORUS_INLINE std::uint64_t backward_node() {
  const auto* run = detail::current_backward();
  return run != nullptr ? run->node : 0;
}

CHORUS_INLINE std::span<const Ref<Node>> means_of_backward() {
  const auto* run = detail::current_backward();
  return run != nullptr ? run->means : std::span<const Ref<Node>>();
}

CHORUS_INLINE void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options) {
  static std::atomic<std::uint64_t> runs{0};
  const std::uint64_t run = runs.fetch_add(1, std::memory_order_relaxed) + 1;

  // Nested runs (DataParallel's replicas) have their own lists. All lists are kept for the next run.
  struct Lists {
    std::vector<Ref<Node>> nodes, means, scaled;
    std::vector<Node*> final_leaves, final_far_leaves;
    struct Count {
      Ref<Node> node;
      int pending;
      bool reached;
    };
    std::vector<Count> outer_counts;  // pending counts of the enclosing run
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
      if (!lists->nested)
        for (auto& mean : lists->means) mean->set_scale(1);
      for (auto& node : lists->scaled) node->set_scale(1);
      lists->scaled.clear();
      lists->means.clear();
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
  lists.nested = detail::current_backward() != nullptr;

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
    if (node.is_mean() || node.is_sum_of_batch()) lists.means.push_back(lists.nodes[next]);
    node.for_each_input(find, &lists);
    if (lists.count) node.for_each_far_leaf(find, &lists);
  }
  const auto later = [](const Ref<Node>& a, const Ref<Node>& b) { return a->sequence() > b->sequence(); };
  std::sort(lists.nodes.begin(), lists.nodes.end(), later);
  std::sort(lists.means.begin(), lists.means.end(), later);

  // If an operator's backward runs another one, gradients are complete only when the outermost has ended.
  detail::BackwardRun outermost{.number = run, .end_actions = {}, .means = lists.means, .scaled = &lists.scaled};
  struct Scope {
    detail::BackwardRun* outer;
    ~Scope() { detail::current_backward() = outer; }
  } scope{detail::current_backward()};
  if (!lists.nested) detail::current_backward() = &outermost;

  const auto finish = [&](Node& leaf) {
    if (options.leaves != nullptr) [[unlikely]]
      options.leaves->gradient_is_final(leaf);
    else
      leaf.gradient_is_final();
  };
  const NoGrad no_grad;
  if (options.hooks && !lists.nested && detail::backward_watchers != nullptr) [[unlikely]]
    detail::tell_watchers(roots, lists.nodes);
  if (options.hooks)
    for (const auto& root : roots)
      if (root->is_leaf() && root->pending_ == 0) finish(*root);
  std::optional<trace::Span> span(std::in_place, trace::Lane::backward, "backward", "backward");
  for (Ref<Node>& node : lists.nodes) {
    if (node->is_leaf()) {
      if (!lists.count) node->set_reached();  // in the enclosing run
      continue;
    }
    outermost.node = node->sequence();
    if (node->gradient_hooks_) node->run_gradient_hooks();
    // Counted before the node runs, since it then drops its inputs.
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
    for (Node* leaf : lists.final_leaves) finish(*leaf);
    for (Node* leaf : lists.final_far_leaves)
      if (leaf->reached_) finish(*leaf);
    lists.final_leaves.clear();
    lists.final_far_leaves.clear();
    node = {};
  }
  span.reset();
  for (const auto& action : outermost.end_actions) action();
}

}  // namespace chorus
