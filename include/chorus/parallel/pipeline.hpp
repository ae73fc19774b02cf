#pragma once
/// Pipeline: each rank holds a part of the model, a stage, and micro-batches go through the stages one behind the
/// other, so that all ranks compute at the same time.

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

/// The whole batch is on every rank: samplers are the same, and the first stage takes its inputs, the last one its
/// targets. `Order` says in which order micro-batches go: OneForwardOneBackward, GPipe, Interleaved<v>, ZeroBubbleH1,
/// or a type of your own whose `of(p, m)` gives a Schedule.
///
/// A model that returns its loss, `net(x, y)`, goes through the whole schedule in that call, gradients included, and
/// `loss.backward()` adds them to the parameters', times its seed. Of a model that returns its output, `net(x)` is all
/// forwards, and the backward pass of what is made of it all backwards: the loop of other policies, and GPipe's memory.
/// Either way loss or output are on all ranks, and parameters are those of one device, up to rounding, dropout
/// included. A loss is made of means over samples, or over tokens that count, and of sums over the batch; of several
/// that micro-batches divide in different ways a mean over tokens needs its `mean_over`. BatchNorm takes the statistics
/// of each micro-batch, and differs; SyncBatchNorm is refused. `parameters()` are the model's; of those of other stages
/// a rank has no number, and optimizers, groups, averages of such take part with nothing. Who reads them in `module()`
/// gets a UsageError.
template <class Model, class Order, class Communicator>
class Pipeline : public WholeBatchPolicy<pipeline::StagedModel<Model, Order, Communicator>, Communicator> {
  using Staged = pipeline::StagedModel<Model, Order, Communicator>;
  using Base = WholeBatchPolicy<Staged, Communicator>;

 public:
  using D = typename Base::device_type;
  using model_type = Model;
  using policy_type = Pipeline;
  static constexpr const char* name = "pipeline";
  /// The same policy around another model, which is a chain, too, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = Pipeline<Other, Order, Communicator>;

  /// Takes rank 0's numbers. Throws UsageError, on every rank, where the ranks' models or options differ, and for a cut
  /// that doesn't fit. `world` is what the communicator was connected with; it must outlive this.
  Pipeline(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options = {},
           std::uint64_t seed = initial_seed())
      : Base("Pipeline", detail::with_numbers(Staged(std::move(model), communicator, world, options)), communicator,
             seed),
        handles_(this->model_) {
    stages().decide_together(communicator, this->alive());
    // Of the whole model, so that all ranks count what is written to any stage.
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

  /// The same for a model that is made here, of which each rank draws its stages alone: no rank ever holds the whole.
  template <class... Arguments, class... More>
  explicit Pipeline(const Deferred<Model, Arguments...>& model, More&&... more)
      : Pipeline(detail::Making<Model>(model).take(), std::forward<More>(more)...) {}

  /// The loss, or the output, of the whole batch; the same on all ranks, which all call it. `x` and the targets that
  /// have as many samples are cut into micro-batches, also within tuples and structs with `fields()`; each micro-batch
  /// has all of what is `whole(y)` or of another size. See DataParallel for what is in doubt.
  template <class X, class... Targets>
  auto operator()(const X& x, const Targets&... targets) {
    handles_.check_kept(this->model_);
    this->compare_programs();
    const RandomScope random(this->begin_forward());
    const detail::WatchScope watch(this->watch_once());
    auto result = this->model_(this->on_model_device(x), this->on_model_device(targets)...);
    this->end_forward();
    return result;
  }

  const PipelineOptions& options() const { return stages().options(); }
  /// The whole model, of which this rank can read its stages' numbers.
  Model& module() { return stages().model(); }
  const Model& module() const { return stages().model(); }
  /// The layer that each stage begins with, counted as in At, and the number of layers.
  const std::vector<std::size_t>& stage_begins() const { return stages().stage_begins(); }

  /// This rank's parameters first, as they lie in memory.
  std::vector<nn::NamedParameter<D>> parameters() const { return stages().with_elsewhere(Base::parameters()); }

  /// For files, which all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool, bool) const { return true; }
  /// See Policy::gathered. There is memory for the whole model meanwhile.
  template <class F>
  void gathered(const F& f) {
    this->meet();
    stages().gathered(f);
  }

 private:
  pipeline::Stages<Model, Order, Communicator>& stages() const { return this->model_.stages(); }

  detail::ModelHandles handles_;
};

}  // namespace chorus
