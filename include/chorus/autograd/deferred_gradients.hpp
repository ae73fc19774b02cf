#pragma once
/// Deferred weight gradients: only the optimizer waits for them (Qi et al. 2023, "zero bubble").

#include <chorus/autograd/node.hpp>
#include <functional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Gradient computations that this thread's backward has deferred, while a DeferralScope lives.
struct DeferredGradients {
  /// The leaves whose gradients may be deferred.
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

/// Calls `add(node, saved...)`, which adds to the gradient of `node`: at once, or later if this leaf's gradients are
/// deferred. Deferring copies `add` and its arguments.
template <class N, class Add, class... Saved>
void now_or_later(N& node, const Add& add, const Saved&... saved) {
  auto* const deferred = deferred_gradients;
  if (deferred == nullptr || !deferred->may_wait(node)) return add(node, saved...);
  deferred->later.push_back([add, leaf = Ref<N>(&node), saved...] { add(*leaf, saved...); });
}

}  // namespace chorus::detail
