#pragma once
/// Pipeline: each rank holds a part of the model, a stage. Micro-batches pass the stages one after the other, so that
/// all ranks compute at the same time.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/io/write_in_parts.hpp>
#include <chorus/nn/deferred.hpp>
#include <chorus/parallel/ddp/rank_device.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/model_handles.hpp>
#include <chorus/parallel/pipeline/staged_model.hpp>
#include <chorus/parallel/whole_batch_policy.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// Every rank gets the whole batch from the same sampler; the first stage reads its inputs, the last one its targets.
/// `Order` gives the schedule: OneForwardOneBackward, GPipe, Interleaved<v>, ZeroBubbleH1, or a type of your own whose
/// `of(p, m)` returns a Schedule.
///
/// If the model returns its loss, `net(x, y)` runs the whole schedule, gradients included, and `loss.backward()` adds
/// these, times its seed, to the parameters' gradients. If it returns its output, `net(x)` runs all forwards, and
/// backward of the loss runs all backwards: the loop of other policies, with GPipe's memory. In both cases all ranks
/// have the loss or output, and parameters are those of one device, up to rounding, dropout included. A loss may
/// consist of means over samples or counted tokens and of sums over the batch; if micro-batches divide several terms in
/// different ways, a mean over tokens needs `mean_over`. BatchNorm uses each micro-batch's statistics, so it differs;
/// SyncBatchNorm is refused. `parameters()` are the whole model's: optimizers, groups and averages treat those of other
/// stages as empty. Reading them in `module()` throws UsageError.
template <class Model, class Order, class Communicator>
class Pipeline : public WholeBatchPolicy<pipeline::StagedModel<Model, Order, Communicator>, Communicator> {
  using Staged = pipeline::StagedModel<Model, Order, Communicator>;
  using Base = WholeBatchPolicy<Staged, Communicator>;

 public:
  using D = typename Base::device_type;
  using model_type = Model;
  using policy_type = Pipeline;
  static constexpr const char* name = "pipeline";
  /// The same policy around another chain model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = Pipeline<Other, Order, Communicator>;

  /// Takes rank 0's parameters. Throws UsageError, on every rank, if the ranks' models or options differ or the cut
  /// doesn't fit. The communicator was connected from `world` and must outlive this.
  Pipeline(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options = {},
           std::uint64_t seed = initial_seed())
      : Base("Pipeline", detail::with_numbers(Staged(std::move(model), communicator, world, options)), communicator,
             seed),
        handles_(this->model_) {
    stages().decide_together(communicator, this->alive());
    // Of the whole model, so that all ranks count writes to any stage.
    this->program_.listen(nn::named_parameters<D>(module()), nn::named_buffers<D>(module()),
                          {.zero_grad = false, .all_parameters = false});
    for (const auto& named : parameters()) named.parameter->set_ledger(this->program_.ledger());
  }
  /// For `launch`: takes communicator and seed from `run`.
  template <class Run>
  requires requires(Run& run) { run.communicator(); }
  Pipeline(Model model, Run& run, const PipelineOptions& options = {})
      : Pipeline(detail::RankDevice<D>(run).place(std::move(model)), run.communicator(), run.world(), options,
                 run.seed()) {
    run.check_options();
  }

  /// The same for a model that is constructed here: each rank draws only its own stages; no rank ever holds the whole.
  template <class... Arguments, class... More>
  explicit Pipeline(const Deferred<Model, Arguments...>& model, More&&... more)
      : Pipeline(detail::Making<Model>(model).take(), std::forward<More>(more)...) {}

  /// Returns the loss, or the output, of the whole batch, the same on all ranks. All ranks call it. `x`, and targets
  /// with as many samples, are cut into micro-batches, also within tuples and structs with `fields()`. Each micro-batch
  /// gets all of `whole(y)` and of a tensor with another size. See DataParallel for ambiguous sizes.
  template <class X, class... Targets>
  auto operator()(const X& x, const Targets&... targets) {
    return pass_of([this](const auto&... inputs) { return this->model_.forward(inputs...); }, x, targets...);
  }

  const PipelineOptions& options() const { return stages().options(); }
  /// The whole model; this rank may read only its own stages' numbers.
  Model& module() { return stages().model(); }
  const Model& module() const { return stages().model(); }
  /// The number of each stage's first layer, counted as in At, and the number of layers.
  const std::vector<std::size_t>& stage_begins() const { return stages().stage_begins(); }

  /// This rank's parameters come first, in memory order.
  std::vector<nn::NamedParameter<D>> parameters() const { return stages().with_elsewhere(Base::parameters()); }

  /// For files that all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool, bool) const { return true; }
  /// See Policy::gathered. Needs memory for the whole model.
  template <class F>
  void gathered(const F& f) {
    this->meet();
    stages().gathered(f);
  }

 protected:
  /// A forward pass, in which `call(inputs...)` returns the staged model's result.
  template <class Call, class... Inputs>
  auto pass_of(const Call& call, const Inputs&... inputs) {
    handles_.check_kept(this->model_);
    this->compare_programs();
    const RandomScope random(this->begin_forward());
    const detail::WatchScope watch(this->watch_once());
    auto result = call(this->on_model_device(inputs)...);
    this->end_forward();
    return result;
  }
  pipeline::Stages<Model, Order, Communicator>& stages() const { return this->model_.stages(); }

 private:
  detail::ModelHandles handles_;
};

}  // namespace chorus
