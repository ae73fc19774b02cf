#pragma once
/// One batch on its way through a pipeline: what this rank's stages keep of its micro-batches, and what an action does.

#include <chorus/autograd/deferred.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/share_tree.hpp>
#include <chorus/parallel/pipeline/chain.hpp>
#include <chorus/parallel/pipeline/loss_weights.hpp>
#include <chorus/parallel/pipeline/pass_gradients.hpp>
#include <chorus/parallel/pipeline/schedule.hpp>
#include <chorus/parallel/pipeline/wires.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// Layers that want the whole batch's statistics say so here.
struct NoWholeBatch final : BatchGroup {
  void sum(std::span<double>) override {
    fail<UsageError>(
        "Pipeline: SyncBatchNorm in training needs the whole batch at once, and stages see one "
        "micro-batch after the other: expected nn::BatchNorm, which takes each micro-batch's statistics, or a norm "
        "without any, such as nn::GroupNorm or nn::LayerNorm");
  }
  double weight() override { return 1; }
};

/// What a pass works with. What is passed by reference outlives it.
template <class Model>
struct PassFacts {
  using D = typename Model::device_type;
  const Model& model;
  const std::vector<Stage>& stages;
  const Schedule& schedule;
  Wires<D>& wires;
  const nn::FlatParameters<D>& flat;
  RandomContext random;  ///< of the pass
  Index samples;
  D device;
};

template <class Model, class X, class... Targets>
class Pass {
 public:
  using D = typename Model::device_type;
  using Chain = pipeline::Chain<Model, X, Targets...>;
  using Result = typename Chain::Result;
  static_assert(Operand<Result>, "Pipeline: the model returns a Tensor or a Variable: its loss, or its output");
  using Action = Schedule::Action;
  /// Whether the model returns its loss.
  static constexpr bool gives_loss = tensor_of<Result>::rank == 0;

  using Facts = PassFacts<Model>;

  Pass(const Facts& facts, const X& x, const Targets&... targets)
      : facts_(facts),
        x_(x),
        targets_(targets...),
        recorded_(grad_enabled()),
        weights_(facts.samples),
        kept_(static_cast<std::size_t>(facts.schedule.stages * facts.schedule.micro_batches)),
        results_(static_cast<std::size_t>(facts.schedule.micro_batches)) {
    if (recorded_) gradients_.emplace(facts.flat);
  }

  /// Receives a stage's input, runs the stage, and sends its output on.
  void forward(const Action& action) {
    const bool first = action.stage == 0, last = action.stage + 1 == facts_.schedule.stages;
    const Stage& stage = facts_.stages[static_cast<std::size_t>(action.stage)];
    Header header{.micro_batch = action.micro_batch, .stage = action.stage};
    auto input =
        first ? std::make_shared<Activation<X>>(rows(x_, action.micro_batch))
              : facts_.wires.receive(Direction::forward, action.stage, action.micro_batch, [&](const Header& received) {
                  header = received;
                  return Chain::room_for(stage, received, facts_.device);
                });
    auto [output, result] = run(stage, action.micro_batch, *input, header);
    if (last) {
      drew_ = drew_ || header.drew != 0;
      if constexpr (gives_loss) weigh(action.micro_batch, *result);
      results_[static_cast<std::size_t>(action.micro_batch)] = std::move(result);
    } else {
      Header next = output->header();
      next.micro_batch = action.micro_batch;
      next.stage = action.stage + 1;
      next.next_operation = header.next_operation;
      next.drew = header.drew;
      facts_.wires.send(Direction::forward, rank_of(action.stage + 1), next, output);
    }
    if (recorded_) kept(action) = {std::move(input), std::move(output), {}};
  }

  /// Receives the gradient by a stage's output, goes back through the stage, and sends the gradient by its input on.
  void backward(const Action& action) {
    Kept& here = kept(action);
    here.later.input = nullptr;
    const bool last = action.stage + 1 == facts_.schedule.stages;
    if (!last && here.output->header().wants_grad != 0)
      facts_.wires.receive(Direction::backward, action.stage, action.micro_batch,
                           [&](const Header&) { return here.output; });
    {
      const detail::DeferralScope put_off(splits_ ? &here.later : nullptr);
      here.later.input = here.input->node();
      if (last)
        result_goes_back(action.micro_batch);
      else if (here.output->header().wants_grad != 0)
        here.output->backward();
    }
    here.output = nullptr;
    if (here.input->header().wants_grad != 0) {
      Header header = here.input->header();
      header.micro_batch = action.micro_batch;
      header.stage = action.stage - 1;
      facts_.wires.send(Direction::backward, rank_of(action.stage - 1), header, std::move(here.input));
    }
    here.input = nullptr;
  }

