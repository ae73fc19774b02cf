#pragma once
/// DistributedDataParallel: one process per device. Every rank holds the whole model and computes on its share of the
/// batch; while backward runs, gradients are averaged over all ranks, bucket by bucket, so that all take the same step.

#include <algorithm>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/shared_window.hpp>
#include <chorus/parallel/ddp/rank_device.hpp>
#include <chorus/parallel/ddp/reducer.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <chorus/parallel/join.hpp>
#include <chorus/parallel/no_sync.hpp>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// The gradient is the mean over the *samples* of all ranks: with shares of different sizes the step is the one that a
/// single device would take. All ranks hold bit-identical parameters after each step. Every rank makes the same calls.
/// A backward pass behind several forward passes weighs ranks by the last one's shares.
/// `Hook` says how gradients are averaged: see AllReduce, its neighbours in hooks/, and GradBucket to write one.
/// A hook on a parameter sees this rank's gradient, once in each backward, before it is averaged; what the hook makes
/// of it is averaged. `grad` gives this rank's own gradients, and sends nothing.
template <class Model, class Hook = AllReduce, class Communicator = comm::AnyCommunicator>
class DistributedDataParallel : public DistributedPolicy<Model, Communicator> {
  using Base = DistributedPolicy<Model, Communicator>;

 public:
  using D = typename Base::device_type;
  static constexpr const char* name = "ddp";
  /// Whether the hook leaves each rank the averages of its own part alone.
  static constexpr bool averages_in_parts = detail::Reducer<D, Hook, Communicator>::in_parts;

  /// Whether the hook may leave each rank its own gradients.
  static constexpr bool own_gradients = requires { Hook::own_gradients; };

  /// Compares the models of all ranks and takes rank 0's numbers. Throws UsageError, on every rank, where names,
  /// shapes, dtypes or options differ, and where no parameter wants a gradient. The communicator must outlive this.
  DistributedDataParallel(Model model, Communicator& communicator, const DistributedDataParallelOptions& options = {},
                          std::uint64_t seed = initial_seed(), Hook hook = {})
      : Base(std::move(model), communicator, seed),
        options_(options.checked_for<D>(this->model_)),
        reducer_(this->flat_, communicator, this->shares_, options_, std::move(hook), this->alive()) {
    this->random_.dim = options.dim;
    if (communicator.size() > 1) this->flat_.use_memory(own_memory(), own_memory());
    std::erase_if(this->buffers_, [&](const auto& named) { return options_.ignores(named.name); });
    if (options_.init_sync) {
      this->check_same("DistributedDataParallel", options_.template describe<D>(), shared());
      take_state(0);
    }
    for (const auto& entry : this->flat_.entries()) {
      auto& parameter = entry.parameter();
      parameter.on_grad([this, alive = this->alive(), &parameter] {
        if (!alive.expired()) reducer_.gradient_ready(parameter);
      });
    }
  }
  /// For `launch`: takes communicator and seed from `run`. A model on GPUs moves to this rank's, and talks over NCCL.
  template <detail::LaunchedRun Run>
  DistributedDataParallel(Model model, Run& run, const DistributedDataParallelOptions& options = {}, Hook hook = {})
      : DistributedDataParallel(std::make_unique<detail::RankDevice<D>>(run), std::move(model), options, run.seed(),
                                std::move(hook)) {
    run.check_options();
  }

  /// Peers don't wait for a rank that throws while gradients are under way: the group is given up.
  ~DistributedDataParallel() {
    const bool unwinding = std::uncaught_exceptions() > exceptions_before_;
    if (reducer_.in_backward() || (unwinding && !this->shares_.done()))
      this->communicator_.abort(cat("rank ", this->communicator_.rank(),
                                    unwinding ? " threw an exception in the middle of a step"
                                              : ": its net has ended in the middle of a backward pass"));
  }

