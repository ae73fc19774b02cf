#pragma once
/// Gradients of which each rank has averaged its part alone.

#include <algorithm>
#include <chorus/parallel/ddp/gradient_layout.hpp>
#include <chorus/parallel/ddp/shared_gradients.hpp>
#include <cstddef>
#include <vector>

namespace chorus::detail {

/// Keeps such gradients out of sight: behind a backward pass their parameters have none, so that nobody takes the rest,
/// which is this rank's own, for an average. An optimizer that knows which part is its own sees them for a while.
/// Where ranks reach each other's gradients, averages may be left to that optimizer's step: until then gradients are
/// apart.
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
  /// Where ranks reach each other's.
  SharedGradients& shared() { return shared_; }
  const SharedGradients& shared() const { return shared_; }
  bool all_reached() const {
    return std::all_of(layout_.buckets().begin(), layout_.buckets().end(), [&](const auto& bucket) {
      return shared_.reached(layout_.gradients(bucket), bucket.count * size_of(layout_.dtype(bucket)));
    });
  }
  bool apart() const { return apart_; }
  /// All ranks tell each other what their gradients, which are apart, count. Throws UsageError where they are no longer
  /// reached.
  template <class Communicator>
  void tell_weight(Communicator& communicator) {
    check<UsageError>(all_reached(),
                      "ShardedOptimizer: the last gradients were to be averaged by the step of an optimizer that has "
                      "parameters in common, which is gone");
    shared_.tell_weight(communicator, weight_);
  }
  /// Has each rank average its part of each bucket now.
  template <class Communicator>
  void average(Communicator& communicator) {
    if (!apart_) return;
    tell_weight(communicator);
    for (const auto& bucket : layout_.buckets()) {
      const auto part = part_of(bucket.count, static_cast<std::size_t>(communicator.rank()),
                                static_cast<std::size_t>(communicator.size()));
      with_type(layout_.dtype(bucket), layout_.gradients(bucket), [&]<class T>(T* gradients) {
        T* const own = gradients + part.begin;
        const auto count = part.end - part.begin;
        kernels::add_up(Cpu{}, static_cast<Index>(count), own, {own, shared_.terms(own, count * sizeof(T))});
      });
    }
    apart_ = false;
    communicator.barrier();  // others read this rank's until then
  }

  /// `apart`: nothing has been averaged so far; this rank's gradients count `weight`.
  void hide(bool apart, double weight) {
    apart_ = apart;
    weight_ = weight;
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
    waiting_ = apart_ = false;
  }

 private:
  void set_arrived(bool arrived) {
    for (const std::size_t i : hidden_) layout_.parameter(i).set_grad_arrived(arrived);
  }

  const GradientLayout<D>& layout_;
  SharedGradients shared_;
  std::vector<std::size_t> hidden_;  // entries
  bool waiting_ = false, apart_ = false;
  double weight_ = 1;
};

}  // namespace chorus::detail
