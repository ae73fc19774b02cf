#pragma once
/// What gradients count that passes under no_sync have added up.

#include <chorus/kernels/pointwise.hpp>
#include <chorus/parallel/ddp/batch_shares.hpp>
#include <chorus/parallel/ddp/gradient_layout.hpp>
#include <chorus/parallel/ddp/gradients_aside.hpp>
#include <chorus/parallel/ddp/non_finite.hpp>
#include <cstddef>
#include <optional>

namespace chorus::detail {

/// A rank's gradients count by its part of the batch. What is added up over passes of which each has a part of its own
/// is kept in the unit of the last one.
template <Device D, class Communicator>
class AccumulatedWeight {
 public:
  AccumulatedWeight(GradientLayout<D>& layout, BatchShares<Communicator>& shares) : layout_(layout), shares_(shares) {}

  /// A gradient of a pass under no_sync has come.
  void note() {
    if (!unit_) unit_ = shares_.weight();
  }
  /// By which gradients are to be multiplied before all ranks' are added up.
  double weight() { return unit_ ? *unit_ : shares_.weight(); }
  /// Whether a rank that has run out of batches brings any.
  bool any() const {
    for (std::size_t i = 0; unit_ && i < layout_.entries(); ++i)
      if (waits(i)) return true;
    return false;
  }
  /// They have been.
  void forget() {
    unit_.reset();
    aside_.forget();
  }

  /// Before a forward pass. The sum over ranks of weight * (what is added up) stays the same when the weight changes to
  /// that of a new batch; of a batch in which this rank has no samples nothing is added.
  void weigh_anew() {
    aside_.forget();
    if (unit_) rescale();
  }
  /// The gradient of entry `i` has come.
  void arrived(std::size_t i) const { aside_.put_back(layout_.parameter(i)); }
  /// Whether `arrived` is to be called.
  bool adds_nothing() const { return aside_.any(); }

 private:
  [[gnu::cold]] void rescale() {
    bool any = false;
    for (std::size_t i = 0; i < layout_.entries(); ++i) any = any || waits(i);
    if (!any) return unit_.reset();
    const double weight = shares_.weight();
    if (weight == *unit_) return;
    if (weight == 0) return aside_.take(layout_.flat());
    const double factor = *unit_ / weight;
    for (std::size_t i = 0; i < layout_.entries(); ++i) {
      if (!waits(i)) continue;
      auto& p = layout_.parameter(i);
      if (factor == 0)
        zero_bytes(p.where(), p.grad_data(), p.size_bytes());
      else
        with_type(p.dtype(), static_cast<std::byte*>(p.grad_data()),
                  [&]<class T>(T* grad) { kernels::scale(p.where(), p.count(), static_cast<T>(factor), grad); });
    }
    unit_ = weight;
  }
  bool waits(std::size_t i) const { return layout_.is_shared(i) && layout_.parameter(i).grad_arrived(); }

  GradientLayout<D>& layout_;
  BatchShares<Communicator>& shares_;
  std::optional<double> unit_;
  GradientsAside<D> aside_;
};

}  // namespace chorus::detail