  /// What `backward` has put off.
  void weight(const Action& action) {
    const NoGrad no_grad;
    kept(action).later.run();
  }

  bool recorded() const { return recorded_; }
  bool drew() const { return drew_; }
  bool loss_wants_grad() const { return loss_wants_grad_; }
  const LossWeights& weights() const { return weights_; }
  PassGradients<D>& gradients() { return *gradients_; }
  std::vector<std::optional<Result>>& results() { return results_; }
  Index begin(int micro_batch) const {
    return share_begin(facts_.samples, static_cast<std::size_t>(facts_.schedule.micro_batches),
                       static_cast<std::size_t>(micro_batch));
  }
  Index size(int micro_batch) const { return begin(micro_batch + 1) - begin(micro_batch); }

  /// On the last rank: the gradient by what the model returned for the whole batch.
  void take_result_gradient(const tensor_of<Result>& gradient) { result_gradient_ = gradient; }

 private:
  using Direction = typename Wires<D>::Direction;
  struct Kept {
    std::shared_ptr<AnyActivation<D>> input, output;
    detail::DeferredGradients later;
  };

  Kept& kept(const Action& action) {
    return kept_[static_cast<std::size_t>(action.stage * facts_.schedule.micro_batches + action.micro_batch)];
  }
  int rank_of(int stage) const { return facts_.schedule.rank_of(stage); }

  // A micro-batch's rows; what has no axes goes to each as it is.
  template <class Input>
  Input rows(const Input& input, int micro_batch) const {
    if constexpr (AnyTensor<Input>)
      if constexpr (Input::rank > 0) return contiguous(input.slice(0, begin(micro_batch), begin(micro_batch + 1)));
    return input;
  }

  // The model's layers draw the numbers that they draw on one device: by the samples' places in the whole batch, and by
  // the number of random operations in the stages before.
  typename Chain::Outcome run(const Stage& stage, int micro_batch, const AnyActivation<D>& input, Header& header) {
    RandomContext random = facts_.random;
    random.next_operation = header.next_operation;
    random.samples = size(micro_batch);
    random.first_sample = [first = begin(micro_batch)] { return first; };
    random.devices = 2;  // what has other rows than samples is the same for all micro-batches
    const RandomScope numbers(random);
    const BatchGroupScope group(whole_batch_);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    std::optional<typename PassGradients<D>::Scope> stand_ins;
    if (recorded_) stand_ins.emplace(*gradients_);
    auto outcome = std::apply(
        [&](const auto&... targets) { return Chain::run(facts_.model, stage, input, rows(targets, micro_batch)...); },
        targets_);
    header.next_operation = random.next_operation;
    header.drew = header.drew != 0 || random.drew;
    return outcome;
  }

  // Of a model that returns its loss: the loss's part in the batch's is where backward begins.
  void weigh(int micro_batch, const Result& loss) {
    const auto node = node_of(loss);
    loss_wants_grad_ = loss_wants_grad_ || static_cast<bool>(node);
    const double weight =
        weights_.add(recorded_ ? node.get() : nullptr, static_cast<double>(value_of(loss).item()), size(micro_batch));
    using T = typename tensor_of<Result>::value_type;
    if (recorded_ && node) node->add(Tensor<T, 0, D>::full({}, static_cast<T>(weight), facts_.device));
  }

  void result_goes_back([[maybe_unused]] int micro_batch) {
    auto& result = results_[static_cast<std::size_t>(micro_batch)];
    if constexpr (AnyVariable<Result>) {
      const auto node = result->node();
      if (node) {
        if constexpr (!gives_loss) node->add(contiguous(rows_of_result(micro_batch)));
        const Ref<Node> root = node;
        run_backward({&root, 1}, {.hooks = false});
      }
    }
    result.reset();
  }
  // The result may have several rows of each sample.
  auto rows_of_result(int micro_batch) const {
    const Index of_sample = facts_.samples == 0 ? 1 : result_gradient_.size(0) / facts_.samples;
    return result_gradient_.slice(0, begin(micro_batch) * of_sample, begin(micro_batch + 1) * of_sample);
  }

  const Facts facts_;
  const X x_;
  const std::tuple<Targets...> targets_;
  const bool recorded_;
  const bool splits_ = facts_.schedule.splits_backward();
  LossWeights weights_;
  std::optional<PassGradients<D>> gradients_;
  std::vector<Kept> kept_;  // by stage and micro-batch
  std::vector<std::optional<Result>> results_;
  tensor_of<Result> result_gradient_;
  bool drew_ = false, loss_wants_grad_ = false;
  std::shared_ptr<BatchGroup> whole_batch_ = std::make_shared<NoWholeBatch>();
};

}  // namespace chorus::pipeline