  /// The model's output for this rank's share of the batch.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!reducer_.in_backward(),
                      "DistributedDataParallel: the last backward pass ended early; its gradients are incomplete");
    reducer_.clock().forward_begins();
    const Index samples = detail::samples_of(options_.dim, inputs...);
    this->begin_forward(samples);
    if (grad_enabled())
      begin_pass(samples);
    else
      this->shares_.begin_aside(samples, !this->joining_, this->random_.step);
    auto output = this->forward(grad_enabled() || !this->joining_, inputs...);
    if (grad_enabled()) share_buffers(BufferCommHookLocation::post_forward);
    reducer_.operators_send = this->operators_send_;
    reducer_.clock().forward_ends();
    return output;
  }

  /// All ranks call it; under a hook that lets parameters drift apart, they are brought together.
  void eval() {
    if constexpr (averages_parameters) hook().synchronise(this->flat_, this->communicator_);
    Base::eval();
  }

  /// While it lives, backward adds to this rank's own gradients alone; the first backward after it averages the sum.
  /// Each pass counts by its own global batch, so that micro-batches may be shared out unevenly.
  [[nodiscard]] NoSync no_sync() { return NoSync(reducer_.sync); }

  /// Has `share(buffers, communicator)` called before, or after, each forward pass that averages gradients, of a model
  /// of which a layer is in training, by all ranks, instead of sending rank 0's buffers to all: to average running
  /// statistics, say. Under `join` they come from one rank as ever. With nothing, `broadcast_buffers` holds again.
  void register_buffer_comm_hook(
      std::function<void(std::span<const nn::NamedBuffer<D>> buffers, Communicator& communicator)> share,
      BufferCommHookLocation location = BufferCommHookLocation::pre_forward) {
    buffer_hook_ = std::move(share);
    buffer_hook_location_ = location;
  }

  /// Runs `body`, a loop over batches of which ranks may have different numbers, each an iteration of forward and
  /// backward. A rank that has ended takes part in the others' collectives, with no samples, until all have; then all
  /// take the parameters and buffers of the one that went on longest. `body` makes no other collective calls: a forward
  /// pass without gradients is this rank's own. For loops over several nets see chorus::join.
  template <class Body>
  void join(const Body& body, const JoinOptions& options = {}) {
    chorus::join(body, options, *this);
  }
  // What chorus::join calls.
  void begin_join(const detail::JoinFacts& facts) {
    check<UsageError>(!averages_parameters, "DistributedDataParallel::join: the hook averages parameters by itself");
    Base::begin_join("DistributedDataParallel", facts);
  }
  void begin_company() { reducer_.begin_company(); }
  [[gnu::cold]] JoinedPass keep_company() {
    if (!this->begin_pass_of_others()) return JoinedPass::none;
    auto& shares = this->shares_;
    reducer_.fit_buckets();
    reducer_.weigh_anew();
    if (shares.training()) this->broadcast_buffers(shares.first_active());
    if (!shares.sync()) return JoinedPass::passed;
    reducer_.keep_company();
    return JoinedPass::averaged;
  }
  [[gnu::cold]] void end_company() {
    reducer_.end_company();
    if (const int root = this->end_passes_of_others(); root >= 0) take_state(root);
  }

  /// Lays the flat buffers out as a checkpoint says. Names that the model doesn't have are left out. `learned`: a
  /// backward pass has settled this order; else the next one will.
  [[gnu::cold]] void set_parameter_order(std::span<const std::string> names, bool learned = true) {
    const auto& entries = this->flat_.entries();
    std::vector<std::size_t> order;
    for (const auto& wanted : names)
      for (std::size_t i = 0; i < entries.size(); ++i)
        if (entries[i].named.name == wanted) order.push_back(i);
    auto sorted = order;  // each once, or the order is not this model's
    std::sort(sorted.begin(), sorted.end());
    const bool twice = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
    if (order.size() == entries.size() && !twice) reducer_.reorder(order, learned);
  }

  /// Parameters whose gradients are left out, since no rank had one in the last pass: a checkpoint keeps that, too, for
  /// buckets depend on it.
  std::vector<std::string> resting_parameters() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < reducer_.layout().entries(); ++i)
      if (reducer_.layout().rests(i)) names.push_back(reducer_.layout().name(i));
    return names;
  }
  [[gnu::cold]] void set_resting_parameters(std::span<const std::string> names) { reducer_.rest(names); }

  /// Calls `step` with each parameter as soon as its averaged gradient is there, in the middle of backward; with
  /// nothing, no more. For FusedOptimizer. Throws UsageError where one is there already, and under a NonFinite policy,
  /// which judges when backward has ended.
  void step_in_backward(std::function<void(const ParameterOn<D>&)> step) {
    check<UsageError>(!step || options_.non_finite == NonFinite::propagate,
                      "DistributedDataParallel: an optimizer that steps in backward can't wait for a NonFinite policy");
    check<UsageError>(!step || !averages_in_parts,
                      "DistributedDataParallel: an optimizer that steps in backward needs whole averages, and this "
                      "hook leaves each rank a part");
    check<UsageError>(!step || !reducer_.on_averaged,
                      "DistributedDataParallel: another optimizer steps this net in backward; it has to go first");
    reducer_.on_averaged = std::move(step);
  }

  /// For an optimizer that steps some numbers alone: calls `f` while the parameters have their gradients, whether the
  /// hook has averaged them whole or in parts.
  template <class F>
  void with_gradients(const F& f) {
    if constexpr (averages_in_parts)
      reducer_.parts().show(f);
    else
      f();
  }
  /// Those in parts have been used.
  void forget_parts() { reducer_.parts().forget(); }
  /// Has each rank average its part, where backward has left that to the optimizer. All ranks call it.
  void average_parts() {
    if constexpr (averages_in_parts) reducer_.parts().average(this->communicator_);
  }
  /// Where backward has left it so: all ranks' gradients, which the optimizer averages as it steps, and which stay as
  /// they are until all have done so; else null. All ranks call it, and none returns before all have.
  const detail::SharedGradients* gradients_apart() {
    if constexpr (averages_in_parts) {
      auto& parts = reducer_.parts();
      if (!parts.apart()) return nullptr;
      parts.tell_weight(this->communicator_);
      return &parts.shared();
    }
    return nullptr;
  }

  // For an optimizer whose ranks each step numbers of their own.

  /// Moves the parameters, rank 0's numbers, into memory that all ranks have in common, where there is such: on CPUs of
  /// one machine. Where the hook averages in parts, gradients move to where all ranks reach them, and backward leaves
  /// averaging to the optimizer. All ranks call it.
  void share_parameters() {
    if (!std::is_same_v<D, Cpu> || this->communicator_.size() == 1) return;
    this->broadcast_parameters(0, shared());
    const auto of_rank_0 = [&communicator = this->communicator_](std::size_t bytes) {
      const auto memory = comm::allocate_shared(communicator, communicator.rank() == 0 ? bytes : 0);
      return memory.empty() ? nullptr : memory[0];
    };
    const auto reached = [this, own = own_memory()](std::size_t bytes) -> std::shared_ptr<void> {
      auto memory = reducer_.parts().shared().allocate(this->communicator_, bytes);
      return memory || !own ? memory : own(bytes);
    };
    with_gradients([&] {
      this->flat_.use_memory(of_rank_0, averages_in_parts ? reached : own_memory(),
                             nn::FlatParameters<D>::Values::in_common);
    });
  }
  /// Moves them back into memory of each rank's own. No collective: nobody may step meanwhile.
  void keep_own_parameters() {
    with_gradients([&] { this->flat_.use_memory(own_memory(), own_memory()); });
  }

  // For checkpoints.

  /// Whether the hook remembers something, so that all ranks take part in a checkpoint.
  static constexpr bool hook_remembers =
      detail::HookMemory<D, Hook, Communicator>::by_parameter || detail::HookMemory<D, Hook, Communicator>::by_number;
  /// Whether ranks may have parameters and optimizers of their own, and whether they have by now.
  static constexpr bool ranks_may_differ = requires(const Hook& hook) { hook.ranks_differ(); };
  bool ranks_differ() {
    if constexpr (ranks_may_differ)
      return hook().ranks_differ();
    else
      return false;
  }
  /// Those that ranks have stepped on their own since they last had the same.
  std::vector<std::string> parameters_apart() requires ranks_may_differ { return hook().stepped.names(this->flat_); }
  void set_parameters_apart(std::span<const std::string> names) requires ranks_may_differ {
    hook().stepped.set(this->flat_, names);
  }
  /// What the hook remembers of parameters: the same names on all ranks, with each rank's own numbers, such as
  /// `rest.conv1.weight`. `full`: made where there is none so far.
  std::vector<optim::StateTensor> hook_state(bool full = false) { return reducer_.memory().state(full); }
  /// Takes copies of such tensors, instead of all that the hook remembers.
  void set_hook_state(const std::vector<optim::StateTensor>& tensors) { reducer_.memory().replace(tensors); }

  /// Multiplies what the hook has not sent yet: for GradScaler, whose scale it has.
  void scale_hook_rest(double factor) requires(detail::HookMemory<D, Hook, Communicator>::by_parameter) {
    reducer_.memory().scale_rest(factor);
  }

  const DistributedDataParallelOptions& options() const { return options_; }
  Hook& hook() { return reducer_.hook(); }
  /// Sizes of the buckets in bytes, in the order in which they are reduced.
  std::vector<std::size_t> bucket_bytes() const {
    std::vector<std::size_t> sizes;
    for (const auto& bucket : reducer_.layout().buckets()) sizes.push_back(reducer_.layout().bytes(bucket));
    return sizes;
  }
  const std::vector<detail::GradientBucket>& buckets() const { return reducer_.layout().buckets(); }
  /// Where the time of this rank's iterations goes.
  const DdpLoggingData& logging_data() const { return reducer_.clock().data(); }
  void reset_logging_data() { reducer_.clock().forget(); }
  /// Backward passes whose gradients NonFinite::skip_step has thrown away.
  std::int64_t skipped_steps() const { return reducer_.skipped_steps(); }

 private:
  static constexpr bool averages_parameters = requires(Hook & h, const nn::FlatParameters<D>& flat, Communicator& c) {
    h.before_forward(flat, c, [](const std::string&) { return true; });
  };

  DistributedDataParallel(std::unique_ptr<detail::RankDevice<D>> device, Model model,
                          const DistributedDataParallelOptions& options, std::uint64_t seed, Hook hook)
      : DistributedDataParallel(device->place(std::move(model)), device->communicator(), options, seed,
                                std::move(hook)) {
    device_ = std::move(device);
  }

  /// Whether ranks share the parameter or buffer of a name, as a function.
  auto shared() const {
    return [this](const std::string& wanted) { return !options_.ignores(wanted); };
  }

  /// A rank's memory that the communicator reaches without a copy, where it has such.
  typename nn::FlatParameters<D>::Allocate own_memory() const {
    if constexpr (std::is_same_v<D, Cpu> && requires(Communicator & c) { c.allocate(0); })
      return [&communicator = this->communicator_](std::size_t bytes) { return communicator.allocate(bytes); };
    else
      return nullptr;
  }

  [[gnu::cold]] void take_state(int root) {
    this->broadcast_parameters(root, shared());
    this->broadcast_buffers(root);
  }

  // In a pass that records gradients.
  bool hooks_buffers() { return buffer_hook_ && reducer_.sync && !this->joining_ && this->any_training(); }
  void share_buffers(BufferCommHookLocation now) {
    if (hooks_buffers() && now == buffer_hook_location_) buffer_hook_(this->buffers_, this->communicator_);
  }

  void begin_pass(Index samples) {
    const bool sends_buffers = options_.broadcast_buffers && reducer_.sync && this->any_training() && !hooks_buffers();
    this->shares_.begin(samples, reducer_.sync, sends_buffers, this->random_.step, reducer_.fit_buckets());
    this->check_all_here();
    reducer_.weigh_anew();
    if (sends_buffers) this->broadcast_buffers(this->joining_ ? this->shares_.first_active() : 0);
    share_buffers(BufferCommHookLocation::pre_forward);
    if constexpr (averages_parameters) hook().before_forward(this->flat_, this->communicator_, shared());
  }

  std::unique_ptr<detail::RankDevice<D>> device_;  // where it was made for a run
  DistributedDataParallelOptions options_;
  detail::Reducer<D, Hook, Communicator> reducer_;
  std::function<void(std::span<const nn::NamedBuffer<D>>, Communicator&)> buffer_hook_;
  BufferCommHookLocation buffer_hook_location_ = BufferCommHookLocation::pre_forward;
  const int exceptions_before_ = std::uncaught_exceptions();
};

}  // namespace chorus
