#pragma once
/// GradScaler's scale on a GPU: the device checks the gradients and updates the scale, also in captured steps.

#include <chorus/kernels/copy.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/optim/cuda/gradients.hpp>
#include <chorus/optim/loss_scale.hpp>
#include <cstddef>
#include <type_traits>

namespace chorus::optim::detail {

template <>
class LossScale<Cuda> {
 public:
  LossScale(const std::vector<nn::NamedParameter<Cuda>>& parameters, const GradScalerOptions& options)
      : rule_(rule_of(options)),
        memory_(memory_on(parameters.empty() ? Cuda{} : parameters.front().parameter->where())) {
    set(options.init_scale, 0);
  }

  /// The loss times the scale, which the device reads from memory.
  template <Operand X>
  auto multiply(const X& loss) const {
    using T = typename tensor_of<X>::value_type;
    if constexpr (std::is_same_v<T, double>) {
      return mul(loss, Tensor<T, 0, Cuda>(memory_, &numbers()->scale, {}, {}));
    } else {
      const Tensor<float, 0, Cuda> scale(memory_, &numbers()->scale_f32, {}, {});
      if constexpr (std::is_same_v<T, float>) {
        return mul(loss, scale);
      } else {
        const auto narrow = Tensor<T, 0, Cuda>::empty({}, scale.device());
        kernels::convert(scale.device(), 1, static_cast<const float*>(scale.data()), narrow.data());
        return mul(loss, narrow);
      }
    }
  }

  /// Divides the gradients by the scale. Returns whether those of all ranks are finite; true in a captured step, since
  /// only the device knows.
  bool unscale(const std::vector<nn::NamedParameter<Cuda>>& parameters, const AgreeOnFound& agree) {
    const GradArrays grads(parameters);
    kernels::cuda::unscale_grads(device(), grads.f32(), numbers());
    kernels::cuda::unscale_grads(device(), grads.f64(), numbers());
    if (agree) agree(&numbers()->found);
    if (captured()) return true;
    std::int32_t found = 0;
    copy_bytes(Cpu{}, &found, device(), &numbers()->found, sizeof found);
    return found == 0;
  }

  /// Steps all optimizers unless a gradient is not finite; then updates the scale.
  template <class... Optimizers>
  void step(bool finite, Optimizers&... optimizers) {
    if (captured()) {
      (optimizers.step_unless(&numbers()->found), ...);
    } else {
      (optimizers.prepare_to_skip(), ...);
      if (finite) (optimizers.step(), ...);
    }
    kernels::cuda::update_loss_scale(device(), numbers(), rule_);
  }
  /// Updates the scale as in a step, but not in replays of a captured step.
  void leave(bool) {
    if (!captured()) kernels::cuda::update_loss_scale(device(), numbers(), rule_);
  }

  double scale() const { return read().scale; }
  std::int64_t good_steps() const { return read().good_steps; }
  std::int64_t skipped() const { return read().skipped; }
  void set(double scale, std::int64_t good_steps) {
    Numbers next = read();
    next.scale = scale;
    next.inverse = 1 / scale;
    next.scale_f32 = static_cast<float>(scale);
    next.good_steps = good_steps;
    copy_bytes(device(), memory_.data(), Cpu{}, &next, sizeof next);
  }

 private:
  using Numbers = kernels::cuda::LossScale;
  static Storage<Cuda> memory_on(Cuda device) {
    const MemoryScope scope(trace::Memory::optimizer);
    Storage<Cuda> memory(device, sizeof(Numbers));
    zero_bytes(device, memory.data(), memory.bytes());
    return memory;
  }
  Numbers* numbers() const { return static_cast<Numbers*>(memory_.data()); }
  Cuda device() const { return memory_.device(); }
  bool captured() const { return cuda::replay_numbers() != nullptr; }
  Numbers read() const {
    Numbers out;
    copy_bytes(Cpu{}, &out, device(), memory_.data(), sizeof out);
    return out;
  }

  kernels::LossScaleRule rule_;
  Storage<Cuda> memory_;
};

}  // namespace chorus::optim::detail
