#pragma once
/// A pipeline's stages that compute their batch share by share: micro-batches are canonical shares.

#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/pipeline/staged_model.hpp>
#include <chorus/same_bits/micro_batch_sums.hpp>
#include <chorus/same_bits/model_shares.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// Whether micro-batches go backward in their order in all stages.
inline bool goes_back_in_order(const Schedule& schedule) {
  for (const auto& actions : schedule.ranks) {
    std::vector<int> next(static_cast<std::size_t>(schedule.stages * 3));
    for (const auto& [kind, micro_batch, stage] : actions) {
      if (kind == Schedule::Kind::forward) continue;
      if (next[static_cast<std::size_t>(stage * 3 + static_cast<int>(kind))]++ != micro_batch) return false;
    }
  }
  return true;
}

/// See ModelShares. The model was made with `{.micro_batches = 1}`, for passes of a loss without gradients, which
/// compute all samples at once. Throws UsageError for parameters in more than two stages.
template <class Model, class Order, class Communicator>
class ModelShares<pipeline::StagedModel<Model, Order, Communicator>> {
  using Staged = pipeline::StagedModel<Model, Order, Communicator>;

 public:
  using D = typename Staged::D;

  ModelShares(Staged& model, const nn::FlatParameters<D>& flat, const std::vector<nn::NamedBuffer<D>>& buffers,
              std::weak_ptr<void>, std::size_t shares, int rank, int ranks, Processes processes = {})
      : counted_(nn::named_parameters<D>(model.stages().model())),
        model_(model),
        shares_(shares),
        run_(shares_of_device(shares, static_cast<std::size_t>(ranks), static_cast<std::size_t>(rank))),
        sums_{flat, ShareBuffers<D>(buffers), GradientTree<D>(flat),
              std::make_shared<Processes>(std::move(processes))} {
    auto& stages = model.stages();
    const int here = stages.communicator().rank(), size = stages.communicator().size();
    for (const auto& [parameter, uses] : stages.in_several_stages()) {
      const auto& of_first = stages.in_several_stages().front().second;
      check<UsageError>(uses.size() == 2 && uses == of_first, "Pipeline: SameBits: '", parameter->numbers_name(),
                        "' is in the stages ", std::span(uses), ", another parameter in the stages ",
                        std::span(of_first), ": expected each in one stage, or such parameters in the same two");
      const bool has_first = uses[0] % size == here;
      if (has_first || uses[1] % size == here)
        sums_.shared.push_back({parameter.get(), uses[0], uses[1], stages.tied().group_of(*parameter), has_first});
    }
  }
  ~ModelShares() { *sums_.processes = {}; }
  ModelShares(const ModelShares&) = delete;
  ModelShares& operator=(const ModelShares&) = delete;

  std::size_t shares() const { return shares_; }
  const GradientTree<D>& tree() const { return sums_.tree; }
  void on_gradients(std::function<void(Node&)> arrived) { sums_.arrived = std::move(arrived); }
  void when_backward_ends(std::function<void()> ended) { sums_.ended = std::move(ended); }

  /// See StagedModel::forward.
  template <class... Inputs>
  auto forward(RandomContext&, const Inputs&... inputs) {
    return model_.pass(
        static_cast<int>(run_.count()),
        [this](const auto& facts) {
          check<UsageError>(sums_.shared.empty() || goes_back_in_order(facts.schedule),
                            "Pipeline: SameBits: stages share a parameter: expected a schedule in which micro-batches "
                            "go backward in the order of their numbers");
          return std::make_unique<MicroBatchSums<D>>(
              sums_,
              std::make_shared<const CutOfProcesses>(shares_, run_, facts.split.batch, sums_.processes),
              facts.split.devices, nn::detail::any_training(model_), goes_back_in_order(facts.schedule));
        },
        inputs...);
  }

 private:
  CutsBatches counted_;
  Staged& model_;
  std::size_t shares_;
  ShareRange run_;
  StageSums<D> sums_;
};

}  // namespace chorus::same_bits
