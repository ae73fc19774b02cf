#pragma once
/// Backward: walks the recorded operations from the last to the first.

#include <chorus/autograd/node.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace chorus {

/// For gradient hooks: `action` is called once, at the end of this thread's backward run.
void at_backward_end(std::function<void()> action);

/// An observer that is told before a backward run starts. Policies use it to weight the run's gradients.
class BackwardWatch {
 public:
  virtual ~BackwardWatch() = default;
  /// Called once for each run, in its thread. `nodes` are all nodes of the run, the last recorded first. The roots hold
  /// their gradients; nothing has been passed on. May call `scale_in_backward` and `at_backward_end`. An exception from
  /// it propagates out of the run: nothing has changed, and the roots' gradients are dropped.
  virtual void backward_begins(std::span<const Ref<Node>> nodes) = 0;
};

/// `watch` observes this thread's backward runs while it lives; any thread may destroy it. Nested runs and runs without
/// hooks are not reported. Registering it again does nothing.
void watch_backward(const std::weak_ptr<BackwardWatch>& watch);

/// In this thread's backward run, the gradient of `node` is multiplied by `scale`.
void scale_in_backward(Node& node, double scale);

/// The number of this thread's outermost backward run, unique in the process. 0 outside of a run.
std::uint64_t backward_run();

/// The sequence number of the node whose backward function runs now.
std::uint64_t backward_node();

/// The nodes of this thread's run that are means or batch sums, the last recorded first, whether or not backward has
/// passed them. For gradient hooks. Empty outside of a run.
std::span<const Ref<Node>> means_of_backward();

/// Receives each leaf's gradient as soon as it is complete.
class LeafObserver {
 public:
  virtual void gradient_is_final(Node& leaf) = 0;

 protected:
  ~LeafObserver() = default;
};

struct BackwardOptions {
  /// Keep saved tensors, so that backward can run again.
  bool retain_graph = false;
  /// Run the leaves' hooks. False if the caller will add more to the leaves' gradients, maybe inside of a run over the
  /// same leaves.
  bool hooks = true;
  /// With `hooks`: called instead of the hooks.
  LeafObserver* leaves = nullptr;
};

/// Sends the gradients of `roots` to all leaves behind them. Operations run in reverse recording order, without
/// recursion. A leaf's hooks run as soon as its last contribution has arrived. Memory is freed on the way unless the
/// graph is retained.
void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options = {});

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/autograd/tape_impl.hpp>
#endif
