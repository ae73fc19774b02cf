#pragma once
/// Batch normalisation layers.

#include <algorithm>
#include <chorus/core/recomputation.hpp>
#include <chorus/nn/init.hpp>
#include <chorus/nn/intercepted.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/sync_batch_norm.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

namespace chorus::nn {

/// Whether a layer's statistics are those of the global batch instead of the device's share.
class Synchronisable {
 public:
  bool synchronised() const { return synchronised_; }
  void set_synchronised(bool synchronised) { synchronised_ = synchronised; }

 private:
  bool synchronised_ = false;
};

/// The type-independent interface of batch norms, for optim::update_bn.
class RunningStatistics {
 public:
  virtual bool tracks_running_stats() const = 0;
  /// Resets the running statistics to those of a new layer.
  virtual void reset_running_stats() const = 0;
  virtual std::optional<double> momentum() const = 0;
  /// See BatchNormLayerOptions::momentum. Throws UsageError unless it is in [0, 1] or empty.
  virtual void set_momentum(std::optional<double> momentum) = 0;
  /// The number of batches, the means and the variances.
  virtual std::vector<double> running_stats() const = 0;
  /// Sets means and variances, in this order; the number of batches stays.
  virtual void set_running_stats(std::span<const double> stats) const = 0;

 protected:
  ~RunningStatistics() = default;
};

/// Options of BatchNorm, with PyTorch's names and defaults.
struct BatchNormLayerOptions {
  double eps = 1e-5;
  /// The weight of the new batch in the running statistics. Empty: cumulative averages over all batches with equal
  /// weights, as in PyTorch. That waits for a GPU, so the step cannot be captured.
  std::optional<double> momentum = 0.1;
  /// Whether the layer has weight and bias.
  bool affine = true;
  /// Whether the layer has running statistics. If not, evaluation uses the batch's statistics, too.
  bool track_running_stats = true;
};

/// Normalises each channel of x: [batch, channels, ...] over the batch and all inner axes. Training uses the batch's
/// statistics and updates the running ones; evaluation uses the running ones. Under DataParallel and
/// DistributedDataParallel the batch is the device's share, unless the layer is synchronised: see SyncBatchNorm.
/// Recomputation by an activation checkpoint normalises as the first time and does not count the batch again.
template <Device D, Real T = float>
class BatchNorm : public Module, public Synchronisable, public RunningStatistics {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;
  Buffer<T, 1, D> running_mean, running_var;
  Buffer<std::int64_t, 0, D> num_batches_tracked;

