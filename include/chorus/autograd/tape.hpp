#pragma once
/// Backward: walks the recorded operations from the last to the first.

#include <chorus/autograd/node.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace chorus {

/// Has `action` called once, at the end of the backward run that this thread is in. For gradient hooks.
void at_backward_end(std::function<void()> action);

/// Who wants to know of backward runs before they start: a policy, which weighs this run's gradients.
class BackwardWatch {
 public:
  virtual ~BackwardWatch() = default;
  /// Called once for each run, in its thread. `nodes` are all that it goes through, the last recorded first; the roots
  /// among them hold their gradients, and none has been sent on. May call `scale_in_backward` and `at_backward_end`.
  /// What it throws comes out of the run, which has then changed nothing; the roots' gradients are dropped.
  virtual void backward_begins(std::span<const Ref<Node>> nodes) = 0;
};

/// From now on `watch` is told of this thread's backward runs, as long as it lives; any thread may end its life. It is
/// not told of runs within runs, nor of those without hooks. A second call with the same one does nothing.
void watch_backward(const std::weak_ptr<BackwardWatch>& watch);

/// Has the gradient that comes into `node` multiplied by `scale` in the backward run that this thread is in.
void scale_in_backward(Node& node, double scale);

/// The number of the backward run that this thread is in, the outermost one: no other run in this process has it. 0
/// outside of a run.
std::uint64_t backward_run();

/// Of the same run: the sequence number of the node whose gradient goes on now.
std::uint64_t backward_node();

/// Of the same run: those of its nodes that are means, or sums of a batch, the last recorded first, whether or not
/// backward has passed them yet. For gradient hooks. Empty outside of a run.
std::span<const Ref<Node>> means_of_backward();

/// Takes the leaves' gradients, each as soon as it is complete.
class LeafObserver {
 public:
  virtual void gradient_is_final(Node& leaf) = 0;

 protected:
  ~LeafObserver() = default;
};

struct BackwardOptions {
  /// Keep what the operations saved, so that backward can run again.
  bool retain_graph = false;
  /// Run the leaves' hooks. Without, whoever runs backward has more to add to the leaves' gradients, perhaps in the
  /// midst of a run over the same leaves.
  bool hooks = true;
  /// With `hooks`: is told in their place.
  LeafObserver* leaves = nullptr;
};

/// Sends the gradients that `roots` hold to all leaves behind them. Operations run in the reverse of the order in which
/// they were recorded, without recursion; a leaf's hooks run as soon as its last contribution is in. Memory is freed on
/// the way unless the graph is retained.
void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options = {});

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/autograd/tape_impl.hpp>
#endif
