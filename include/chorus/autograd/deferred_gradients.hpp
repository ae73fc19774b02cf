#pragma once
/// Gradients by weights that are put off: nobody waits for them but the optimizer (Qi et al. 2023, "zero bubble").

#include <chorus/autograd/node.hpp>
#include <functional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus::detail {

/// What backward functions of this thread have put off, while a DeferralScope lives.
struct DeferredGradients {
  /// The leaves whose gradients may wait.
  const std::unordered_set<const Node*>* weights = nullptr;
  std::vector<std::function<void()>> later;

  bool may_wait(const Node& leaf) const { return weights != nullptr && weights->contains(&leaf); }
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
  if (deferred == nullptr || !deferred->may_wait(node)) return add(node, saved...);
  deferred->later.push_back([add, leaf = Ref<N>(&node), saved...] { add(*leaf, saved...); });
}

}  // namespace chorus::detail
