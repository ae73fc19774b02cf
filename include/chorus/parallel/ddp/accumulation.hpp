#pragma once
/// Gradients that are added up over several passes: `no_sync`.

#include <chorus/kernels/pointwise.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/gradients_aside.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <cstddef>
#include <functional>
#include <optional>
#include <utility>

namespace chorus::ddp {

/// Each pass counts by its own global batch. A rank's gradients count by its share of the batch: what is added up over
/// passes of which each has a share of its own is kept in the unit of the last one.
template <Device D, class Communicator>
class Accumulation final : public Extension<D> {
 public:
  /// `averages()`: whether the hook will average this step's gradients, so that they are weighed.
  Accumulation(Core<D, Communicator>& core, std::function<bool()> averages)
      : core_(core), averages_(std::move(averages)) {}

  /// Whether there is something that no pass has averaged.
  bool any() const {
    for (std::size_t i = 0; unit_ && i < core_.entries(); ++i)
      if (waits(i)) return true;
    return false;
  }

  // The sum over ranks of weight * (what is added up) stays the same
  // when the weight changes to that of the new batch; of a batch in which this rank has no samples nothing is added.
  void weighed() override {
    aside_.forget();
    if (unit_ && averages_()) change_unit();
  }
  void gradient_arrived(std::size_t i) override {
    if (aside_.any()) aside_.put_back(core_.parameter(i));
    if (core_.sync || !averages_()) return;
    if (!unit_) unit_ = core_.shares.weight();
    if (core_.ranks.size() > 1 && core_.is_shared(i)) core_.parameter(i).set_grad_local(true);
  }
  void backward_begins() override {
    if (!unit_) return;
    core_.weight = *unit_;
    for (std::size_t i = 0; i < core_.entries(); ++i) core_.parameter(i).set_grad_local(false);
  }
  void pass_ended() override {
    unit_.reset();
    aside_.forget();
  }

 private:
  [[gnu::cold]] void change_unit() {
    if (!any()) return unit_.reset();
    const double weight = core_.shares.weight();
    if (weight == *unit_) return;
    if (weight == 0) return aside_.take(core_.flat);
    const double factor = *unit_ / weight;
    for (std::size_t i = 0; i < core_.entries(); ++i) {
      if (!waits(i)) continue;
      auto& p = core_.parameter(i);
      if (factor == 0)
        zero_bytes(p.where(), p.grad_data(), p.size_bytes());
      else
        with_type(p.dtype(), static_cast<std::byte*>(p.grad_data()),
                  [&]<class T>(T* grad) { kernels::scale(p.where(), p.count(), static_cast<T>(factor), grad); });
    }
    unit_ = weight;
  }
  bool waits(std::size_t i) const { return core_.is_shared(i) && core_.parameter(i).grad_arrived(); }

  Core<D, Communicator>& core_;
  std::function<bool()> averages_;
  std::optional<double> unit_;
  detail::GradientsAside<D> aside_;
};

}  // namespace chorus::ddp
