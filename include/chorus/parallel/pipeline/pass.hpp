#pragma once
/// One batch in a pipeline: the data of its micro-batches in this rank's stages, and the actions.

#include <algorithm>
#include <array>
#include <chorus/autograd/deferred_gradients.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/shares.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <chorus/parallel/pipeline/chain.hpp>
#include <chorus/parallel/pipeline/schedule.hpp>
#include <chorus/parallel/pipeline/wires.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// Throws an error for layers that need the whole batch's statistics.
struct NoWholeBatch final : BatchGroup {
  void sum(std::span<double>) override {
    fail<UsageError>(
        "Pipeline: SyncBatchNorm in training and of_global_batch in the model need the whole batch at once, and stages "
        "see one micro-batch after the other: expected a loss outside of the model, nn::BatchNorm with the statistics "
        "of each micro-batch, or nn::GroupNorm or nn::LayerNorm");
  }
  double weight() override { return 1; }
};

/// The data of a pass. References must outlive it.
template <class Model>
struct PassFacts {
  using D = typename Model::device_type;
  const Model& model;
  const std::vector<Stage>& stages;
  const Schedule& schedule;
  Wires<D>& wires;
  const std::vector<nn::NamedParameter<D>>& parameters;  ///< this rank's parameters
  RandomContext random;  ///< of the pass
  dp::Split split;       ///< into micro-batches; `whole` has addresses of the pass's own inputs
  D device;
};

/// `Sums`: adds up the micro-batches' gradients and losses, such as PassGradients.
template <class Model, class Sums, class X, class... Targets>
class Pass {
 public:
  using D = typename Model::device_type;
  using Chain = pipeline::Chain<Model, X, Targets...>;
  using Result = typename Chain::Result;
  static_assert(Operand<Result>,
                "Pipeline: expected a model that returns a Tensor or a Variable: its loss, or its output");
  using Action = Schedule::Action;
  /// Whether the model returns its loss.
  static constexpr bool gives_loss = tensor_of<Result>::rank == 0;

  using Facts = PassFacts<Model>;

  Pass(const Facts& facts, std::unique_ptr<Sums> sums, const X& x, const Targets&... targets)
      : facts_(facts),
        x_(x),
        targets_(targets...),
        recorded_(grad_enabled()),
        sums_(std::move(sums)),
        kept_(static_cast<std::size_t>(facts.schedule.stages * facts.schedule.micro_batches)),
        results_(static_cast<std::size_t>(facts.schedule.micro_batches)) {
    // Replace the addresses of the caller's inputs by those of the pass's own.
    std::vector<const void*> theirs, own;
    if (facts_.split.whole.empty()) return;
    (chorus::detail::for_each_tensor(targets, [&](const auto& y) { theirs.push_back(&y); }), ...);
    chorus::detail::for_each_tensor(targets_, [&](const auto& y) { own.push_back(&y); });
    for (auto& place : facts_.split.whole)
      place = own[static_cast<std::size_t>(std::find(theirs.begin(), theirs.end(), place) - theirs.begin())];
  }

  /// Receives a stage's input, runs the stage, and sends its output and the stashes for later stages.
  void forward(const Action& action) {
    const bool first = action.stage == 0, last = action.stage + 1 == facts_.schedule.stages;
    const Stage& stage = facts_.stages[static_cast<std::size_t>(action.stage)];
    Header header{.micro_batch = action.micro_batch, .stage = action.stage};
    Kept here;
    if (first) {
      here.inputs.push_back({"", std::make_shared<Activation<X>>(rows(x_, action.micro_batch))});
    } else {
      receive_input(here, header, [&](const Header& came) { return Chain::room_for(stage, came, facts_.device); });
      for (int part = 1; part <= header.stashed; ++part) {
        Header stashed = header;
        stashed.part = static_cast<std::uint8_t>(part);
        receive_input(here, stashed,
                      [&](const Header& came) { return std::make_shared<RawActivation<D>>(came, facts_.device); });
      }
    }
    if (action.micro_batch == 0 && first) header.batch = fingerprint();
    if (action.micro_batch == 0 && last) check_same_batch(header);
    auto result = run(stage, action.micro_batch, header, here);
    if (last) {
      drew_ = drew_ || header.drew != 0;
      if constexpr (gives_loss) weigh(action.micro_batch, *result);
      results_[static_cast<std::size_t>(action.micro_batch)] = std::move(result);
    } else {
      for (std::size_t part = 0; part < here.outputs.size(); ++part) {
        Header next = here.outputs[part].value->header();
        next.micro_batch = action.micro_batch;
        next.stage = action.stage + 1;
        next.next_operation = header.next_operation;
        next.drew = header.drew;
        next.batch = header.batch;
        next.part = static_cast<std::uint8_t>(part);
        next.stashed = static_cast<std::uint8_t>(here.outputs.size() - 1);
        std::copy(here.outputs[part].name.begin(), here.outputs[part].name.end(), next.name.begin());
        facts_.wires.send(Direction::forward, rank_of(action.stage + 1), next, here.outputs[part].value);
      }
    }
    if (recorded_) kept(action) = std::move(here);
  }

