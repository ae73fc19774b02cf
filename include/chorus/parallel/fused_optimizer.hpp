#pragma once
/// Optimizers whose step is part of backward: parameters move as soon as their averaged gradient is there.

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

/// An optimizer of type `Opt` for each parameter of a DistributedDataParallel net, which steps it in the middle of
/// backward, while its gradient is still in the cache and other buckets are under way. The training loop stays the
/// same: `step()` finds nothing left to do. What needs all gradients at once, before any step, does not go together
/// with it: clipping, NonFinite policies, several backward passes per step (but for those under no_sync). Under other
/// policies nothing is under way meanwhile, and `step()` steps.
///
///   ch::FusedOptimizer<ch::optim::Sgd<ch::Cpu>> optimizer{net, {.lr = 0.1, .momentum = 0.9}};
template <class Opt>
class FusedOptimizer : public optim::HasLearningRate {
  using D = decltype(std::declval<const Opt&>().device());

 public:
  /// Steps all parameters of `net`, as long as that lives. Throws UsageError where another optimizer does so,
  /// and under SameBits.
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

  /// Nothing where backward has done it. Throws UsageError where the net is gone.
  void step() { step_(); }
  /// Forgets all gradients.
  void zero_grad() {
    for (auto& optimizer : optimizers_) optimizer->zero_grad();
  }
  /// See Optimizer::set_group.
  template <class Chosen>
  void set_group(const Chosen& chosen, const optim::GroupOptions& options) {
    check_there_();
    Opt(parameters_, options_).set_group(chosen, options);  // throws what the plain one does
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
    optimizer.set_lr(lr());  // a schedule knows this object alone
    optimizer.step();
  }

  typename Opt::options_type options_;
  std::vector<nn::NamedParameter<D>> parameters_;
  std::vector<std::unique_ptr<Opt>> optimizers_;       // one for each
  std::function<void()> check_there_, step_, remove_;  // what knows the net's type
};

}  // namespace chorus
