#pragma once
/// Gradients of which each rank has averaged its part alone.

#include <chorus/parallel/gradient_layout.hpp>
#include <cstddef>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

/// Keeps such gradients out of sight: behind a backward pass their parameters have none, so that nobody takes the rest,
/// which is this rank's own, for an average. An optimizer that knows which part is its own sees them for a while.
template <Device D>
class GradientParts {
 public:
  explicit GradientParts(const GradientLayout<D>& layout) : layout_(layout) {}

  /// Throws UsageError where averages wait for an optimizer's step: what `what` says can't be done would lose them.
  void refuse_if_waiting(const char* what) const {
    check<UsageError>(!waiting_, "DistributedDataParallel: ", what,
                      " before a ShardedOptimizer has stepped with the last averages, of which each rank has a part, "
                      "or forgotten them (zero_grad); several passes for one step belong under no_sync");
  }
  void hide() {
    for (std::size_t i = 0; i < layout_.entries(); ++i)
      if (layout_.is_sent(i) && layout_.parameter(i).grad_arrived()) hidden_.push_back(i);
    set_arrived(false);
    waiting_ = true;
  }
  /// Calls `f` while the parameters have them.
  template <class F>
  void show(const F& f) {
    const struct Scope {
      GradientParts& parts;
      explicit Scope(GradientParts& all) : parts(all) { parts.set_arrived(true); }
      ~Scope() { parts.set_arrived(false); }
    } scope(*this);
    f();
  }
  void forget() {
    hidden_.clear();
    waiting_ = false;
  }

 private:
  void set_arrived(bool arrived) {
    for (const std::size_t i : hidden_) layout_.parameter(i).set_grad_arrived(arrived);
  }

  const GradientLayout<D>& layout_;
  std::vector<std::size_t> hidden_;  // entries
  bool waiting_ = false;
};

}  // namespace chorus::inline CHORUS_ABI::detail
