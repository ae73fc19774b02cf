#pragma once
/// FullyShardedDataParallel: data parallelism in which no rank keeps the whole model (Rajbhandari et al., "ZeRO", SC
/// 2020, stage 3; Zhao et al., "PyTorch FSDP", VLDB 2023).

#include <chorus/comm/split.hpp>
#include <chorus/io/write_in_parts.hpp>
#include <chorus/nn/deferred.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/fsdp/sharded_units.hpp>
#include <chorus/parallel/fsdp/units.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/model_ranks.hpp>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

/// Options of FullyShardedDataParallel.
struct FullyShardedDataParallelOptions {
  int dim = 0;  ///< for all: see DistributedDataParallelOptions
  bool broadcast_buffers = true;
  bool find_unused_parameters = false;  ///< ranks and passes may leave layers out
  bool init_sync = true;
};

/// Parameters are cut into units; of each unit a rank keeps 1/n. A unit is gathered when a forward or backward
/// operation reads its parameters, and freed afterwards. Its gradients are averaged in parts as soon as they are
/// complete. The optimizer steps the rank's parts; nothing is gathered after that. So each of n ranks holds K / n bytes
/// of parameters, gradients and each optimizer state, plus two units, and sends 3 (n - 1) / n K per step. Results are
/// bit-identical to DistributedDataParallel with ReduceScatter and a ShardedOptimizer.
///
/// Forward passes are collective, also without gradients. Outside of forward and backward, parameters can be read only
/// within `gathered()`. `Units` says how units are cut: ByBytes, ByModule, KeepParameters (stage 2).
///
/// `Averages`: how ranks average their parts: ReduceScatter or a hook with the same result.
///
/// This file has five steps that extend DistributedDataParallel; fsdp/sharded_units.hpp has the moments of a pass,
/// fsdp/units_at_hand.hpp the gathers.
template <class Model, class Units, class Communicator, class Averages>
class FullyShardedDataParallel : public DistributedDataParallel<Model, Averages, Communicator> {
  using Base = DistributedDataParallel<Model, Averages, Communicator>;
  using AtHand = fsdp::UnitsAtHand<typename Base::D, Communicator>;

 public:
  using typename Base::D;
  using policy_type = FullyShardedDataParallel;
  static constexpr const char* name = "fsdp";
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = FullyShardedDataParallel<Other, Units, Communicator, Averages>;

  /// As DistributedDataParallel's. `gathers`: a second communicator of the ranks that shard the parameters, in the same
  /// order, so that parameters and gradients are sent concurrently. It must outlive this, too.
  FullyShardedDataParallel(Model model, Communicator& communicator, Communicator& gathers,
                           const FullyShardedDataParallelOptions& options = {}, std::uint64_t seed = initial_seed(),
                           Averages averages = {})
      : Base(std::move(model), communicator, ddp_options(options), seed, std::move(averages)) {
    shard(gathers, options);
  }
  /// For `launch`: takes the communicator and the seed from `run`.
  template <detail::LaunchedRun Run>
  FullyShardedDataParallel(Model model, Run& run, const FullyShardedDataParallelOptions& options = {})
      : Base(std::move(model), run, ddp_options(options)) {
    gathers_.emplace(comm::connect(comm::split(run.communicator(), run.world(), 0)));
    if constexpr (std::is_same_v<D, Cpu>)
      shard(*gathers_, options);
    else
      shard(detail::RankDevice<D>::over(*gathers_, this->model_device(), run.world().timeout, gathers_on_device_),
            options);
  }

  /// The same for a model that is constructed here: each rank draws only its own parts; no rank ever holds the whole.
  template <class... Arguments, class... More>
  explicit FullyShardedDataParallel(const Deferred<Model, Arguments...>& model, More&&... more)
      : FullyShardedDataParallel(detail::Making<Model>(model).take(), std::forward<More>(more)...) {
    static_assert(std::is_same_v<D, Cpu>, "FullyShardedDataParallel: expected a deferred model on the CPU");
  }

