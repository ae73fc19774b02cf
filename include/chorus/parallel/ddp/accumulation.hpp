#pragma once
/// Gradients accumulated over several passes: `no_sync`.

#include <chorus/parallel/ddp/earlier_gradients.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>
#include <functional>
#include <utility>

namespace chorus::ddp {

/// Each pass is weighted by its own global batch: see EarlierGradients.
template <Device D, class Communicator>
class Accumulation final : public Extension<D> {
 public:
  /// `averages()`: whether the hook will average this step's gradients, so that they need weights.
  Accumulation(Core<D, Communicator>& core, std::function<bool()> averages)
      : core_(core), averages_(std::move(averages)) {}

  /// Whether there are gradients that no pass has averaged.
  bool any() const {
    for (std::size_t i = 0; accumulates_ && i < core_.entries(); ++i)
      if (core_.is_shared(i) && core_.parameter(i).grad_arrived()) return true;
    return false;
  }

  void weighed() override {
    earlier_.pass_ended();  // the last pass may have ended early
    if (!accumulates_ || !averages_()) return;
    accumulates_ = any();
    if (accumulates_)
      earlier_.change_unit(core_.flat, core_.shares.weight(), [this](std::size_t i) { return core_.is_shared(i); });
  }
  void gradient_arrived(std::size_t i) override {
    if (core_.is_shared(i)) earlier_.gradient_arrived(core_.parameter(i));
    if (core_.sync || !averages_()) return;
    if (!std::exchange(accumulates_, true)) earlier_.unit = core_.shares.weight();
    if (core_.ranks.size() > 1 && core_.is_shared(i)) core_.parameter(i).set_grad_local(true);
  }
  void backward_begins() override {
    if (!accumulates_) return;
    core_.weight = earlier_.unit;
    for (std::size_t i = 0; i < core_.entries(); ++i) core_.parameter(i).set_grad_local(false);
  }
  void pass_ended() override {
    accumulates_ = false;
    earlier_.pass_ended();
  }

 private:
  Core<D, Communicator>& core_;
  std::function<bool()> averages_;
  EarlierGradients<D> earlier_;
  bool accumulates_ = false;  // earlier passes have left gradients in units of `earlier_.unit`
};

}  // namespace chorus::ddp
