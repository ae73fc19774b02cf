#pragma once
/// State and user functions for DistributedDataParallel's options: around the core, not in it.

#include <chorus/parallel/ddp/accumulation.hpp>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/ddp/buffer_sharing.hpp>
#include <chorus/parallel/ddp/clock.hpp>
#include <chorus/parallel/ddp/frozen_parameters.hpp>
#include <chorus/parallel/ddp/hook_calls.hpp>
#include <chorus/parallel/ddp/hook_memory.hpp>
#include <chorus/parallel/ddp/ignored_parameters.hpp>
#include <chorus/parallel/ddp/learned_order.hpp>
#include <chorus/parallel/ddp/non_finite.hpp>
#include <chorus/parallel/ddp/parameter_averaging.hpp>
#include <chorus/parallel/ddp/shadow_passes.hpp>
#include <chorus/parallel/ddp/several_nets.hpp>
#include <chorus/parallel/ddp/static_graph.hpp>
#include <chorus/parallel/ddp/traced.hpp>
#include <chorus/parallel/ddp/unused_parameters.hpp>
#include <chorus/parallel/policy_of_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// Base of Reducer.
template <Device D, class Hook, class Communicator>
class PolicyWithOptions : public PolicyOfRanks<D, Communicator>, protected Core<D, Communicator> {
  using Base = PolicyOfRanks<D, Communicator>;
  using Core = ddp::Core<D, Communicator>;
  using Traits = HookTraits<Hook, D, Communicator>;

 public:
  const DistributedDataParallelOptions& options() const { return Core::options; }
  Hook& hook() { return calls_.hook; }
  /// Sizes of the buckets in bytes, in the order in which they are reduced.
  std::vector<std::size_t> bucket_bytes() const {
    std::vector<std::size_t> sizes;
    for (const Bucket& bucket : this->buckets.all()) sizes.push_back(this->bytes(bucket));
    return sizes;
  }
  /// Times of the parts of this rank's iterations.
  template <class = void>
  const DdpLoggingData& logging_data() const {
    return clock().data();
  }
  template <class = void>
  void reset_logging_data() {
    clock().forget();
  }
  /// The number of backward passes whose gradients NonFinite::skip_step dropped.
  std::int64_t skipped_steps() const {
    const auto* const judge = this->template find<NonFiniteGradients<D, Communicator>>();
    return judge == nullptr ? 0 : judge->skipped_steps();
  }
  /// Adds a user's extension, which is called after the others at each moment: see ddp::Extension.
  void extend(std::unique_ptr<Extension<D>> extension) { Core::extend(std::move(extension)); }

 protected:
  [[gnu::cold]] PolicyWithOptions(nn::Module& model, Communicator& communicator,
                                  const DistributedDataParallelOptions& options, std::uint64_t seed, Hook hook);
  /// Creates the extensions for the options, after the net's construction.
  [[gnu::cold]] void install() {
    const auto& options = Core::options;
    this->sums = this->bucket_sums(core(), std::is_same_v<Hook, AllReduce>);
    std::erase_if(this->buffers_, [&](const auto& named) { return options.ignores(named.name); });
    install_extensions();
    check<UsageError>(!this->buckets.all().empty(),
                      "DistributedDataParallel: the model has no parameter that requires a gradient",
                      options.parameters_and_buffers_to_ignore.empty() ? "" : " and that ranks share");
    if (this->communicator_.size() > 1 && PromisedNumbers::current() == nullptr)
      this->flat_.use_memory(own_memory(), own_memory());
    auto shared = this->flat_.parameters();
    std::erase_if(shared, [&](const auto& named) { return options.ignores(named.name); });
    this->program_.listen(std::move(shared), this->buffers_,
                          {.zero_grad = !this->whole_passes_, .contents = !Traits::ranks_may_differ});
    this->program_.ledger()->own_gradients = Traits::own_gradients;
  }
  /// Ends communication that still uses memory of the hook.
  ~PolicyWithOptions();

  /// Compares the ranks' models and takes rank 0's parameters and buffers.
  [[gnu::cold]] void take_first_state() {
    auto compared = Core::options.template describe<D>();
    if (Core::options.buckets) compared += cat("sizes of buckets ", std::span<const std::size_t>(bucket_bytes()), "\n");
    this->check_same(compared, is_shared());
    take_state(0);
  }
  [[gnu::cold]] void take_state(int root) {
    this->broadcast_parameters(root, is_shared());
    this->broadcast_buffers(root);
  }
  /// A function of a name: whether ranks share that parameter or buffer.
  auto is_shared() const {
    return [&options = Core::options](const std::string& wanted) { return !options.ignores(wanted); };
  }
  /// Gradients will be accumulated over several passes.
  NoSync accumulate() {
    if (!this->whole_passes_ && this->template find<Accumulation<D, Communicator>>() == nullptr)
      add<Accumulation>([this] { return Traits::averages(calls_.hook); });
    return this->scope_without(this->sync);
  }
  /// Allocates memory that peers can read without a copy, if the communicator offers it.
  typename nn::FlatParameters<D>::Allocate own_memory() const {
    if constexpr (std::is_same_v<D, Cpu> && requires(Communicator & c) { c.allocate(0); })
      return [&communicator = this->communicator_](std::size_t bytes) { return communicator.allocate(bytes); };
    else
      return nullptr;
  }

