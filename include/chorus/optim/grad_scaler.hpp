#pragma once
/// GradScaler: the loss is multiplied before backward, so that gradients are not too small for half, and steps whose
/// gradients overflowed are left out (Micikevicius et al., "Mixed Precision Training", ICLR 2018).

#include <algorithm>
#include <array>
#include <chorus/core/while_alive.hpp>
#include <chorus/optim/loss_scale.hpp>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::optim {

/// An optimizer that knows better which gradients its step takes, as ShardedOptimizer does.
template <class Optimizer>
concept SharedOut = requires(Optimizer& optimizer, std::int32_t* found) {
  optimizer.in_parts();
  optimizer.make_largest(found);
};

///   scaler.scale(loss).backward();
///   scaler.step(optimizer);
///
/// Several optimizers take one step together, `scaler.step(a, b)`: gradients are divided by the scale once, and either
/// all optimizers step or none.
///
/// Whether a step is left out is decided by the gradients after they were reduced over all devices. Sums keep what is
/// infinite or not a number, and all ranks hold the same bits, so all decide alike without a word; but where ranks have
/// parameters of their own, they have to ask each other: `GradScaler scaler{net}`. With a ShardedOptimizer they ask
/// each other in any case, since each rank may have averaged a part of the gradients alone.
///
/// What a communication hook with error feedback leaves for later steps has the scale of its gradients. A scaler that
/// was made for the net, `GradScaler scaler{net}`, multiplies it when the scale changes, but not on GPUs. There, and
/// where it was made of parameters, what is left over at each change counts once as much more, or less, as the scale
/// has changed: half for a scale that has doubled.
///
/// On GPUs the scale lies in device memory. A step that is captured by Graphed looks at its gradients there, and leaves
/// itself out there: the host never waits for it. An eager step waits, to say whether it has stepped.
template <Device D>
class GradScaler {
 public:
  /// Throws UsageError for options that make no sense.
  explicit GradScaler(std::vector<nn::NamedParameter<D>> parameters, const GradScalerOptions& options = {})
      : parameters_(std::move(parameters)), scale_(parameters_, checked(options)) {}
  /// Of all parameters of `net`. All ranks leave out the steps that any of them has to, and ask each other as long as
  /// `net` lives: afterwards that throws UsageError. Throws UsageError under a NonFinite policy, too.
  template <class Net>
  requires requires { Net::distributed; }
  explicit GradScaler(Net& net, const GradScalerOptions& options = {}) : GradScaler(net.parameters(), options) {
    if constexpr (requires { net.options().non_finite; })
      check<UsageError>(net.options().non_finite == std::remove_cvref_t<decltype(net.options().non_finite)>::propagate,
                        "GradScaler: the policy acts on gradients that are not finite before the scaler sees them; "
                        "expected NonFinite::propagate");
    if constexpr (Net::distributed)
      agree_ = chorus::detail::while_alive("GradScaler", net.alive(),
                                           [&net](std::int32_t* found) { net.make_largest(found); });
    if constexpr (std::is_same_v<D, Cpu> && requires { net.scale_hook_rest(1.0); })
      follow_ = [&net, alive = net.alive()](double factor) {
        if (!alive.expired()) net.scale_hook_rest(factor);
      };
  }

  /// The loss times the scale. Where gradients were unscaled since the last one, but not stepped by `step`, as by those
  /// who leave a step out or take it themselves, the scale first changes as if they had been.
  template <Operand X>
  auto scale(const X& loss) {
    if (std::exchange(unscaled_, false)) change([&] { scale_.leave(finite_); });
    stepped_.clear();
    return scale_.multiply(loss);
  }

  /// Divides all gradients by the scale, once a step; returns whether all are finite. For those who clip or look at
  /// gradients before the step. In a step that is captured it returns true: the device alone will know. Throws
  /// UsageError where no parameter has a gradient, unless it asks other ranks, and where it has been called since the
  /// last `step` or `scale`.
  bool unscale() {
    check_not_unscaled();
    check<UsageError>(agree_ || any_gradient(),
                      "GradScaler: no parameter has a gradient. Where a policy leaves a rank none, it has to ask the "
                      "others: GradScaler scaler{net}");
    unscaled_ = by_parameters_ = true;
    finite_ = false;  // unless all ranks can be asked
    return finite_ = scale_.unscale(parameters_, agree_);
  }
  /// The same for the gradients that a ShardedOptimizer steps, of which each rank may have averaged its part alone.
  /// All ranks call it, and return the same.
  template <SharedOut Sharded>
  bool unscale(Sharded& optimizer) {
    check_not_unscaled();
    unscaled_ = true;
    by_parameters_ = finite_ = false;
    const auto unscale = [&](const std::vector<nn::NamedParameter<D>>& parameters) {
      finite_ = scale_.unscale(parameters, [&](std::int32_t* found) { optimizer.make_largest(found); });
    };
    if (optimizer.in_parts())
      optimizer.with_parts(unscale);
    else
      unscale(parameters_);  // whole gradients may be looked at elsewhere, too
    return finite_;
  }

