// Optimizers on a module of one parameter, learning rate schedules, gradient clipping.
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/optim/adagrad.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/lbfgs.hpp>
#include <chorus/optim/radam.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/optim/schedules.hpp>
#include <chorus/optim/sgd.hpp>
#include <memory>

#include "case.hpp"

namespace golden {
namespace {

namespace optim = ch::optim;
using Parameters = std::vector<ch::nn::NamedParameter<Device>>;

/// Parameters p0, p1, ... as flat tensors: an optimizer sees no axes.
struct Model : ch::nn::Module {
  std::vector<ch::Parameter<float, 1, Device>> list;
  void visit(ch::nn::Visitor& visitor) override {
    for (std::size_t i = 0; i < list.size(); ++i) visitor.parameter(ch::cat("p", i), list[i]);
  }
  void add(std::span<const float> values) {
    list.emplace_back(Tensor<1>::from(values, {static_cast<Index>(values.size())}));
  }
  void set_grad(std::size_t i, std::span<const float> values) {
    list[i].zero_grad();
    list[i].as_variable().node()->add(Tensor<1>::from(values, {static_cast<Index>(values.size())}));
  }
};

void run(Case& test, Model& model, optim::Optimizer<Device>& optimizer) {
  const auto& grads = test.file("in.grads");
  const auto steps = static_cast<std::size_t>(grads.shape.at(0)), size = model.list[0].value().bytes() / sizeof(float);
  std::vector<float> after;
  for (std::size_t step = 0; step < steps; ++step) {
    model.set_grad(0, std::span(grads.f32()).subspan(step * size, size));
    optimizer.step();
    for (const float value : model.list[0].value().to_vector()) after.push_back(value);
  }
  test.compare_numbers("out.p_after", after);
}

// `make(parameters)` with the model's only parameter.
template <class Make>
void optimizer(Case& test, const Make& make) {
  Model model;
  model.add(test.file("in.p").f32());
  const auto made = make(ch::nn::named_parameters<Device>(model));
  run(test, model, *made);
}

optim::AdamOptions adam_options(const Case& test, double weight_decay) {
  const auto betas = test.attr("betas", std::vector<double>{0.9, 0.999});
  return {.lr = test.attr("lr", 1e-3),
          .beta1 = betas.at(0),
          .beta2 = betas.at(1),
          .eps = test.attr("eps", 1e-8),
          .weight_decay = test.attr("weight_decay", weight_decay),
          .amsgrad = test.attr("amsgrad", false)};
}

template <class Formula>
void schedule(Case& test, const Formula& formula) {
  optim::HasLearningRate rate(test.attr<double>("lr"));
  optim::Schedule schedule(rate, formula);
  std::vector<float> rates;
  for (std::size_t i = 0; i < test.file("out.lr").f32().size(); ++i, schedule.step())
    rates.push_back(static_cast<float>(rate.lr()));
  test.compare_numbers("out.lr", rates);
}

void clip(Case& test) {
  Model model;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : test.group("in")) {
    names.push_back(name);
    model.add(tensor->f32());
    model.set_grad(names.size() - 1, tensor->f32());
  }
  const double norm = optim::clip_grad_norm(ch::nn::named_parameters<Device>(model), test.attr<double>("max_norm"));
  test.compare_numbers("out.norm", std::vector<float>{static_cast<float>(norm)});
  for (std::size_t i = 0; i < names.size(); ++i) test.compare_numbers("out." + names[i], model.list[i].grad());
}

// Minimizes sum(w (p - t)^2 + (p - t)^4).
void lbfgs(Case& test) {
#if CHORUS_GOLDEN_ON_CPU
  Model model;
  model.add(test.file("in.p").f32());
  const auto t = test.tensor<1>("t"), w = test.tensor<1>("w");
  optim::Lbfgs<Device> optimizer(ch::nn::named_parameters<Device>(model),
                                 {.lr = test.attr<double>("lr"),
                                  .max_iter = test.attr<int>("max_iter"),
                                  .history_size = test.attr("history_size", 100)});
  std::vector<float> after;
  for (int step = 0; step < 3; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const auto squares = ch::square(model.list[0] - t);
      const auto loss = ch::sum(squares * w + ch::square(squares));
      loss.backward();
      return loss;
    });
    for (const float value : model.list[0].value().to_vector()) after.push_back(value);
  }
  test.compare_numbers("out.p_after", after);
#else
  test.leave_out(": on the CPU alone");
#endif
}

}  // namespace

