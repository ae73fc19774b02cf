#pragma once
/// GradScaler multiplies the loss before backward, so that gradients don't underflow in half, and skips steps whose
/// gradients overflowed (Micikevicius et al., "Mixed Precision Training", ICLR 2018).

#include <algorithm>
#include <array>
#include <atomic>
#include <chorus/core/while_alive.hpp>
#include <chorus/optim/loss_scale.hpp>
#include <chorus/parallel/access.hpp>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::optim {

namespace detail {
/// Tracks the gradients that contain a scaler's losses and are not yet unscaled. Several scalers of the same parameters
/// must take turns, since gradients with two scales cannot be separated.
template <Device D>
class ScaledGradients {
 public:
  explicit ScaledGradients(const std::vector<nn::NamedParameter<D>>& parameters) {
    for (const auto& named : parameters) own_->parameters.push_back({named.parameter, 0});
    std::sort(own_->parameters.begin(), own_->parameters.end(), before);
    const std::lock_guard lock(mutex());
    std::erase_if(all(), [](const auto& book) { return book.expired(); });
    all().push_back(own_);
  }
  /// Called when a loss is scaled.
  void begin() {
    for (auto& entry : own_->parameters) entry.forgotten = entry.parameter->times_forgotten();
    own_->open = true;
  }
  /// Called when the gradients are unscaled or cleared.
  void end() { own_->open = false; }
  /// Whether some of these gradients now contain another scaler's losses.
  bool belong_to_another() const {
    const std::lock_guard lock(mutex());
    for (const auto& book : all()) {
      const auto other = book.lock();
      if (!other || other == own_ || !other->open) continue;
      for (auto a = own_->parameters.begin(), b = other->parameters.begin();
           a != own_->parameters.end() && b != other->parameters.end();) {
        if (a->parameter == b->parameter && b->parameter->grad_arrived() &&
            b->parameter->times_forgotten() == b->forgotten)
          return true;
        before(*a, *b) ? ++a : ++b;
      }
    }
    return false;
  }

 private:
  struct Entry {
    const ParameterOn<D>* parameter;
    std::uint32_t forgotten;  // the clear count when the loss was scaled
  };
  struct Book {
    std::vector<Entry> parameters;  // sorted by address
    std::atomic<bool> open{false};
  };
  static bool before(const Entry& a, const Entry& b) { return std::less<>()(a.parameter, b.parameter); }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::vector<std::weak_ptr<Book>>& all() {
    static std::vector<std::weak_ptr<Book>> books;
    return books;
  }
  std::shared_ptr<Book> own_ = std::make_shared<Book>();
};
}  // namespace detail

/// An optimizer that chooses the gradients of its step itself, such as ShardedOptimizer.
template <class Optimizer>
concept SharedOut = requires(Optimizer& optimizer, std::int32_t* found) {
  optimizer.in_parts();
  optimizer.make_largest(found);
};

