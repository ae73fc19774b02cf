#pragma once
/// The optimizers of random programs, and their schedules.

#include <chorus/optim/adagrad.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/lion.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/optim/schedules.hpp>
#include <functional>
#include <memory>

#include "resume_random_programs.hpp"

namespace test::random::resume {

/// Sets the rate for a step.
inline std::function<void(int)> rates(const Program& p, optim::HasLearningRate& optimizer) {
  const auto by = [&](auto formula) -> std::function<void(int)> {
    return [schedule = std::make_shared<optim::Schedule<decltype(formula)>>(optimizer, formula)](int step) {
      schedule->set_epoch(step);
    };
  };
  switch (p.rate) {
    case Rate::decay:
      return by(optim::StepDecay{.step_size = 2, .gamma = 0.5});
    case Rate::milestones:
      return by(optim::MultiStepDecay{.milestones = {1, 3, 4}, .gamma = 0.5});
    case Rate::exponential:
      return by(optim::ExponentialDecay{});
    case Rate::ramp:
      return by(optim::LinearRamp{.total = 3});
    case Rate::cosine:
      return by(optim::CosineAnnealing{.t_max = 6, .eta_min = 1e-4});
    case Rate::warmup:
      return by(optim::Warmup{optim::CosineAnnealing{.t_max = 4}, 2});
    case Rate::one_cycle:
      return by(optim::OneCycle{.max_lr = 0.05, .total = 8});
    default:
      return [](int) {};
  }
}

inline const optim::SgdOptions sgd{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01};
inline const optim::AdamOptions adam{.lr = 0.01, .weight_decay = 0.01, .amsgrad = true};

inline std::unique_ptr<optim::Optimizer<Cpu>> plain_optimizer(Rule rule,
                                                              std::vector<nn::NamedParameter<Cpu>> parameters) {
  using namespace optim;
  switch (rule) {
    case Rule::sgd:
      return std::make_unique<Sgd<Cpu>>(std::move(parameters), sgd);
    case Rule::adam:
      return std::make_unique<Adam<Cpu>>(std::move(parameters), adam);
    case Rule::adamw:
      return std::make_unique<AdamW<Cpu>>(std::move(parameters), AdamOptions{.lr = 0.01, .weight_decay = 0.1});
    case Rule::lion:
      return std::make_unique<Lion<Cpu>>(std::move(parameters), LionOptions{.lr = 0.005, .weight_decay = 0.1});
    case Rule::rmsprop:
      return std::make_unique<RmsProp<Cpu>>(std::move(parameters),
                                            RmsPropOptions{.lr = 0.003, .momentum = 0.5, .centered = true});
    case Rule::adagrad:
      return std::make_unique<Adagrad<Cpu>>(std::move(parameters), AdagradOptions{.lr = 0.02, .lr_decay = 0.1});
    case Rule::lamb:
      return std::make_unique<Lamb<Cpu>>(std::move(parameters), LambOptions{.lr = 0.02});
    case Rule::lars:
      return std::make_unique<Lars<Cpu>>(std::move(parameters), LarsOptions{.lr = 0.5});
  }
  return {};
}

}  // namespace test::random::resume
