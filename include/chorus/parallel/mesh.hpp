#pragma once
/// Mesh: ranks along several axes, which divide a model's stages, its batches, its parameters and its layers.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/tensor_group.hpp>
#include <chorus/nn/deferred.hpp>
#include <chorus/ops/placement/placed.hpp>
#include <chorus/parallel/ddp/access.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/mesh/axes.hpp>
#include <chorus/parallel/mesh/groups.hpp>
#include <chorus/parallel/mesh/policies.hpp>
#include <chorus/parallel/model_ranks.hpp>
#include <chorus/parallel/tensor/replicas.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// Axes, outermost first: `Mesh<Gpt, mesh::Pipe<2>, mesh::Data<2>, mesh::Tensor<2>>` has 8 ranks; neighbours share
/// layers. Any of mesh::Pipe, Data, Sequence, Shard, and Tensor or Expert, in this order; the product of their sizes is
/// the number of ranks. One size may be mesh::rest; sizes of mesh::dynamic come from MeshOptions::sizes. Data and Shard
/// together make groups with the same shards (hybrid sharding).
///
/// The model is cut along the axes from the inside out: a rank takes its parts of layers (TensorParallel), of these its
/// stages (Pipeline), and with Shard a part of each remaining parameter (FullyShardedDataParallel). Ranks with the same
/// part of the model form a DistributedDataParallel. Ranks that differ in Data or Shard have different shares of a
/// batch (`sampler`); others have the same. The rules of these policies for losses, dropout, numbers and files apply.
///
/// With 3 or more shares of a batch, ranks with the same parameters must lay them out alike, or averages would be
/// rounded in different orders. So layers that Tensor divides unevenly, and, without SameBits, parameters that stages
/// share, are refused.
template <class Model, class... Axes>
class Mesh : private mesh::WithGroups<typename mesh::AxesOf<Axes...>::tensor>,
             public mesh::BatchPolicy<Model, mesh::AxesOf<Axes...>> {
  using Base = mesh::BatchPolicy<Model, mesh::AxesOf<Axes...>>;
  using All = mesh::AxesOf<Axes...>;
  using Part = mesh::PartOf<Model, All>;
  using WithGroups = mesh::WithGroups<typename All::tensor>;
  using WithGroups::groups, WithGroups::layers;
  using Communicator = comm::AnyCommunicator;
  static_assert(mesh::valid<Axes...>,
                "Mesh: expected axes in the order Pipe, Data, Sequence, Shard, Tensor or Expert, each at most once");
  static_assert(!All::tensor::shares_batch || (!All::pipes && !All::shards && All::sequence::size == 1),
                "Mesh: expected mesh::Data alone with mesh::Expert, whose ranks have other shares of the batch");
  static_assert(!All::pipes || !All::shards || !All::shard::units::reshard_after_forward,
                "Mesh: a pipeline uses each unit once per micro-batch: expected mesh::Shard<ranks, KeepParameters>, "
                "which keeps gathered parameters");

 public:
  using typename Base::D;
  using model_type = typename Part::whole;
  using policy_type = Mesh;
  static constexpr const char* name = "mesh";
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = Mesh<Other, Axes...>;

  /// Takes rank 0's parameters. Throws UsageError, on every rank, if the number of ranks is not that of the axes, and
  /// the errors of the axes' policies. `all` and `world`, from which it was connected, must outlive this.
  Mesh(Model model, Communicator& all, const comm::World& world, const MeshOptions& options = {},
       std::uint64_t seed = initial_seed())
      : WithGroups(all, world, All::sizes(all.size(), options.sizes), model),
        Base(cut(std::move(model), options), groups, options, seed) {
    all.broadcast(std::span(&this->random_.seed, 1), 0, {});
    check_same_order();
    decide_together();
    if (groups.all().size() > groups.batch.size()) {
      const auto alike =
          ddp::Alike{.zero_grad = !All::shards && !All::pipes,
                     .all_parameters = !All::pipes,
                     .rank_0_writes = All::shards};
      this->passes_together_ = true;
      program_of_all_.emplace("Mesh", groups.all());
      program_of_all_->listen(nn::named_parameters<D>(module()), nn::named_buffers<D>(module()), alike);
      for (const auto& named : this->parameters()) named.parameter->set_ledger(program_of_all_->ledger());
    }
    if constexpr (!All::shards && !All::tensor::shares_batch)
      replicas_.emplace(this->flat_, groups.tensor, this->alive(), options.check_every);
  }
  /// For `launch`: takes communicator and seed from `run`.
  template <detail::LaunchedRun Run>
  Mesh(Model model, Run& run, const MeshOptions& options = {})
      : Mesh(std::move(model), run.communicator(), run.world(), options, run.seed()) {
    run.check_options();
  }

  /// The same for a model that is constructed here: each rank draws only its own part; no rank ever holds the whole.
  template <class... Arguments, class... More>
  explicit Mesh(const Deferred<Model, Arguments...>& model, More&&... more)
      : Mesh(detail::Making<Model>(model).take(), std::forward<More>(more)...) {}

  /// Returns the model's output for this rank's share of the batch, or its loss: see Pipeline. All ranks call it.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    if (program_of_all_ && grad_enabled() && !this->joining_) compare_programs();
    const TensorGroupScope group(layers.group());
    CHORUS_WHOLE_OUTPUT("Mesh", decltype(Base::operator()(inputs...)));
    return Base::operator()(inputs...);
  }

  /// The communicator of all ranks; `devices()` is their number.
  Communicator& communicator() const { return groups.all(); }
  int devices() const { return groups.all().size(); }
  /// The number of ranks on each axis (pipe, data, shard, tensor or expert), and this rank's coordinate on each. Ranks
  /// of a sequence axis count as those of data.
  const std::array<int, 4>& sizes() const { return groups.sizes(); }
  const std::array<int, 4>& place() const { return groups.place(); }
  /// The number of shares of a batch.
  int shares() const { return groups.batch.size() / All::sequence::size; }
  /// The whole model; this rank may read only its own part.
  model_type& module() {
    if constexpr (All::pipes)
      return this->model_.stages().model();
    else
      return this->model_;
  }

  /// All parameters of the model; this rank may have parts of them or nothing: see Pipeline, FullyShardedDataParallel.
  std::vector<nn::NamedParameter<D>> parameters() const {
    if constexpr (All::pipes)
      return this->model_.stages().with_elsewhere(Base::parameters());
    else
      return Base::parameters();
  }
  /// See Policy::gathered. Needs memory for the whole model.
  template <class F>
  void gathered(const F& f) {
    this->meet();
    const auto whole_layers = [&](model_type& model) { layers.with_whole(model, f); };
    if constexpr (All::pipes)
      Base::gathered([&](auto& part) { part.stages().gathered(whole_layers); });
    else
      Base::gathered(whole_layers);
  }
  void let_ranks_differ() {
    Base::let_ranks_differ();
    if (program_of_all_) program_of_all_->let_ranks_differ();
  }
  /// Replaces a number by the maximum over all ranks.
  void make_largest(std::int32_t* number) {
    groups.all().all_reduce(std::span(number, 1), comm::ReduceOp::max, {});
  }
  /// For files that all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool sharded, bool shared) const {
    const auto [p, d, s, t] = groups.place();
    return d == 0 && (sharded || s == 0) && (shared || t == 0);
  }

 private:
  typename Part::type cut(Model model, const MeshOptions& options) {
    auto part = Part::make(layers.share_out(std::move(model)), groups, options);
    if constexpr (!All::shards) detail::keep_promises();
    return part;
  }
  // The inner policy compares ranks with shares of a batch; this compares the optimizers' steps of all ranks.
  void compare_programs() {
    program_of_all_->ledger()->batch = this->program_.ledger()->batch;
    if (this->training()) ++program_of_all_->ledger()->passes;
    program_of_all_->compare_now(false);
    met_ = false;
  }
  void end_join() override {
    Base::end_join();
    if (program_of_all_) program_of_all_->forget(/*uneven=*/true);
  }
  void meet() override {
    if (!this->joining_ && !std::exchange(met_, true)) program_of_all_->compare_now(true);
    Base::meet();
  }
  bool counts(const nn::NamedParameter<D>& named) const {
    if constexpr (All::pipes)
      return this->model_.stages().counts(named);
    else
      return true;
  }
  [[gnu::cold]] void decide_together() {
    if (!All::shards && groups.all().size() == groups.sizes()[1]) return;  // each rank has the whole model
    auto all = parameters();
    if constexpr (All::pipes) {
      const auto here = nn::named_parameters<D>(module());
      all.insert(all.end(), here.begin(), here.end());
    }
    detail::decide_together(all, groups.all(), this->alive(), [this](const auto& named) {
      return counts(named) && writes_part(named.parameter->is_part(), named.parameter->part() != nullptr);
    });
  }
  // A sum of two terms does not depend on the order; sums of more do.
  [[gnu::cold]] void check_same_order() {
    if (groups.batch.size() < 3 || All::tensor::shares_batch) return;
    std::string sizes;
    for (const auto& entry : this->flat_.entries()) sizes += cat(entry.count, ' ');
    const auto of_all = comm::all_gather_object(groups.tensor, sizes);
    bool tied = false;
    if constexpr (All::pipes && !Base::adds_up_in_pass) tied = this->model_.stages().ties_stages();
    const bool alike = std::all_of(of_all.begin(), of_all.end(), [&](const auto& other) { return other == sizes; });
    double found[] = {alike ? 0.0 : 1.0, tied ? 1.0 : 0.0};
    groups.all().all_reduce(std::span<double>(found), comm::ReduceOp::max, {});
    check<UsageError>(found[0] == 0, "Mesh: ", groups.batch.size(), " shares of a batch and Tensor<",
                      groups.tensor.size(), ">: expected layers that Tensor divides evenly: ranks with unequal parts ",
                      "round averages of common parameters differently");
    check<UsageError>(found[1] == 0, "Mesh: ", groups.batch.size(), " shares of a batch and a pipeline: expected ",
                      "each parameter in one stage, because stages round its averages differently");
  }

  std::optional<detail::ReplicaCheck<D, Communicator>> replicas_;
  std::optional<ddp::SameProgram<D, Communicator>> program_of_all_;
  bool met_ = true;
};

/// For checkpoints: the order of parameters, which affects rounding.
template <class Model, class... Axes>
requires(!mesh::AxesOf<Axes...>::shards) class detail::Access<Mesh<Model, Axes...>> {
  using Net = Mesh<Model, Axes...>;
  using Inner = DistributedDataParallel<typename mesh::PartOf<Model, mesh::AxesOf<Axes...>>::type>;

 public:
  explicit Access(Net& net) : inner_(net) {}
  void set_parameter_order(std::span<const std::string> names, bool learned = true) {
    inner_.set_parameter_order(names, learned);
  }

 private:
  Access<Inner> inner_;
};

}  // namespace chorus
