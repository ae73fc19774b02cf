#pragma once
/// GradScaler multiplies the loss before backward, so that gradients are not too small for half, and skips steps whose
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
/// The gradients that contain one scaler's losses and are not yet divided. Several scalers of the same parameters take
/// turns: gradients with two scales can't be told apart.
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
  /// A loss is multiplied.
  void begin() {
    for (auto& entry : own_->parameters) entry.forgotten = entry.parameter->times_forgotten();
    own_->open = true;
  }
  /// The gradients are divided, or discarded.
  void end() { own_->open = false; }
  /// Whether some of the same gradients contain another scaler's losses now.
  bool are_anothers() const {
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
    std::uint32_t forgotten;  // when the loss was multiplied
  };
  struct Book {
    std::vector<Entry> parameters;  // by address
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
/// take one step together, `scaler.step(a, b)`: gradients are divided by the scale once, and either all optimizers step
/// or none.
///
/// The gradients after their reduction over all devices decide whether a step is skipped. Sums keep infinity and NaN,
/// and all ranks hold the same bits, so all decide alike without a message. Under a hook, ranks may have different
/// averages. Then they have to ask each other: `GradScaler scaler{net}`. Ranks that have parts of a model, and ranks of
/// a ShardedOptimizer, which may have averaged only their own part of the gradients, always ask each other.
///
/// A communication hook with error feedback keeps a remainder for later steps, in the scale of its gradients. A scaler
/// of the net, `GradScaler scaler{net}`, multiplies the remainder when the scale changes, but not on GPUs. There, and
/// if the scaler was made of parameters, the remainder at each change counts once by the wrong factor: half if the
/// scale has doubled.
///
/// On GPUs the scale lies in device memory. A step that Graphed captures examines its gradients there and skips itself
/// there: the host never waits. An eager step waits, to tell whether it has stepped.
template <Device D>
class GradScaler {
 public:
  /// Throws UsageError for options that make no sense.
  explicit GradScaler(std::vector<nn::NamedParameter<D>> parameters, const GradScalerOptions& options = {})
      : parameters_(std::move(parameters)),
        scale_(parameters_, checked(options)),
        gradients_(parameters_),
        least_(std::min(options.min_scale, options.init_scale)),
        most_(options.max_scale) {}
  /// A scaler of all parameters of `net`. If any rank has to skip a step, all ranks skip it. They ask each other as
  /// long as `net` lives; afterwards that throws UsageError. Throws UsageError under a NonFinite policy, too.
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

  /// The loss times the scale. If gradients were unscaled since the last loss, but not stepped by `step` (the program
  /// skipped the step, or took it itself), the scale first changes as if they had been stepped.
  template <Operand X>
  auto scale(const X& loss) {
    if (std::exchange(unscaled_, false)) change([&] { scale_.leave(finite_); });
    stepped_.clear();
    gradients_.begin();
    return scale_.multiply(loss);
  }

  /// Divides all gradients by the scale, once a step. Returns whether all are finite. For programs that clip or examine
  /// gradients before the step. In a captured step it returns true: only the device will know. Throws UsageError if no
  /// parameter has a gradient, unless it asks other ranks, and if it was called since the last `step` or `scale`.
  bool unscale() {
    check_can_unscale();
    for (const auto& named : parameters_) named.parameter->check_grad_whole();
    const auto agree = agree_ ? agree_ : among_ranks();
    check<UsageError>(agree || any_gradient(),
                      "GradScaler: no parameter has a gradient; under a policy that leaves some ranks without "
                      "gradients use GradScaler scaler{net}");
    begin_unscale();
    by_parameters_ = true;
    finite_ = false;  // unless all ranks can be asked
    return finite_ = scale_.unscale(parameters_, agree);
  }
  /// The same for the gradients of a ShardedOptimizer, of which each rank may have averaged only its own part. All
  /// ranks call it, and all return the same.
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
      unscale(parameters_);  // whole gradients may be examined elsewhere, too
    return finite_;
  }

  /// Steps with the unscaled gradients. If one is not finite, it skips the step and lowers the scale. Returns whether
  /// it has stepped; true in a captured step. Throws UsageError if the last step had another optimizer, and `scale` was
  /// not called in between.
  template <std::derived_from<Optimizer<D>>... Optimizers>
  requires(sizeof...(Optimizers) > 0) bool step(Optimizers&... optimizers) {
    note_step({static_cast<const Optimizer<D>*>(&optimizers)...});
    const bool finite = unscaled_ ? finite_ : unscale();
    unscaled_ = false;
    change([&] { scale_.step(finite, optimizers...); });
    if (!finite) (optimizers.leave_out_step(), ...);
    return finite;
  }

  /// The same for a ShardedOptimizer; all ranks step, or all skip the step. Throws UsageError after `unscale()` if
  /// ranks have parts of the averages: only `unscale(optimizer)` finds those.
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
  /// The memory of the net's hook is unchanged: the same checkpoint restores it. Files of earlier versions had no
  /// bounds: a scale beyond the options' bounds becomes the nearest within them.
  void set_state(const State& state) {
    check<UsageError>(is_scale(state.scale) && state.good_steps >= 0, "GradScaler: a state with scale ", state.scale,
                      " and ", state.good_steps, " good steps");
    scale_.set(std::clamp(state.scale, least_, most_), state.good_steps);
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

  // Lets `step()` change the scale, and multiplies the values that are kept in its unit.
  template <class Step>
  void change(const Step& step) {
    if (!follow_) return step();
    const double before = scale_.scale();
    step();
    if (const double after = scale_.scale(); after != before) follow_(after / before);
  }

  // Asks the ranks that share the parameters; does nothing if each rank has all of them.
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
    check<UsageError>(!gradients_.are_anothers(),
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
  // The same optimizer may step again: under `join`, a rank without batches has no loss to scale.
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
  std::function<void(double factor)> follow_;  // multiplies the hook's memory
  std::vector<const void*> stepped_;           // since the last `scale`
  bool unscaled_ = false, by_parameters_ = false, finite_ = true;
};

template <Device D>
GradScaler(std::vector<nn::NamedParameter<D>>, const GradScalerOptions& = {}) -> GradScaler<D>;
template <class Net>
requires requires { Net::distributed; }
GradScaler(Net&, const GradScalerOptions& = {})->GradScaler<typename Net::device_type>;

}  // namespace chorus::optim