  /// Receives the gradients by a stage's output, runs its backward, and sends the gradients by its input.
  void backward(const Action& action) {
    Kept& here = kept(action);
    std::vector<Ref<Node>> roots;
    if (action.stage + 1 == facts_.schedule.stages) {
      if (auto root = result_root(action.micro_batch)) roots.push_back(std::move(root));
    }
    for (std::size_t part = 0; part < here.outputs.size(); ++part) {
      AnyActivation<D>& output = *here.outputs[part].value;
      if (output.header().wants_grad == 0) continue;
      facts_.wires.receive(Direction::backward, header_of(action, action.stage, part),
                           [&](const Header&) { return here.outputs[part].value; });
      if (auto root = output.take_gradient()) roots.push_back(std::move(root));
    }
    here.later.weights = &sums_->leaves();
    if (!splits_) sums_->last_gradients_begin(action.stage, action.micro_batch);
    {
      [[maybe_unused]] const auto scope = sums_->backward_scope();  // for recomputation by checkpoints
      const detail::DeferralScope put_off(splits_ ? &here.later : nullptr);
      trace::Span span(trace::Lane::backward, "backward", "backward");
      describe(span, "backward", action.micro_batch);
      run_backward(roots, {.hooks = false});
    }
    sums_->gradients_arrived(action.stage, action.micro_batch, !splits_);
    here.outputs.clear();
    for (std::size_t part = 0; part < here.inputs.size(); ++part) {
      auto input = std::move(here.inputs[part].value);
      if (input->header().wants_grad == 0) continue;
      Header header = header_of(action, action.stage - 1, part);
      header.dtype = input->header().dtype;
      header.rank = input->header().rank;
      header.extents = input->header().extents;
      facts_.wires.send(Direction::backward, rank_of(action.stage - 1), header, std::move(input));
    }
    here.inputs.clear();
  }

  /// Runs the work that `backward` deferred.
  void weight(const Action& action) {
    const NoGrad no_grad;
    trace::Span span(trace::Lane::backward, "backward", "weight");
    describe(span, "weight", action.micro_batch);
    sums_->last_gradients_begin(action.stage, action.micro_batch);
    kept(action).later.run();
    sums_->gradients_arrived(action.stage, action.micro_batch, true);
  }

  bool recorded() const { return recorded_; }
  bool drew() const { return drew_; }
  bool loss_wants_grad() const { return loss_wants_grad_; }
  Sums& sums() { return *sums_; }
  std::vector<std::optional<Result>>& results() { return results_; }
  Index begin(int micro_batch) const { return facts_.split.begin(static_cast<std::size_t>(micro_batch)); }
  Index size(int micro_batch) const { return begin(micro_batch + 1) - begin(micro_batch); }

  /// On the last rank: sets the gradient by the model's output for the whole batch.
  void take_result_gradient(const tensor_of<Result>& gradient) { result_gradient_ = gradient; }

 private:
  using Direction = typename Wires<D>::Direction;
  using Stashes = nn::detail::Stashes<D>;
  struct Kept {
    std::vector<typename Stashes::Entry> inputs, outputs;  // activations between layers, and stashes
    detail::DeferredGradients later;
  };

  static void describe(trace::Span& span, std::string_view what, int micro_batch) {
    if (span)
      span.describe(trace::place(), cat(what, " of micro-batch ", micro_batch), cat("\"micro_batch\":", micro_batch));
  }

  Kept& kept(const Action& action) {
    return kept_[static_cast<std::size_t>(action.stage * facts_.schedule.micro_batches + action.micro_batch)];
  }
  int rank_of(int stage) const { return facts_.schedule.rank_of(stage); }

  static Header header_of(const Action& action, int stage, std::size_t part) {
    return {.micro_batch = action.micro_batch, .stage = stage, .part = static_cast<std::uint8_t>(part)};
  }
  // Sets `header` to the received one.
  template <class Room>
  void receive_input(Kept& here, Header& header, const Room& room) {
    auto value = facts_.wires.receive(Direction::forward, Header(header), [&](const Header& came) {
      header = came;
      return std::shared_ptr<AnyActivation<D>>(room(came));
    });
    here.inputs.push_back({header.name.data(), std::move(value)});
  }