  /// Returns the model's output for this rank's share of the batch. All ranks call it.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!this->in_captured_step(),
                      "FullyShardedDataParallel: its units move, so a step can't be captured; train without Graphed");
    // 3. Units are gathered when an operation uses them.
    Forward pass(at_hand(), grad_enabled() ? fsdp::Pass::forward : fsdp::Pass::aside);
    auto output = Base::operator()(inputs...);
    pass.end();
    return output;
  }

  /// This rank's part of each parameter, which may be empty, for an optimizer.
  std::vector<nn::NamedParameter<D>> parameters() const { return units_->shards(); }

  /// See Policy::clip_grad_norm.
  double clip_grad_norm(double max_norm, const optim::ClipGradNormOptions& options = {}) {
    return optim::clip_grad_norm(parameters(), max_norm, options);
  }

  /// While it lives, every rank has all parameters: to save, load or inspect. All ranks create and destroy it together.
  /// Writing without `write` is an error in the next pass.
  class Gathered {
   public:
    Gathered(AtHand& units, bool write) : units_(units), write_(write) { units_.begin_gathered(); }
    Gathered(const Gathered&) = delete;
    Gathered& operator=(const Gathered&) = delete;
    ~Gathered() { units_.end_gathered(write_); }

   private:
    AtHand& units_;
    bool write_;
  };
  [[nodiscard]] Gathered gathered(const GatheredOptions& options = {}) {
    this->meet();
    return Gathered(at_hand(), options.write);
  }
  /// See Policy::gathered.
  template <class F>
  requires std::invocable<const F&, typename Base::model_type&>
  void gathered(const F& f) {
    const auto whole = gathered({.write = true});
    f(this->model_);
  }
  /// For files that all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool sharded, bool) const { return sharded || this->communicator_.rank() == 0; }

 private:
  /// A pass that gives its units back if an exception ends it. The unit that backward begins with stays after `end`.
  class Forward {
   public:
    Forward(AtHand& units, fsdp::Pass pass) : units_(units) { units_.begin(pass); }
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;
    ~Forward() {
      if (!ended_) units_.give_up();
    }
    void end() {
      units_.end_pass();
      ended_ = true;
    }

   private:
    AtHand& units_;
    bool ended_ = false;
  };

  static DistributedDataParallelOptions ddp_options(const FullyShardedDataParallelOptions& options) {
    return {.dim = options.dim,
            .broadcast_buffers = options.broadcast_buffers,
            .find_unused_parameters = options.find_unused_parameters,
            .init_sync = options.init_sync && PromisedNumbers::current() == nullptr};
  }
  AtHand& at_hand() const { return units_->at_hand(); }
  void begin_join(const detail::JoinFacts&) override {
    fail<UsageError>(
        "FullyShardedDataParallel::join: a rank without batches would not step its shards; the net's sampler gives all "
        "ranks the same number of batches");
  }

  [[gnu::cold]] void shard(Communicator& gathers, const FullyShardedDataParallelOptions& options) {
    if constexpr (!std::is_same_v<D, Cpu>)
      check<UsageError>(gathers.takes_device_memory(), "FullyShardedDataParallel: expected gathers in the memory of ",
                        D::kind, ", such as comm::StagedCommunicator, got ", gathers.backend());
    const bool deferred = PromisedNumbers::current() != nullptr;
    if (deferred) this->check_same(this->core().options.template describe<D>(), this->is_shared());
    bool repeats = false;  // passes use units in orders of their own, and again
    if constexpr (Base::adds_up_in_pass)
      repeats = this->canonical_shares() > this->devices() || options.find_unused_parameters;
    // 1. The parameters, already rank 0's, are cut into units.
    auto at_hand = std::make_shared<AtHand>(this->flat_, gathers, Units::cut(this->model_, this->flat_),
                                            options.find_unused_parameters, Units::reshard_after_forward, repeats);
    // 4. Gradients are averaged in parts, unit by unit. 5. An optimizer steps the parts.
    units_ = &this->core().template add<fsdp::ShardedUnits<D, Communicator>>(this->core(), at_hand, repeats);
    this->core().cut_buckets();
    // 2. Each rank keeps its part of each unit.
    at_hand->settle(at_hand);
    detail::decide_together(parameters(), this->communicator_, this->alive(), [](const auto&) { return true; });
    this->passes_together_ = this->asks_in_forward_ = gathers.size() > 1;
    this->program_.alike() = {.zero_grad = false, .rank_0_writes = true};
    if (deferred) {
      detail::keep_promises();
      this->broadcast_buffers(0);
    }
  }

  std::optional<comm::AnyCommunicator> gathers_, gathers_on_device_;  // set if constructed from a run
  fsdp::ShardedUnits<D, Communicator>* units_ = nullptr;
};

}  // namespace chorus