  /// Throws ShapeError unless `channels` is positive.
  explicit BatchNorm(Index channels, const BatchNormLayerOptions& options = {})
      : options_(options), channels_(channels) {
    check<ShapeError>(channels > 0, "BatchNorm: ", channels, " channels: must be positive");
    if (options.affine) {
      weight = Parameter(init::constant<T, D, 1>({channels}, T{1}));
      bias = Parameter(init::constant<T, D, 1>({channels}, T{0}));
    }
    if (!options.track_running_stats) return;
    running_mean = Buffer(init::constant<T, D, 1>({channels}, T{0}));
    running_var = Buffer(init::constant<T, D, 1>({channels}, T{1}));
    num_batches_tracked = Buffer(init::constant<std::int64_t, D, 0>({}, 0));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return detail::norm_gives(detail::norm_takes(this, x), normalised(x)); });
  }
  /// For fold_batch_norm.hpp: removes parameters and buffers. The layer becomes the identity and refuses to train.
  void fold_away() {
    const auto device = value_of(running_mean).device();
    unit_mean_ = Tensor<T, 1, D>::zeros({channels_}, device);
    unit_var_ = Tensor<T, 1, D>::ones({channels_}, device);
    weight = bias = Parameter<T, 1, D>();
    running_mean = running_var = Buffer<T, 1, D>();
    num_batches_tracked = Buffer<std::int64_t, 0, D>();
  }
  bool folded_away() const { return unit_mean_.defined(); }
  double eps() const { return options_.eps; }
  void visit(Visitor& visitor) override {
    if (weight) {
      visitor.parameter("weight", weight);
      visitor.parameter("bias", bias);
    }
    if (!running_mean) return;
    visitor.buffer("running_mean", running_mean);
    visitor.buffer("running_var", running_var);
    visitor.buffer("num_batches_tracked", num_batches_tracked);
  }
  std::string describe() const override {
    return cat(synchronised() ? "SyncBatchNorm(" : "BatchNorm(", channels_, ending());
  }

  Index channels() const { return channels_; }

  bool tracks_running_stats() const override { return static_cast<bool>(running_mean); }
  void reset_running_stats() const override {
    if (!running_mean) return;
    fill(running_mean, T{0});
    fill(running_var, T{1});
    fill(num_batches_tracked, std::int64_t{0});
  }
  std::optional<double> momentum() const override { return options_.momentum; }
  void set_momentum(std::optional<double> momentum) override {
    check<UsageError>(!momentum || (*momentum >= 0 && *momentum <= 1),
                      "BatchNorm: expected momentum in [0, 1], or std::nullopt for means over all batches, got ",
                      momentum.value_or(0));
    options_.momentum = momentum;
  }
  std::vector<double> running_stats() const override {
    std::vector<double> out{static_cast<double>(value_of(num_batches_tracked).to_vector()[0])};
    for (const auto* buffer : {&running_mean, &running_var})
      for (const T number : value_of(*buffer).to_vector()) out.push_back(static_cast<double>(number));
    return out;
  }
  void set_running_stats(std::span<const double> stats) const override {
    const auto channels = static_cast<std::size_t>(channels_);
    check<ShapeError>(stats.size() == 2 * channels, "BatchNorm: ", stats.size(), " statistics for ", channels_,
                      " channels");
    std::vector<T> numbers(2 * channels);
    std::transform(stats.begin(), stats.end(), numbers.begin(), [](double x) { return static_cast<T>(x); });
    for (const auto* buffer : {&running_mean, &running_var}) {
      const auto& value = value_of(*buffer);
      copy_bytes(value.device(), value.data(), Cpu{}, numbers.data() + (buffer == &running_mean ? 0 : channels),
                 value.bytes());
      buffer->template on<D>().touch();
    }
  }

 protected:
  const char* ending() const { return folded_away() ? ", folded)" : ")"; }
  template <Operand X>
  auto normalised(const X& x) const {
    using Result = decltype(batch_norm(x, weight, bias, unit_mean_, unit_var_, false, BatchNormOptions{}));
    if constexpr (std::is_convertible_v<const X&, Result>)
      if (folded_away()) [[unlikely]] {
        check_evaluates();
        return Result(x);
      }
    const auto [group, mean, var, by_batch, options] = begin(x.numel());
    if (group) return over_group(x, group);
    return batch_norm(x, weight, bias, mean, var, by_batch, options);
  }
  /// The settings of a forward pass.
  struct Pass {
    std::shared_ptr<BatchGroup> group;  // the group that shares the batch, if any
    Tensor<T, 1, D> running_mean, running_var;
    bool by_batch;
    BatchNormOptions options;
  };
  /// Counts a batch of `numel` numbers, unless a group shares it or it is recomputed.
  Pass begin(Index numel) const {
    if (folded_away()) [[unlikely]] {
      check_evaluates();
      return {nullptr, unit_mean_, unit_var_, false, {0, 0}};
    }
    const bool trains = training(), shared = shares_batch(trains);
    Pass pass{shared ? batch_group() : nullptr, {}, {}, trains || !running_mean, {options_.eps, 0}};
    if (!running_mean || shared || (trains && is_recomputed())) return pass;
    pass.running_mean = value_of(running_mean);
    pass.running_var = value_of(running_var);
    pass.options.momentum = next_momentum(trains, numel > 0);
    return pass;
  }
  /// The normalised share of a group's batch. The batch is counted once it is known to be non-empty.
  template <Operand X>
  auto over_group(const X& x, const std::shared_ptr<BatchGroup>& group) const {
    const bool tracks = running_mean && !is_recomputed();
    const auto mean = tracks ? value_of(running_mean) : Tensor<T, 1, D>(), var = tracks ? value_of(running_var) : mean;
    return sync_batch_norm(x, weight, bias, mean, var, group, {options_.eps, 0},
                           [&](double count) { return tracks ? next_momentum(true, count > 0) : 0; });
  }

 private:
  void check_evaluates() const {
    check<UsageError>(!training(),
                      "BatchNorm: it is folded: call eval(), or train the model that fold_batch_norm was given");
  }
  template <class Element, int Rank>
  static void fill(const Buffer<Element, Rank, D>& buffer, Element number) {
    const auto& value = value_of(buffer);
    const std::vector<Element> numbers(static_cast<std::size_t>(value.numel()), number);
    copy_bytes(value.device(), value.data(), Cpu{}, numbers.data(), value.bytes());
    buffer.template on<D>().touch();
  }

  // Whether a group shares the batch. If it did in the first run, the share's own statistics would give other
  // gradients.
  bool shares_batch(bool trains) const {
    const bool shared = synchronised() && trains && batch_group();
    if (chorus::detail::first_run == nullptr) return shared;
    const bool was_shared = chorus::detail::first_run->found(this, 1, shared);
    check<UsageError>(shared || !was_shared,
                      "SyncBatchNorm: a checkpoint computes it again without the other devices: call backward or grad "
                      "on the policy's output");
    return shared && was_shared;
  }

  // The weight of this batch in the running statistics. In training the batch is counted, if it is non-empty (`any`).
  double next_momentum(bool trains, bool any) const {
    const auto& batches = value_of(num_batches_tracked);
    if (trains && any) {
      kernels::increment(batches.device(), batches.data());
      chorus::detail::note_write(batches);
    }
    if (options_.momentum) return *options_.momentum;
    if (!trains) return 0;
    std::int64_t count = 0;
    copy_bytes(Cpu{}, &count, batches.device(), batches.data(), sizeof count);
    return 1 / std::max(static_cast<double>(count), 1.0);
  }

 protected:
  BatchNormLayerOptions options_;
  Index channels_;

 private:
  Tensor<T, 1, D> unit_mean_, unit_var_;  // 0 and 1 after fold_away
};