  // The last stage has the targets, the first one the inputs.
  void check_same_batch(const Header& header) const {
    check<UsageError>(header.batch == fingerprint(),
                      "Pipeline: expected the same batch as on rank 0; net.sampler(dataset) gives all ranks the same");
  }
  std::uint64_t fingerprint() const {
    std::uint64_t all = 0;
    const auto add = [&](const auto& input) {
      const auto dense = contiguous(input);
      const std::string_view bytes(reinterpret_cast<const char*>(dense.data()), dense.bytes());
      all = all * 0x9E3779B97F4A7C15u + std::hash<std::string_view>()(bytes);
    };
    add(x_);
    std::apply([&](const auto&... targets) { (chorus::detail::for_each_tensor(targets, add), ...); }, targets_);
    return all;
  }

  // A micro-batch's samples of each tensor in an input; tensors without samples are passed whole.
  struct Rows : chorus::detail::TensorFunction {
    const Pass& pass;
    int micro_batch;
    Rows(const Pass& of, int i) : pass(of), micro_batch(i) {}
    template <class Input>
    Input operator()(const std::array<const Input*, 1>& input) const {
      if constexpr (AnyTensor<Input>)
        if (pass.facts_.split.cuts(*input[0]))
          return contiguous(input[0]->slice(chorus::detail::batch_axis_of<Input>(0), pass.begin(micro_batch),
                                            pass.begin(micro_batch + 1)));
      return *input[0];
    }
  };
  template <class Input>
  Input rows(const Input& input, int micro_batch) const {
    return chorus::detail::map_tensors(std::array{&input}, Rows(*this, micro_batch));
  }

  // The model's layers draw the same numbers as on one device: by the samples' places in the whole batch, and by the
  // number of random operations in earlier stages.
  std::optional<Result> run(const Stage& stage, int micro_batch, Header& header, Kept& here) {
    RandomContext random = facts_.random;
    random.next_operation = header.next_operation;
    random.samples = size(micro_batch);
    random.first_sample = [first = begin(micro_batch), &of_batch = facts_.random.first_sample] {
      return (of_batch ? of_batch() : 0) + first;
    };
    random.devices = 2;  // rows other than samples are the same for all micro-batches
    const RandomScope numbers(random);
    const BatchGroupScope group(whole_batch_);
    trace::Span span(trace::Lane::forward, "forward", "forward");
    describe(span, "forward", micro_batch);
    [[maybe_unused]] const auto scope = sums_->forward_scope(micro_batch);
    const Stashes stashes({here.inputs.begin() + 1, here.inputs.end()});
    auto outcome = std::apply(
        [&](const auto&... targets) {
          return Chain::run(facts_.model, stage, *here.inputs.front().value, rows(targets, micro_batch)...);
        },
        targets_);
    header.next_operation = random.next_operation;
    header.drew = header.drew != 0 || random.drew;
    if (!outcome.output) return stashes.checked(std::move(outcome.result));
    here.outputs = stashes.entries();
    here.outputs.insert(here.outputs.begin(), {"", std::move(outcome.output)});
    return {};
  }

  // For a model that returns its loss: computes the weight with which backward begins.
  void weigh(int micro_batch, const Result& loss) {
    const auto node = node_of(loss);
    loss_wants_grad_ = loss_wants_grad_ || static_cast<bool>(node);
    const double weight = sums_->weigh(loss, micro_batch, size(micro_batch));
    using T = typename tensor_of<Result>::value_type;
    if (recorded_ && node) node->add(Tensor<T, 0, D>::full({}, static_cast<T>(weight), facts_.device));
  }

  // The node at which backward begins; null if nothing wants a gradient.
  Ref<Node> result_root(int micro_batch) {
    const auto result = std::exchange(results_[static_cast<std::size_t>(micro_batch)], std::nullopt);
    if constexpr (AnyVariable<Result>) {
      if (!result->node()) return {};
      if constexpr (!gives_loss) result->node()->add(contiguous(rows_of_result(micro_batch)));
      return result->node();
    } else {
      return {};
    }
  }
  // The result may have several rows per sample.
  auto rows_of_result(int micro_batch) const {
    const Index samples = facts_.split.batch;
    const Index of_sample = samples == 0 ? 1 : result_gradient_.size(0) / samples;
    return result_gradient_.slice(0, begin(micro_batch) * of_sample, begin(micro_batch + 1) * of_sample);
  }

  Facts facts_;
  const X x_;
  const std::tuple<Targets...> targets_;
  const bool recorded_;
  const bool splits_ = facts_.schedule.splits_backward();
  const std::unique_ptr<Sums> sums_;
  std::vector<Kept> kept_;  // by stage and micro-batch
  std::vector<std::optional<Result>> results_;
  tensor_of<Result> result_gradient_;
  bool drew_ = false, loss_wants_grad_ = false;
  std::shared_ptr<BatchGroup> whole_batch_ = std::make_shared<NoWholeBatch>();
};

}  // namespace chorus::pipeline