  /// Steps with the unscaled gradients, or, where one is not finite, leaves the step out and makes the scale smaller.
  /// Returns whether it has stepped; true in a step that is captured. Throws UsageError for another optimizer than
  /// that of the last step, without a `scale` in between.
  template <std::derived_from<Optimizer<D>>... Optimizers>
  requires(sizeof...(Optimizers) > 0) bool step(Optimizers&... optimizers) {
    note_step({static_cast<const Optimizer<D>*>(&optimizers)...});
    const bool finite = unscaled_ ? finite_ : unscale();
    unscaled_ = false;
    change([&] { scale_.step(finite, optimizers...); });
    return finite;
  }

  /// The same for a ShardedOptimizer; all ranks step, or leave the step out. Throws UsageError after `unscale()` where
  /// ranks have parts of the averages, which `unscale(optimizer)` finds.
  template <SharedOut Sharded>
  bool step(Sharded& optimizer) {
    check<UsageError>(!unscaled_ || !by_parameters_ || !optimizer.in_parts(),
                      "GradScaler: unscale() has not seen the gradients, of which each rank has averaged a part: "
                      "expected unscale(optimizer)");
    note_step({&optimizer});
    const bool finite = unscaled_ ? finite_ : unscale(optimizer);
    unscaled_ = false;
    change([&] { scale_.step(finite, optimizer); });
    if (!finite) optimizer.skip_step();
    return finite;
  }

  /// On GPUs these wait for the device.
  double loss_scale() const { return scale_.scale(); }
  std::int64_t skipped_steps() const { return scale_.skipped(); }

  /// What a checkpoint keeps.
  struct State {
    double scale = 1;
    std::int64_t good_steps = 0;
  };
  State state() const { return {scale_.scale(), scale_.good_steps()}; }
  /// What the net's hook remembers stays as it is: that comes from the same checkpoint.
  void set_state(const State& state) {
    check<UsageError>(is_scale(state.scale) && state.good_steps >= 0, "GradScaler: a state with scale ", state.scale,
                      " and ", state.good_steps, " good steps");
    scale_.set(state.scale, state.good_steps);
  }
  /// The same for a checkpoint's file.
  static constexpr std::string_view kept_as = "loss_scale";
  std::array<double, 2> kept() const { return {state().scale, static_cast<double>(state().good_steps)}; }
  static bool can_keep(const std::array<double, 2>& kept) {
    return is_scale(kept[0]) && kept[1] >= 0 && kept[1] < 1e15;
  }
  void keep(const std::array<double, 2>& kept) { set_state({kept[0], static_cast<std::int64_t>(kept[1])}); }

 private:
  static bool is_scale(double scale) { return scale > 0 && std::isfinite(scale); }
  static const GradScalerOptions& checked(const GradScalerOptions& options) {
    check<UsageError>(is_scale(options.init_scale) && options.growth_factor >= 1 && options.backoff_factor > 0 &&
                          options.backoff_factor <= 1 && options.growth_interval > 0,
                      "GradScaler: init_scale and growth_interval must be positive and finite, growth_factor at "
                      "least 1, backoff_factor in (0, 1]");
    return options;
  }

  // Has `step()` change the scale, and what is kept in its unit follow.
  template <class Step>
  void change(const Step& step) {
    if (!follow_) return step();
    const double before = scale_.scale();
    step();
    if (const double after = scale_.scale(); after != before) follow_(after / before);
  }

  void check_not_unscaled() const {
    check<UsageError>(!unscaled_,
                      "GradScaler: the gradients are unscaled already: expected a step() or a scale() "
                      "between two calls of unscale()");
  }
  // The same optimizer may step again: a rank that keeps others company under `join` has no loss to scale.
  void note_step(std::initializer_list<const void*> optimizers) {
    check<UsageError>(
        stepped_.empty() || std::equal(stepped_.begin(), stepped_.end(), optimizers.begin(), optimizers.end()),
        "GradScaler: a second step() since the last scale() would divide gradients by the scale again: "
        "expected step(a, b) for several optimizers");
    stepped_.assign(optimizers);
  }

  bool any_gradient() const {
    return std::any_of(parameters_.begin(), parameters_.end(),
                       [](const auto& named) { return named.parameter->grad_arrived(); });
  }

  std::vector<nn::NamedParameter<D>> parameters_;
  detail::LossScale<D> scale_;
  detail::AgreeOnFound agree_;
  std::function<void(double factor)> follow_;  // multiplies what a net's hook keeps
  std::vector<const void*> stepped_;           // since the last `scale`
  bool unscaled_ = false, by_parameters_ = false, finite_ = true;
};

template <Device D>
GradScaler(std::vector<nn::NamedParameter<D>>, const GradScalerOptions& = {}) -> GradScaler<D>;
template <class Net>
requires requires { Net::distributed; }
GradScaler(Net&, const GradScalerOptions& = {})->GradScaler<typename Net::device_type>;

}  // namespace chorus::inline CHORUS_ABI::optim
