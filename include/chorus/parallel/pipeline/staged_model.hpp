#pragma once
/// A model in stages: each rank has some, and its forward pass is collective.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/random.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/parallel/pipeline/check_schedule.hpp>
#include <chorus/parallel/pipeline/pass.hpp>
#include <chorus/parallel/pipeline/pass_gradients.hpp>
#include <chorus/parallel/pipeline/stages.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// A model type for policies: they see this rank's stages, and a call is a pass of the whole batch through all stages.
/// Policies of several processes can divide batches between groups of ranks with a pipeline each.
template <class Model, class Order, class Communicator = comm::AnyCommunicator>
class StagedModel : public nn::Module {
 public:
  using Stages = pipeline::Stages<Model, Order, Communicator>;
  using device_type = typename Stages::D;
  using D = device_type;

  /// Takes rank 0's parameters: see Pipeline. Communicator and world must outlive this.
  StagedModel(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options)
      : stages_(std::make_shared<Stages>(std::move(model), communicator, world, options)) {}

  Stages& stages() const { return *stages_; }
  void visit(nn::Visitor& visitor) override {
    visitor.inner(stages_->model());
    stages_->visit(visitor);
  }
  std::string describe() const override { return stages_->model().describe(); }

  /// Returns the loss, or the output, of the whole batch, the same on all ranks. All ranks call it, in a policy's pass.
  template <class X, class... Targets>
  auto forward(const X& x, const Targets&... targets) const {
    if constexpr (requires { Model::pipeline_names; })
      return pass(
          stages_->options().micro_batches,
          [](const auto& facts) {
            return std::make_unique<pipeline::PassGradients<D>>(facts.parameters, facts.split.batch);
          },
          x, targets...);
    else
      return Variable<float, 0, D>();  // so that the missing CHORUS_PIPELINE is the only error
  }
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return forward(inputs...);
  }

  /// The same in at most `micro_batches`, whose gradients and losses `make_sums(facts)` adds up: a pointer to
  /// PassGradients, or to a class with the same members. `facts`: PassFacts.
  template <class MakeSums, class... Inputs>
  auto pass(int micro_batches, const MakeSums& make_sums, const Inputs&... inputs) const {
    using Sums = typename std::invoke_result_t<MakeSums, const PassFacts<Model>&>::element_type;
    using Pass = pipeline::Pass<Model, Sums, Inputs...>;
    RandomContext* const random = chorus::detail::random_context();
    check<UsageError>(random != nullptr, "Pipeline: call the net, not its module()");
    // 1. The batch is cut into micro-batches; the schedule's table lists the actions of each rank.
    const auto split = stages_->split(micro_batches, inputs...);
    const Schedule& schedule = stages_->schedule_for(static_cast<int>(split.devices));
    return stages_->or_all_end([&] {
      const auto facts = stages_->facts(schedule, *random, split);
      const auto batch = std::make_shared<Pass>(facts, make_sums(facts), inputs...);
      // 2. If the model returns its loss, backward runs within the schedule; otherwise it waits for the loss.
      const bool goes_back = Pass::gives_loss && batch->recorded();
      if (goes_back) batch->sums().begin_backward(/*in_forward=*/true);
      for (const Action& action : stages_->own_actions(schedule))
        if (goes_back || action.kind == Kind::forward) act(*stages_, *batch, action);
      batch->sums().forward_ended();
      if (goes_back) batch->sums().end_backward(stages_->tied());
      // 3. All ranks get the last stage's result.
      auto shared = stages_->share_result(schedule, *batch);
      random->drew = random->drew || shared.drew;
      return on_tape(schedule, batch, std::move(shared));
    });
  }

 private:
  using Action = Schedule::Action;
  using Kind = Schedule::Kind;

  template <class Pass>
  static void act(Stages& stages, Pass& batch, const Action& action) {
    stages.at_stage(action.stage);
    switch (action.kind) {
      case Kind::forward:
        return batch.forward(action);
      case Kind::backward:
        return batch.backward(action);
      case Kind::weight:
        return batch.weight(action);
    }
  }

  template <class Pass, class Shared>
  auto on_tape(const Schedule& schedule, const std::shared_ptr<Pass>& batch, Shared shared) const {
    using Result = typename Pass::Result;
    if constexpr (AnyTensor<Result>) {
      return std::move(shared.value);
    } else {
      if (!batch->recorded() || !shared.wants_grad) return Result(std::move(shared.value));
      const auto node = batch->sums().template node<Pass::gives_loss>(shared.value,
                                                                      way_back(schedule, batch, shared.correction));
      using Loss = LossWeights::Description;
      if (Pass::gives_loss && shared.loss.kind == Loss::mean) node->set_mean(shared.loss.total, true);
      if (Pass::gives_loss && shared.loss.kind == Loss::sum) node->set_sum(shared.loss.divisor, shared.loss.counted);
      return Result(std::move(shared.value), Ref<typename Result::node_type>(node.get()));
    }
  }

  // 4. The user's backward pass, when it reaches the net's result.
  template <class Pass>
  auto way_back(const Schedule& schedule, const std::shared_ptr<Pass>& batch,
                [[maybe_unused]] double correction) const {
    using Gradient = tensor_of<typename Pass::Result>;
    const auto check_alive = [alive = stages_->alive()] {
      check<UsageError>(!alive.expired(), "Pipeline: the net of this output was destroyed before backward");
    };
    if constexpr (Pass::gives_loss) {
      return [check_alive, batch, correction](const Gradient& gradient, bool) {
        check_alive();
        batch->sums().add_to_parameters(static_cast<double>(gradient.item()) * correction);
      };
    } else {
      return [stages = stages_.get(), check_alive, batch, &schedule](const Gradient& gradient, bool keep) {
        check_alive();
        check<UsageError>(!keep, "Pipeline: retain_graph needs a model that returns its loss");
        stages->or_all_end([&] {
          batch->take_result_gradient(gradient);
          batch->sums().begin_backward(/*in_forward=*/false);
          for (const Action& action : stages->own_actions(schedule))
            if (action.kind != Kind::forward) act(*stages, *batch, action);
          batch->sums().end_backward(stages->tied());
          stages->flush();
        });
        batch->sums().add_to_parameters(1);
      };
    }
  }

  std::shared_ptr<Stages> stages_;
};

}  // namespace chorus::pipeline