///   scaler.scale(loss).backward();
///   scaler.step(optimizer);
///
/// A net has one scaler, or several that take turns: each steps before the next one scales a loss. Several optimizers
/// can share a step, `scaler.step(a, b)`: gradients are unscaled once, and either all optimizers step or none.
///
/// Whether a step is skipped depends on the gradients after their all-reduce. Sums keep infinity and NaN, and all ranks
/// have the same bits, so they decide alike without communication. With a communication hook, ranks may have different
/// averages and must communicate: `GradScaler scaler{net}`. Ranks with parts of a model, and ranks of a
/// ShardedOptimizer, which may have averaged only their part of the gradients, always communicate.
///
/// A communication hook with error feedback keeps an error for later steps, in the scale of its gradients. A scaler of
/// the net, `GradScaler scaler{net}`, rescales the error when the scale changes, except on GPUs. There, and for a
/// scaler of parameters, the error is used once with the wrong factor after each change: one half if the scale doubled.
///
/// On GPUs the scale is in device memory. A step captured by Graphed checks its gradients and skips itself on the
/// device; the host never waits. An eager step waits, since it returns whether it stepped.
template <Device D>
class GradScaler {
 public:
  /// Throws UsageError for invalid options.
  explicit GradScaler(std::vector<nn::NamedParameter<D>> parameters, const GradScalerOptions& options = {})
      : parameters_(std::move(parameters)),
        scale_(parameters_, checked(options)),
        gradients_(parameters_),
        least_(std::min(options.min_scale, options.init_scale)),
        most_(options.max_scale) {}
  /// A scaler for all parameters of `net`. If one rank has to skip a step, all ranks skip it. Ranks communicate through
  /// `net`; after its destruction this throws UsageError. Throws UsageError also under a NonFinite policy.
  template <class Net>
  requires requires { Net::distributed; }
  explicit GradScaler(Net& net, const GradScalerOptions& options = {}) : GradScaler(net.parameters(), options) {
    if constexpr (requires { net.options().non_finite; })
      check<UsageError>(net.options().non_finite == std::remove_cvref_t<decltype(net.options().non_finite)>::propagate,
                        "GradScaler: the policy handles non-finite gradients before the scaler sees them; expected "
                        "NonFinite::propagate");
    if constexpr (Net::distributed)
      agree_ = chorus::detail::while_alive("GradScaler", net.alive(),
                                           [&net](std::int32_t* found) { net.make_largest(found); });
    if constexpr (std::is_same_v<D, Cpu> && requires { chorus::detail::access_to(net).scale_hook_rest(1.0); })
      follow_ = [&net, alive = net.alive()](double factor) {
        if (!alive.expired()) chorus::detail::access_to(net).scale_hook_rest(factor);
      };
  }

  /// The loss times the scale. If gradients were unscaled since the last loss but not stepped by `step` (the program
  /// skipped the step, or took it itself), first updates the scale as if they had been.
  template <Operand X>
  auto scale(const X& loss) {
    if (std::exchange(unscaled_, false)) change([&] { scale_.leave(finite_); });
    stepped_.clear();
    gradients_.begin();
    return scale_.multiply(loss);
  }

  /// Divides all gradients by the scale, once per step. Returns whether all are finite; true in a captured step, since
  /// only the device knows. For programs that clip or inspect gradients before the step. Throws UsageError if no
  /// parameter has a gradient and ranks don't communicate, and if it was already called since the last `step` or
  /// `scale`.
  bool unscale() {
    check_can_unscale();
    for (const auto& named : parameters_) named.parameter->check_grad_whole();
    const auto agree = agree_ ? agree_ : among_ranks();
    check<UsageError>(agree || any_gradient(),
                      "GradScaler: no parameter has a gradient; under a policy that leaves some ranks without "
                      "gradients use GradScaler scaler{net}");
    begin_unscale();
    by_parameters_ = true;
    finite_ = false;  // if asking the ranks fails
    return finite_ = scale_.unscale(parameters_, agree);
  }
  /// The same for the gradients of a ShardedOptimizer, of which each rank may have averaged only its part. All ranks
  /// must call it; all return the same.
  template <SharedOut Sharded>
  bool unscale(Sharded& optimizer) {
    check_can_unscale();
    begin_unscale();
    by_parameters_ = finite_ = false;
    const auto unscale = [&](const std::vector<nn::NamedParameter<D>>& parameters) {
      finite_ = scale_.unscale(parameters, [&](std::int32_t* found) { optimizer.make_largest(found); });
    };
    if (optimizer.in_parts())
      optimizer.with_parts(unscale);
    else
      unscale(parameters_);  // whole gradients may be used elsewhere, too
    return finite_;
  }

  /// Steps with the unscaled gradients. If one is not finite, skips the step and lowers the scale. Returns whether it
  /// stepped; true in a captured step. Throws UsageError if the last step had other optimizers and `scale` was not
  /// called in between.
  template <std::derived_from<Optimizer<D>>... Optimizers>
  requires(sizeof...(Optimizers) > 0) bool step(Optimizers&... optimizers) {
    note_step({static_cast<const Optimizer<D>*>(&optimizers)...});
    const bool finite = unscaled_ ? finite_ : unscale();
    unscaled_ = false;
    change([&] { scale_.step(finite, optimizers...); });
    if (!finite) (optimizers.leave_out_step(), ...);
    return finite;
  }

