#pragma once
/// Batch normalisation layers.

#include <cstdint>

#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/batch_norm.hpp>

namespace chorus::inline CHORUS_ABI::nn {

/// Normalises each channel of x: [batch, channels, ...] over the batch and all inner axes. In training the batch's
/// statistics are used and the running ones are updated; in evaluation the running ones are used.
template <Device D, Real T = float>
class BatchNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;
  Buffer<T, 1, D> running_mean, running_var;
  Buffer<std::int64_t, 0, D> num_batches_tracked;

  /// Throws ShapeError unless `channels` is positive.
  explicit BatchNorm(Index channels, const BatchNormOptions& options = {}) : options_(options) {
    check<ShapeError>(channels > 0, "BatchNorm: ", channels, " channels: must be positive");
    weight = Parameter(init::constant<T, D, 1>({channels}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({channels}, T{0}));
    running_mean = Buffer(init::constant<T, D, 1>({channels}, T{0}));
    running_var = Buffer(init::constant<T, D, 1>({channels}, T{1}));
    num_batches_tracked = Buffer(init::constant<std::int64_t, D, 0>({}, 0));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    if (training() && x.numel() > 0) {
      const auto& count = num_batches_tracked.value();
      const std::int64_t next = count.item() + 1;
      copy_bytes(count.device(), count.data(), Cpu{}, &next, sizeof next);
    }
    return batch_norm(x, weight, bias, running_mean.value(), running_var.value(), training(), options_);
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    visitor.parameter("bias", bias);
    visitor.buffer("running_mean", running_mean);
    visitor.buffer("running_var", running_var);
    visitor.buffer("num_batches_tracked", num_batches_tracked);
  }
  std::string describe() const override { return cat("BatchNorm(", weight.shape()[0], ")"); }

 private:
  BatchNormOptions options_;
};

/// The names that PyTorch has for them; the number of inner axes is the input's.
template <Device D, Real T = float>
using BatchNorm1d = BatchNorm<D, T>;
template <Device D, Real T = float>
using BatchNorm2d = BatchNorm<D, T>;

}  // namespace chorus::inline CHORUS_ABI::nn
