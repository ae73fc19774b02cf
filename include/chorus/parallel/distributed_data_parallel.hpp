#pragma once
/// DistributedDataParallel: one process per device. Every rank holds the whole model and computes on its share of the
/// batch; while backward runs, gradients are averaged over all ranks, bucket by bucket, so that all take the same step.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/parallel/ddp/access.hpp>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/ddp/policy_with_options.hpp>
#include <chorus/parallel/ddp/rank_device.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <chorus/parallel/join.hpp>
#include <chorus/parallel/no_sync.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>

namespace chorus {

namespace ddp {

/// Steps 2 to 6 of DistributedDataParallel: how a rank's gradients become the averages over all ranks. Independent of
/// the model's type.
template <Device D, class Hook, class Communicator>
class Reducer : public PolicyWithOptions<D, Hook, Communicator> {
  using Base = PolicyWithOptions<D, Hook, Communicator>;
  using Extension = ddp::Extension<D>;

 protected:
  using Base::Base;
  /// If a rank throws during communication, it aborts the group, so that peers fail at once instead of waiting.
  ~Reducer();

  /// Called at the end of the net's construction.
  [[gnu::cold]] void begin();
  /// A forward pass that records gradients begins, with the net's message about it: on all ranks.
  void forward_begins(ForwardPass& pass);
  void forward_ended();
  /// 3. Before backward, ranks exchange the counts that their losses average over: the weights of their gradients.
  void backward_is_weighed() override;

 private:
  // 4. The first gradient begins a pass; full buckets are sent while backward continues.
  void gradient_is_final(std::size_t i);
  void begin_backward() override;
  // 5. After backward, the remaining buckets are sent, and all averages are awaited.
  void finalize_backward() override;
  // 6. A bucket's gradients become sum(weight * gradients) over all ranks.
  void send_full() override;
  void finalize_buckets(std::span<ddp::Bucket> some) override;

