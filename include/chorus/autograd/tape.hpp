#pragma once
/// Backward: walks the recorded operations from the last to the first.

#include <chorus/autograd/node.hpp>
#include <functional>
#include <span>

namespace chorus {

/// Has `action` called once, at the end of the backward run that this thread is in. For gradient hooks.
void at_backward_end(std::function<void()> action);

struct BackwardOptions {
  /// Keep what the operations saved, so that backward can run again.
  bool retain_graph = false;
  /// Run the leaves' hooks. Without, whoever runs backward has more to add to the leaves' gradients, perhaps in the
  /// midst of a run over the same leaves.
  bool hooks = true;
};

/// Sends the gradients that `roots` hold to all leaves behind them. Operations run in the reverse of the order in which
/// they were recorded, without recursion; a leaf's hooks run as soon as its last contribution is in. Memory is freed on
/// the way unless the graph is retained.
void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options = {});

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/autograd/tape_impl.hpp>
#endif
