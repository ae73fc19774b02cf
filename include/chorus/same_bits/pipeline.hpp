#pragma once
/// Pipeline with canonical shares: they are its micro-batches.

#include <chorus/parallel/pipeline.hpp>
#include <chorus/same_bits/checked_shares.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/staged_shares.hpp>
#include <cstdint>
#include <utility>
#include <vector>

namespace chorus {

/// See Pipeline. Micro-batches are the canonical shares, whatever `micro_batches` of the options says.
template <class Model, int Shares, class Order, class Communicator>
class Pipeline<SameBits<Model, Shares>, Order, Communicator> : public Pipeline<Model, Order, Communicator> {
  using Base = Pipeline<Model, Order, Communicator>;

 public:
  using typename Base::D;
  using policy_type = Pipeline;
  static constexpr bool adds_up_in_pass = true;
  template <class Other>
  using rebind = Pipeline<SameBits<Other, Shares>, Order, Communicator>;

  /// Throws UsageError, on every rank, for the reasons of Pipeline's constructor, for an invalid or another number of
  /// shares, and for parameters in more than two stages.
  Pipeline(SameBits<Model, Shares> model, Communicator& communicator, const comm::World& world,
           const PipelineOptions& options = {}, std::uint64_t seed = initial_seed())
      : Base(std::move(model.model()), communicator, world, {.micro_batches = 1, .cut = options.cut}, seed),
        buffers_(nn::named_buffers<D>(this->model_)),
        shares_(this->model_, this->flat_, buffers_, this->alive(),
                same_bits::checked_shares(model.shares(), 1, 0), 0, 1) {
    check<UsageError>(this->same_on_all_ranks(cat(model.shares())), "Pipeline: SameBits: this rank has ",
                      model.shares(), " shares, another rank another number: expected the same on all ranks");
  }
  /// For `launch`: see Pipeline.
  template <class Run>
  requires requires(Run& run) { run.communicator(); }
  Pipeline(SameBits<Model, Shares> model, Run& run, const PipelineOptions& options = {})
      : Pipeline(detail::RankDevice<D>(run).place(std::move(model)), run.communicator(), run.world(), options,
                 run.seed()) {
    run.check_options();
  }

  /// See Pipeline.
  template <class X, class... Targets>
  auto operator()(const X& x, const Targets&... targets) {
    return this->pass_of(
        [this](const auto&... inputs) {
          return same_bits::forward(shares_, this->model_, this->random_, inputs...);
        },
        x, targets...);
  }

  int canonical_shares() const { return static_cast<int>(shares_.shares()); }
  PipelineOptions options() const { return {.micro_batches = canonical_shares(), .cut = Base::options().cut}; }

 private:
  std::vector<nn::NamedBuffer<D>> buffers_;  // of this rank's stages
  same_bits::ModelShares<pipeline::StagedModel<Model, Order, Communicator>> shares_;
};

}  // namespace chorus