  const int exceptions_before_ = std::uncaught_exceptions();
};

template <Device D, class Hook, class Communicator>
Reducer<D, Hook, Communicator>::~Reducer() {
  if (this->in_backward) this->give_up(std::uncaught_exceptions() > exceptions_before_);
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::begin() {
  this->install();
  // 1. All ranks begin with rank 0's parameters and buffers.
  if (this->options().init_sync) this->take_first_state();
  // 2. Each parameter reports when its gradient is final.
  this->on_gradients([this](std::size_t number) { gradient_is_final(this->entry_of(number)); });
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::forward_begins(ForwardPass& pass) {
  this->notify(&Extension::forward_begins, pass);
  this->begin_pass(pass, this->joining_);  // ranks without batches must hear of it
  this->notify(&Extension::ready_for_forward);
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::forward_ended() {
  this->notify(&Extension::forward_ended);
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::backward_is_weighed() {
  this->notify(&Extension::weighed);
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::gradient_is_final(std::size_t i) {
  this->check_weighed();
  if (this->sync && !this->in_backward) {
    begin_backward();
    this->when_backward_ends([this] { finalize_backward(); });
  }
  this->notify(&Extension::gradient_arrived, i);
  if (!this->sync || !this->buckets.sends(i)) return;
  if (this->buckets.left(i) == 0) this->refuse_second_arrival(i);
  this->fill(i);  // a user's backward function may not give a gradient
  this->buckets.arrived(i);
  send_full();
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::begin_backward() {
  this->weight = this->shares_.weight();
  this->buckets.begin_pass();
  this->in_backward = true;
  this->notify(&Extension::backward_begins);
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::finalize_backward() {
  this->notify(&Extension::backward_ended);
  send_full();
  if (!this->buckets.all_left()) this->refuse_missing();
  finalize_buckets(this->buckets.on_their_way());
  this->notify(&Extension::averaged);
  this->in_backward = false;
  this->notify(&Extension::pass_ended);
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::send_full() {
  while (ddp::Bucket* const bucket = this->buckets.next_full()) {
    this->notify(&Extension::bucket_is_full, *bucket);
    this->notify(&Extension::communicates, true);
    this->calls_.start(*this, *bucket);
    this->notify(&Extension::communicates, false);
  }
}

template <Device D, class Hook, class Communicator>
void Reducer<D, Hook, Communicator>::finalize_buckets(std::span<ddp::Bucket> some) {
  this->notify(&Extension::communicates, true);
  this->calls_.wait_for(*this, some);
  this->notify(&Extension::communicates, false);
  for (ddp::Bucket& bucket : some) {
    for (const std::size_t i : bucket.parameters) this->parameter(i).set_grad_arrived(true);
    this->buckets.returned();
  }
}

}  // namespace ddp

/// The gradient is one device's for the whole batch: the average over the elements of the loss's mean (samples, counted
/// tokens, class weights), or over samples if the loss doesn't say. All ranks hold bit-identical parameters after each
/// step. Every rank makes the same calls. `Hook` averages buckets: see ddp/hook.hpp. A gradient hook on a parameter
/// sees this rank's gradient; its result is averaged. `grad` gives this rank's own gradient and sends nothing.
///
/// The algorithm, in six steps, is ddp::Reducer above. Options are extensions in ddp/, one file each; the core calls
/// them with `notify` at the moments of ddp/extension.hpp.
template <class Model, class Hook = AllReduce, class Communicator = comm::AnyCommunicator>
class DistributedDataParallel
    : public DistributedPolicy<Model, Communicator,
                               ddp::Reducer<typename nn::detail::DeviceOfModel<Model>::type, Hook, Communicator>> {
  using Base = DistributedPolicy<Model, Communicator,
                                 ddp::Reducer<typename nn::detail::DeviceOfModel<Model>::type, Hook, Communicator>>;

 public:
  using typename Base::D;
  using policy_type = DistributedDataParallel;
  static constexpr const char* name = "ddp";
  static_assert(
      ddp::HookTraits<Hook, D, Communicator>::starts,
      "DistributedDataParallel: expected a hook with comm::Work start(const GradBucket<T, D>&, Communicator&)");
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = DistributedDataParallel<Other, Hook, Communicator>;

  /// Compares the models of all ranks and takes rank 0's parameters and buffers. Throws UsageError, on every rank, if
  /// names, shapes, dtypes or options differ, or no parameter wants a gradient. The communicator must outlive this.
  // Not inlined: it calls cold functions, and what leads to them, such as a user's loop, is compiled for size.
  [[gnu::noinline]] DistributedDataParallel(Model model, Communicator& communicator,
                                            const DistributedDataParallelOptions& options = {},
                                            std::uint64_t seed = initial_seed(), Hook hook = {})
      : Base(std::move(model), communicator, options, seed, std::move(hook)) {
    this->begin();
  }
  /// For `launch`: takes communicator and seed from `run`. A model for GPUs moves to this rank's GPU (see RankDevice).
  template <detail::LaunchedRun Run>
  DistributedDataParallel(Model model, Run& run, const DistributedDataParallelOptions& options = {}, Hook hook = {})
      : DistributedDataParallel(std::make_unique<detail::RankDevice<D>>(run), std::move(model), options, run.seed(),
                                std::move(hook)) {
    run.check_options();
  }

  /// Returns the model's output for this rank's share of the batch.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!this->in_backward,
                      "DistributedDataParallel: the last backward pass ended early; its gradients are incomplete");
    ddp::ForwardPass pass{.samples = detail::samples_of(this->options().dim, inputs...), .sync = this->sync};
    pass.number = this->begin_forward(pass.samples).step;
    const auto model = [&] { return this->call_model(inputs...); };
    if (!grad_enabled()) return this->run_without_grad(pass, model);
    this->forward_begins(pass);
    auto output = this->run_recorded(model);
    this->forward_ended();
    return output;
  }

  /// While the returned object lives, backward adds to this rank's own gradients without communication. The first
  /// backward after it averages the sum. Each pass is weighted by its own global batch, so micro-batches may be divided
  /// unevenly.
  [[nodiscard]] NoSync no_sync() { return this->accumulate(); }
  /// Runs `body`, a loop over batches whose number may differ between ranks; each batch is an iteration of forward and
  /// backward. A rank that has ended takes part in the others' collectives, without samples, until all have ended. Then
  /// all take the parameters and buffers of the rank that ended last. `body` makes no other collective calls: a forward
  /// pass without gradients is local to the rank. For loops over several nets see chorus::join.
  template <class Body>
  void join(const Body& body, const JoinOptions& join_options = {}) {
    chorus::join(body, join_options, *this);
  }

 private:
  friend class detail::Access<DistributedDataParallel>;

  DistributedDataParallel(std::unique_ptr<detail::RankDevice<D>> device, Model model,
                          const DistributedDataParallelOptions& options, std::uint64_t seed, Hook hook)
      : DistributedDataParallel(device->place(std::move(model)), device->communicator(), options, seed,
                                std::move(hook)) {
    device_ = std::move(device);
  }

  std::unique_ptr<detail::RankDevice<D>> device_;  // set if constructed from a run
};

}  // namespace chorus