void add_optimizers(Operations& operations) {
  operations["optim.sgd"] = [](Case& test) {
    optimizer(test, [&](Parameters parameters) {
      return std::make_unique<optim::Sgd<Device>>(std::move(parameters),
                                                  optim::SgdOptions{.lr = test.attr<double>("lr"),
                                                                    .momentum = test.attr("momentum", 0.0),
                                                                    .dampening = test.attr("dampening", 0.0),
                                                                    .weight_decay = test.attr("weight_decay", 0.0),
                                                                    .nesterov = test.attr("nesterov", false)});
    });
  };
  operations["optim.adam"] = [](Case& test) {
    optimizer(test, [&](Parameters parameters) {
      return std::make_unique<optim::Adam<Device>>(std::move(parameters), adam_options(test, 0));
    });
  };
  operations["optim.adamw"] = [](Case& test) {
    optimizer(test, [&](Parameters parameters) {
      return std::make_unique<optim::AdamW<Device>>(std::move(parameters), adam_options(test, 0.01));
    });
  };
  operations["optim.rmsprop"] = [](Case& test) {
    optimizer(test, [&](Parameters parameters) {
      return std::make_unique<optim::RmsProp<Device>>(
          std::move(parameters), optim::RmsPropOptions{.lr = test.attr("lr", 0.01),
                                                       .alpha = test.attr("alpha", 0.99),
                                                       .eps = test.attr("eps", 1e-8),
                                                       .weight_decay = test.attr("weight_decay", 0.0),
                                                       .momentum = test.attr("momentum", 0.0),
                                                       .centered = test.attr("centered", false)});
    });
  };
  operations["optim.adagrad"] = [](Case& test) {
    optimizer(test, [&](Parameters parameters) {
      return std::make_unique<optim::Adagrad<Device>>(
          std::move(parameters), optim::AdagradOptions{.lr = test.attr("lr", 0.01),
                                                       .lr_decay = test.attr("lr_decay", 0.0),
                                                       .eps = test.attr("eps", 1e-10),
                                                       .weight_decay = test.attr("weight_decay", 0.0)});
    });
  };
  operations["optim.radam"] = [](Case& test) {
    optimizer(test, [&](Parameters parameters) {
      const auto given = adam_options(test, 0);
      return std::make_unique<optim::RAdam<Device>>(std::move(parameters),
                                                    optim::RAdamOptions{.lr = given.lr,
                                                                        .beta1 = given.beta1,
                                                                        .beta2 = given.beta2,
                                                                        .eps = given.eps,
                                                                        .weight_decay = given.weight_decay});
    });
  };
  operations["optim.lbfgs"] = lbfgs;
  operations["schedule.plateau"] = [](Case& test) {
    optim::HasLearningRate rate(test.attr<double>("lr"));
    optim::ReduceOnPlateau schedule(rate, {.factor = test.attr<double>("factor"),
                                           .patience = test.attr<int>("patience"),
                                           .threshold = test.attr("threshold", 1e-4),
                                           .larger_is_better = test.attr<std::string>("mode", "min") == "max",
                                           .cooldown = test.attr("cooldown", 0),
                                           .min_lr = test.attr("min_lr", 0.0)});
    std::vector<float> rates;
    for (const float measure : test.file("in.measure").f32()) {
      schedule.step(static_cast<double>(measure));
      rates.push_back(static_cast<float>(rate.lr()));
    }
    test.compare_numbers("out.lr", rates);
  };
  operations["schedule.step"] = [](Case& test) {
    schedule(test, optim::StepDecay{test.attr<int>("step_size"), test.attr("gamma", 0.1)});
  };
  operations["schedule.multistep"] = [](Case& test) {
    schedule(test, optim::MultiStepDecay{test.attr<std::vector<int>>("milestones"), test.attr("gamma", 0.1)});
  };
  operations["schedule.exponential"] = [](Case& test) {
    schedule(test, optim::ExponentialDecay{test.attr<double>("gamma")});
  };
  operations["schedule.linear"] = [](Case& test) {
    schedule(test, optim::LinearRamp{test.attr("start_factor", 1.0 / 3), test.attr("end_factor", 1.0),
                                     test.attr("total_iters", 5)});
  };
  operations["schedule.cosine"] = [](Case& test) {
    schedule(test, optim::CosineAnnealing{test.attr<int>("T_max"), test.attr("eta_min", 0.0)});
  };
  operations["schedule.onecycle"] = [](Case& test) {
    schedule(test, optim::OneCycle{.max_lr = test.attr<double>("max_lr"),
                                   .total = test.attr<int>("total_steps"),
                                   .pct_start = test.attr("pct_start", 0.3),
                                   .div_factor = test.attr("div_factor", 25.0),
                                   .final_div_factor = test.attr("final_div_factor", 1e4)});
  };
  operations["clip_grad_norm"] = clip;
}

}  // namespace golden