/// relu(batch_norm(x)) or relu(batch_norm(x) + residual), fused. Its parameters have BatchNorm's names.
template <Device D, Real T = float>
class BatchNormReLU : public BatchNorm<D, T> {
 public:
  using BatchNorm<D, T>::BatchNorm;

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      const auto* const part = detail::norm_takes(this, x);
      if (this->folded_away()) [[unlikely]]
        return relu(this->normalised(x));
      const auto [group, mean, var, by_batch, options] = this->begin(x.numel());
      if (group) return detail::norm_gives(part, relu(this->over_group(x, group)), /*relu=*/true);
      return detail::norm_gives(
          part, batch_norm_relu(x, this->weight, this->bias, mean, var, by_batch, options), /*relu=*/true);
    });
  }
  template <Operand X, Operand R>
  auto operator()(const X& x, const R& residual) const {
    return detail::watched(*this, [&] {
      if (const auto* const part = detail::norm_takes(this, x)) [[unlikely]]
        return sum_of_taken(part, this->normalised(x), residual);
      const auto [group, mean, var, by_batch, options] = this->begin(x.numel());
      if (group) return relu(chorus::detail::plain_sum(this->over_group(x, group), residual));
      return batch_norm_add_relu(x, residual, this->weight, this->bias, mean, var, by_batch, options);
    });
  }
  std::string describe() const override {
    return cat(this->synchronised() ? "SyncBatchNormReLU(" : "BatchNormReLU(", this->channels_, this->ending());
  }

 private:
  // relu(y + residual), with the interceptor's replacements of both.
  template <Operand Y, Operand R>
  static auto sum_of_taken(const void* part, const Y& y, const R& residual) {
    auto sum = relu(chorus::detail::plain_sum(chorus::detail::taken(detail::norm_gives(part, y)),
                                              chorus::detail::taken(residual)));
    if constexpr (chorus::detail::may_be_intercepted<decltype(sum)>)
      chorus::detail::interceptor->norm_adds(part, value_of(sum).storage());
    return sum;
  }
};

/// PyTorch's name for sequences. The number of inner axes is the input's.
template <Device D, Real T = float>
using BatchNorm1d = BatchNorm<D, T>;
/// PyTorch's name for images.
template <Device D, Real T = float>
using BatchNorm2d = BatchNorm<D, T>;
/// BatchNormReLU for images.
template <Device D, Real T = float>
using BatchNormReLU2d = BatchNormReLU<D, T>;

/// BatchNorm with the statistics of the global batch, in forward and backward, under every policy: training on any
/// number of devices equals training on one. Shares may be uneven or empty. Each forward pass needs a collective of 2
/// channels + 1 doubles, each backward pass one of 2 channels; for GraphVariables more. Gradients of gradients include
/// all members' samples, for a penalty inside of the model and, under DataParallel, also outside.
template <Device D, Real T = float>
class SyncBatchNorm : public BatchNorm<D, T> {
 public:
  explicit SyncBatchNorm(Index channels, const BatchNormLayerOptions& options = {})
      : BatchNorm<D, T>(channels, options) {
    this->set_synchronised(true);
  }
};

/// Makes all BatchNorm layers of the model synchronised and returns it.
template <class Model>
Model convert_sync_batch_norm(Model model) {
  struct Convert final : detail::Walker {
    void enter(Module& module) override {
      if (auto* norm = dynamic_cast<Synchronisable*>(&module)) norm->set_synchronised(true);
    }
  } convert;
  if (auto* norm = dynamic_cast<Synchronisable*>(&model)) norm->set_synchronised(true);
  convert.walk(model);
  return model;
}

}  // namespace chorus::nn
