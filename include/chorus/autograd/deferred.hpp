#pragma once
/// Gradients by weights that are put off: nobody waits for them but the optimizer (Qi et al. 2023, "zero bubble").

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <functional>
#include <utility>
#include <vector>

namespace chorus::detail {

/// What backward functions of this thread have put off, while a DeferralScope lives.
struct DeferredGradients {
  /// Leaves whose gradients are waited for: what a part of a model takes from the parts before it.
  std::vector<const Node*> inputs;
  std::vector<std::function<void()>> later;

  bool waits_for(const Node& leaf) const { return std::find(inputs.begin(), inputs.end(), &leaf) != inputs.end(); }
  void run() {
    for (const auto& gradient : std::exchange(later, {})) gradient();
  }
};
inline thread_local constinit DeferredGradients* deferred_gradients = nullptr;

class DeferralScope {
 public:
  explicit DeferralScope(DeferredGradients* gradients) : before_(std::exchange(deferred_gradients, gradients)) {}
  ~DeferralScope() { deferred_gradients = before_; }
  DeferralScope(const DeferralScope&) = delete;
  DeferralScope& operator=(const DeferralScope&) = delete;

 private:
  DeferredGradients* before_;
};

/// Calls `add(node, saved...)`, which adds to the gradient that `node` holds: now, or later where such are put off and
/// nothing but a leaf waits for this one. `add` and what it is given are copied then.
template <class N, class Add, class... Saved>
void now_or_later(N& node, const Add& add, const Saved&... saved) {
  auto* const deferred = deferred_gradients;
  if (deferred == nullptr || !node.is_leaf() || deferred->waits_for(node)) return add(node, saved...);
  deferred->later.push_back([add, leaf = Ref<N>(&node), saved...] { add(*leaf, saved...); });
}

}  // namespace chorus::detail
