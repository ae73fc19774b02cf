#pragma once
/// Pipeline: each rank holds a part of the model, a stage, and micro-batches go through the stages one behind the
/// other, so that all ranks compute at the same time.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/parallel/ddp/rank_device.hpp>
#include <chorus/parallel/pipeline/check_schedule.hpp>
#include <chorus/parallel/pipeline/pass.hpp>
#include <chorus/parallel/pipeline/pass_node.hpp>
#include <chorus/parallel/pipeline/stages.hpp>
#include <chorus/parallel/policy.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// The whole batch is on every rank: samplers are the same, and the first stage takes its inputs, the last one its
/// targets. `Order` says in which order micro-batches go: OneForwardOneBackward, GPipe, Interleaved<v>, ZeroBubbleH1,
/// or a type of your own whose `of(p, m)` gives a Schedule.
///
/// A model that returns its loss, `net(x, y)`, goes through the whole schedule in that call, gradients included, and
/// `loss.backward()` adds them to the parameters', times its seed. Of a model that returns its output, `net(x)` is all
/// forwards, and the backward pass of what is made of it all backwards: the loop of other policies, and GPipe's memory.
/// Either way loss or output are on all ranks, and parameters are those of one device, up to rounding, dropout
/// included. A loss is a mean over samples or over tokens that count; in the model its `mean_over` is refused, for each
/// micro-batch's loss says by itself what it is a mean of. BatchNorm takes the statistics of each micro-batch, and
/// differs; SyncBatchNorm is refused. A rank's `parameters()` are those of its stages: others are not in its memory,
/// and who reads them gets a UsageError.
template <class Model, class Order = OneForwardOneBackward, class Communicator = comm::AnyCommunicator>
class Pipeline : public pipeline::Stages<Model, Order, Communicator> {
  using Base = pipeline::Stages<Model, Order, Communicator>;

 public:
  using typename Base::D;
  using policy_type = Pipeline;
  static constexpr const char* name = "pipeline";

  /// Takes rank 0's numbers. Throws UsageError, on every rank, where the ranks' models or options differ, and for a cut
  /// that doesn't fit. `world` is what the communicator was connected with; it must outlive this.
  Pipeline(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options = {},
           std::uint64_t seed = initial_seed())
      : Base(std::move(model), communicator, world, options, seed) {}
  /// For `launch`: takes communicator and seed from `run`.
  template <class Run>
  requires requires(Run& run) { run.communicator(); }
  Pipeline(Model model, Run& run, const PipelineOptions& options = {})
      : Pipeline(detail::RankDevice<D>(run).place(std::move(model)), run.communicator(), run.world(), options,
                 run.seed()) {
    run.check_options();
  }

  /// The loss, or the output, of the whole batch; the same on all ranks, which all call it.
  template <class X, class... Targets>
  auto operator()(const X& x, const Targets&... targets) {
    if constexpr (requires { Model::pipeline_names; })
      return pass(this->on_model_device(x), this->on_model_device(targets)...);
    else
      return Variable<float, 0, D>();  // nothing but the sentence about CHORUS_PIPELINE is an error then
  }

 private:
  using Action = Schedule::Action;
  using Kind = Schedule::Kind;

  template <class... Inputs>
  auto pass(const Inputs&... inputs) {
    using Pass = pipeline::Pass<Model, Inputs...>;
    // 1. The batch becomes micro-batches, of which the schedule's table says who does what with them, and when.
    const Index samples = this->samples_of(inputs...);
    const Schedule& schedule = this->schedule_for(samples);
    auto& random = this->begin_forward(samples);
    return this->or_all_end([&] {
      const detail::WatchScope watch(this->watch_once());
      const auto batch = std::make_shared<Pass>(this->facts(schedule, random, samples), inputs...);
      // 2. Where the model returns its loss, backward begins within the schedule; else it has to wait for the loss.
      const bool goes_back = Pass::gives_loss && batch->recorded();
      for (const Action& action : this->own_actions(schedule))
        if (goes_back || action.kind == Kind::forward) act(*batch, action);
      if (goes_back) batch->gradients().sum_tied(this->tied());
      // 3. All ranks have what the last stage has.
      return on_tape(schedule, batch, this->share_result(schedule, *batch));
    });
  }

  template <class Pass>
  void act(Pass& batch, const Action& action) {
    this->at_stage(action.stage);
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
  auto on_tape(const Schedule& schedule, const std::shared_ptr<Pass>& batch, Shared shared) {
    using Result = typename Pass::Result;
    if constexpr (AnyTensor<Result>) {
      return std::move(shared.value);
    } else {
      if (!batch->recorded() || !shared.wants_grad) return Result(std::move(shared.value));
      std::vector<Ref<Node>> leaves;
      batch->gradients().for_each_leaf([&](Node& leaf) { leaves.emplace_back(&leaf); });
      using T = typename tensor_of<Result>::value_type;
      using Made = pipeline::PassNode<T, tensor_of<Result>::rank, D>;
      Ref<typename Result::node_type> node(
          new Made(shared.value, std::move(leaves), way_back(schedule, batch, shared.correction)));
      return Result(std::move(shared.value), std::move(node));
    }
  }

  // 4. What the user's backward pass does when it comes to the net's result.
  template <class Pass>
  auto way_back(const Schedule& schedule, const std::shared_ptr<Pass>& batch, [[maybe_unused]] double correction) {
    using Gradient = tensor_of<typename Pass::Result>;
    const auto check_alive = [alive = this->alive()] {
      check<UsageError>(!alive.expired(), "Pipeline: the net whose result goes backward is gone");
    };
    if constexpr (Pass::gives_loss) {
      return [check_alive, batch, correction](const Gradient& gradient, bool) {
        check_alive();
        batch->gradients().add_to_parameters(static_cast<double>(gradient.item()) * correction);
      };
    } else {
      return [this, check_alive, batch, &schedule](const Gradient& gradient, bool keep) {
        check_alive();
        check<UsageError>(!keep, "Pipeline: retain_graph needs a model that returns its loss");
        this->or_all_end([&] {
          batch->take_result_gradient(gradient);
          for (const Action& action : this->own_actions(schedule))
            if (action.kind != Kind::forward) act(*batch, action);
          batch->gradients().sum_tied(this->tied());
          this->flush();
        });
        batch->gradients().add_to_parameters(1);
      };
    }
  }
};

}  // namespace chorus