  /// The same for a ShardedOptimizer; all ranks step or all skip. Throws UsageError after `unscale()` if ranks have
  /// parts of the averages, which only `unscale(optimizer)` checks.
  template <SharedOut Sharded>
  bool step(Sharded& optimizer) {
    check<UsageError>(!unscaled_ || !by_parameters_ || !optimizer.in_parts(),
                      "GradScaler: each rank has averaged a part of the gradients, which unscale() does not see: "
                      "expected unscale(optimizer)");
    note_step({&optimizer});
    const bool finite = unscaled_ ? finite_ : unscale(optimizer);
    unscaled_ = false;
    change([&] { scale_.step(finite, optimizer); });
    if (!finite) optimizer.skip_step();
    return finite;
  }

  /// On GPUs these functions wait for the device.
  double loss_scale() const { return scale_.scale(); }
  std::int64_t skipped_steps() const { return scale_.skipped(); }

  /// The state for a checkpoint.
  struct State {
    double scale = 1;
    std::int64_t good_steps = 0;
  };
  State state() const { return {scale_.scale(), scale_.good_steps()}; }
  /// Does not rescale the hook's error, which the same checkpoint restores. Old files had no bounds: the scale is
  /// clamped to the options' bounds.
  void set_state(const State& state) {
    check<UsageError>(is_scale(state.scale) && state.good_steps >= 0, "GradScaler: a state with scale ", state.scale,
                      " and ", state.good_steps, " good steps");
    scale_.set(std::clamp(state.scale, least_, most_), state.good_steps);
  }
  /// The same state in a checkpoint file's format.
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
                      "GradScaler: expected init_scale, growth_interval > 0, growth_factor >= 1, backoff_factor in ",
                      "(0, 1], got ", options.init_scale, ", ", options.growth_interval, ", ", options.growth_factor,
                      " and ", options.backoff_factor);
    check<UsageError>(
        is_scale(options.min_scale) && options.max_scale >= options.min_scale &&
            options.max_scale >= options.init_scale,
        "GradScaler: expected a positive min_scale, and a max_scale of at least min_scale and init_scale, got ",
        options.min_scale, ", ", options.max_scale, " and ", options.init_scale);
    return options;
  }

  // Runs `step()`, which may change the scale, and rescales values that depend on it.
  template <class Step>
  void change(const Step& step) {
    if (!follow_) return step();
    const double before = scale_.scale();
    step();
    if (const double after = scale_.scale(); after != before) follow_(after / before);
  }

  // Asks the ranks that share the parameters; empty if each rank has all of them.
  detail::AgreeOnFound among_ranks() const {
    auto all = detail::ranks_of(parameters_);
    if (all.empty()) return {};
    check<UsageError>((std::is_same_v<D, Cpu>), "GradScaler: '", parameters_.front().name,
                      "' is split over ranks, which must agree on a step: use GradScaler scaler{net}");
    return [all = std::move(all)](std::int32_t* found) {
      double number = *found;
      for (const auto& ranks : all) ranks->max({&number, 1});
      *found = number > 0 ? 1 : 0;
    };
  }
  void begin_unscale() {
    check<UsageError>(!gradients_.belong_to_another(),
                      "GradScaler: another scaler has scaled the same gradients and not unscaled them: expected its "
                      "step() before this scaler's scale(), or one scaler for both losses");
    gradients_.end();
    unscaled_ = true;
  }
  void check_can_unscale() const {
    check<UsageError>(!unscaled_,
                      "GradScaler: the gradients are unscaled already: expected a step() or a scale() "
                      "between two calls of unscale()");
    detail::check_averaged(parameters_);
  }
  // The same optimizers may step again: with `join`, a rank without batches has no loss to scale.
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
  detail::ScaledGradients<D> gradients_;
  double least_, most_;
  detail::AgreeOnFound agree_;
  std::function<void(double factor)> follow_;  // rescales the hook's error
  std::vector<const void*> stepped_;           // since the last `scale`
  bool unscaled_ = false, by_parameters_ = false, finite_ = true;
};

template <Device D>
GradScaler(std::vector<nn::NamedParameter<D>>, const GradScalerOptions& = {}) -> GradScaler<D>;
template <class Net>
requires requires { Net::distributed; }
GradScaler(Net&, const GradScalerOptions& = {})->GradScaler<typename Net::device_type>;

}  // namespace chorus::optim
