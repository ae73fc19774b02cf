#pragma once
/// Optimizers that step in backward: each parameter changes as soon as its averaged gradient arrives.

#include <algorithm>
#include <chorus/core/while_alive.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/parallel/access.hpp>
#include <chorus/parallel/ddp/step_in_backward.hpp>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace chorus {

/// An optimizer of type `Opt` for each parameter of a DistributedDataParallel net, which steps it during backward,
/// while its gradient is in the cache and other buckets are being sent. The training loop stays the same: `step()` has
/// nothing left to do. It excludes everything that needs all gradients before a step: clipping, NonFinite policies,
/// several backward passes per step (except under no_sync). Under other policies nothing overlaps, and `step()` steps.
///
///   ch::FusedOptimizer<ch::optim::Sgd<ch::Cpu>> optimizer{net, {.lr = 0.1, .momentum = 0.9}};
template <class Opt>
class FusedOptimizer : public optim::HasLearningRate {
  using D = decltype(std::declval<const Opt&>().device());

 public:
  /// Steps all parameters of `net` as long as it lives. Throws UsageError if another optimizer does so already, and
  /// under SameBits.
  template <class Net>
  FusedOptimizer(Net& net, const typename Opt::options_type& options)
      : HasLearningRate(options.lr), options_(options), parameters_(net.parameters()) {
    for (const auto& named : parameters_) optimizers_.push_back(std::make_unique<Opt>(std::vector{named}, options));
    const auto while_there = [&net](auto call) {
      return detail::while_alive("FusedOptimizer", net.alive(), std::move(call));
    };
    check_there_ = while_there([] {});
    if constexpr (requires { detail::access_to(net).step_in_backward({}); }) {
      check<UsageError>(
          !Net::adds_up_in_pass,
          "FusedOptimizer: under SameBits gradients are complete only after backward: expected the plain optimizer");
      step_in_backward(net);
      step_ = check_there_;
      remove_ = [&net, alive = net.alive()] {
        if (!alive.expired()) detail::access_to(net).step_in_backward({});
      };
    } else {
      for (std::size_t i = 1; i < optimizers_.size(); ++i) optimizers_[i]->keep_quiet();
      step_ = while_there([this] {
        for (auto& optimizer : optimizers_) step_one(*optimizer);
      });
    }
  }
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;
  ~FusedOptimizer() {
    if (remove_) remove_();
  }

  /// Does nothing if backward has stepped. Throws UsageError if the net has been destroyed.
  void step() { step_(); }
  /// Forgets all gradients.
  void zero_grad() {
    for (auto& optimizer : optimizers_) optimizer->zero_grad();
  }
  /// See Optimizer::set_group.
  template <class Chosen>
  void set_group(const Chosen& chosen, const optim::GroupOptions& options) {
    check_there_();
    Opt(parameters_, options_).set_group(chosen, options);  // throws as the plain one
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (chosen(std::as_const(parameters_[i]))) optimizers_[i]->set_group([](const auto&) { return true; }, options);
  }
  /// See Optimizer::no_decay_on_biases_and_norms.
  void no_decay_on_biases_and_norms() { set_group(optim::IsBiasOrNorm{}, {.weight_decay = 0}); }
  /// The state of all parameters, for checkpoints.
  std::vector<optim::StateTensor> state() {
    std::vector<optim::StateTensor> all;
    for (auto& optimizer : optimizers_)
      for (auto& tensor : optimizer->state()) all.push_back(std::move(tensor));
    return all;
  }
  auto device() const { return optimizers_.front()->device(); }

 private:
  template <class Net>
  void step_in_backward(Net& net) {
    using Parameter = ParameterOn<D>;
    std::vector<std::pair<const Parameter*, Opt*>> found;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      found.emplace_back(parameters_[i].parameter, optimizers_[i].get());
    std::sort(found.begin(), found.end());
    detail::access_to(net).step_in_backward([this, found = std::move(found)](const Parameter& parameter) {
      step_one(*std::lower_bound(found.begin(), found.end(), std::pair<const Parameter*, Opt*>(&parameter, nullptr))
                    ->second);
    });
  }
  void step_one(Opt& optimizer) {
    optimizer.set_lr(lr());  // a schedule sets only this object's rate
    optimizer.step();
  }

  typename Opt::options_type options_;
  std::vector<nn::NamedParameter<D>> parameters_;
  std::vector<std::unique_ptr<Opt>> optimizers_;       // one per parameter
  std::function<void()> check_there_, step_, remove_;  // functions that know the net's type
};

}  // namespace chorus