  std::span<const double> weigh(std::span<const detail::LossShare> losses, bool refused) override;
  void begin_join(const detail::JoinFacts& facts) override;
  void run_out_of_batches() override;
  [[gnu::cold]] JoinedPass take_part_in_pass() override;
  [[gnu::cold]] void all_have_run_out() override;
  Core& core() { return *this; }
  /// Averages parameters under a hook that lets ranks have different ones.
  void synchronize() override;
  bool shares_buffers() const override { return Core::options.broadcast_buffers; }

  HookCalls<D, Hook, Communicator> calls_;

 private:
  // A template, as its callers are: only a program that asks for the times has them measured.
  template <class Wanted = ClockIsWanted>
  Clock<D, Communicator>& clock() const {
    static_cast<void>(Wanted::template asked<void>);
    auto* const found = this->template find<Clock<D, Communicator>>();
    check<UsageError>(found != nullptr, "DistributedDataParallel::logging_data: expected a net that was made in main");
    return *found;
  }
  ShadowPasses<D, Communicator>* shadow_passes() const {
    return this->template find<ShadowPasses<D, Communicator>>();
  }
  // The order of the calls at each moment. Functions that need other extensions add them later.
  [[gnu::cold]] void install_extensions() {
    const auto& options = Core::options;
    if (!options.parameters_and_buffers_to_ignore.empty()) add<IgnoredParameters>();
    add<FrozenParameters>();
    if (ClockIsWanted::by_program) add<Clock>();
    add<SeveralNets>(this->operators_send_);
    if (!this->buffers_.empty() && options.broadcast_buffers)
      add<BufferSharing>(typename BufferSharing<D, Communicator>::Policy{
          .trains = [this] { return this->buffers_apart_ || this->any_training(); },
          .joining = [this] { return this->joining_; },
          .broadcast = [this](int root) { this->broadcast_buffers(root); },
          .after_forward = this->whole_passes_});
    if (options.static_graph)
      add<StaticGraph>();
    else if (options.find_unused_parameters)
      add<UnusedParameters>();
    if (options.non_finite != NonFinite::propagate) add<NonFiniteGradients>(Traits::in_parts || Traits::own_gradients);
    if constexpr (Traits::averages_parameters || Traits::acts_after_backward)
      Core::template add<ParameterAveraging<D, Hook, Communicator>>(core(), hook());
    if (LearnedOrder<D, Communicator>::wanted(options)) add<LearnedOrder>();
    if constexpr (Traits::in_parts) add<GradientParts>(calls_.averaging);
    if (Traced<D, Communicator>::wanted()) add<Traced>();
    this->cut_buckets();
    if constexpr (Traits::remembers_parameters || Traits::resets)
      Core::template add<HookMemory<D, Hook, Communicator>>(core(), hook());
  }
  template <template <class, class> class Extension, class... Arguments>
  void add(Arguments&&... arguments) {
    Core::template add<Extension<D, Communicator>>(core(), std::forward<Arguments>(arguments)...);
  }
};

template <Device D, class Hook, class Communicator>
PolicyWithOptions<D, Hook, Communicator>::PolicyWithOptions(nn::Module& model, Communicator& communicator,
                                                            const DistributedDataParallelOptions& options,
                                                            std::uint64_t seed, Hook hook)
    : Base(model, "DistributedDataParallel", communicator, options.dim, seed),
      Core(this->flat_, communicator, this->shares_, options.checked_for<D>(model)),
      calls_{std::move(hook)} {}

template <Device D, class Hook, class Communicator>
PolicyWithOptions<D, Hook, Communicator>::~PolicyWithOptions() {
  for (Bucket& bucket : this->buckets.all()) bucket.work = {};
}

template <Device D, class Hook, class Communicator>
std::span<const double> PolicyWithOptions<D, Hook, Communicator>::weigh(std::span<const detail::LossShare> losses,
                                                                        bool refused) {
  this->notify(&Extension<D>::communicates, true);
  const auto scales = Base::weigh(losses, refused);
  this->notify(&Extension<D>::communicates, false);
  return scales;
}

template <Device D, class Hook, class Communicator>
void PolicyWithOptions<D, Hook, Communicator>::begin_join(const detail::JoinFacts& facts) {
  check<UsageError>(!Traits::averages_parameters,
                    "DistributedDataParallel::join: the hook averages parameters itself, so join is not supported");
  Base::begin_join(facts);
  if (shadow_passes() == nullptr) add<ShadowPasses>();
}

template <Device D, class Hook, class Communicator>
void PolicyWithOptions<D, Hook, Communicator>::run_out_of_batches() {
  shadow_passes()->begin();
}

template <Device D, class Hook, class Communicator>
JoinedPass PolicyWithOptions<D, Hook, Communicator>::take_part_in_pass() {
  return this->begin_shadow_pass() ? shadow_passes()->run() : JoinedPass::none;
}

template <Device D, class Hook, class Communicator>
void PolicyWithOptions<D, Hook, Communicator>::all_have_run_out() {
  shadow_passes()->end();
  if (const int root = this->end_shadow_passes(); root >= 0) take_state(root);
}

template <Device D, class Hook, class Communicator>
void PolicyWithOptions<D, Hook, Communicator>::synchronize() {
  if constexpr (Traits::averages_parameters) hook().synchronise(this->flat_, this->communicator_);
  if (this->buffers_apart_ && shares_buffers()) this->broadcast_buffers(0);
  this->buffers_apart_ = false;
}

}  // namespace chorus::ddp
