#pragma once
/// Base of the policies of several processes, independent of the model's type: shares of the data, and values that all
/// ranks agree on.

#include <algorithm>
#include <any>
#include <array>
#include <chorus/autograd/loss_terms.hpp>
#include <chorus/autograd/tape.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/comm/engine/failure.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/ddp/batch_shares.hpp>
#include <chorus/parallel/ddp/same_model.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <chorus/parallel/join.hpp>
#include <chorus/parallel/model_handles.hpp>
#include <chorus/parallel/no_sync.hpp>
#include <chorus/parallel/policy.hpp>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

namespace ddp {
class BucketSums;
template <Device D, class Communicator>
class Core;
}  // namespace ddp

namespace detail {
/// The arguments that `launch` gives a program of several ranks. It is a named concept because clang 14 ignores a
/// constructor's requires clause when it deduces class template arguments, and would take a communicator for a run.
template <class Run>
concept LaunchedRun = requires(Run& run) {
  run.communicator();
};
}  // namespace detail

/// See DistributedPolicy.
template <Device Where, class Communicator>
class PolicyOfRanks : public PolicyOn<Where>, public detail::JoiningPolicy {
 public:
  using D = Where;
  static constexpr bool distributed = true;

  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(), sampler_options(options));
  }
  int devices() const { return communicator_.size(); }
  Communicator& communicator() const { return communicator_; }

  virtual ~PolicyOfRanks();

  /// Combines `value`, the mean over this rank's `samples`, to the mean over all ranks' samples. Throws UsageError, on
  /// every rank, if their optimizers have not made the same steps.
  double mean(double value, Index samples) {
    const double mark = program_.mark(), size = devices();
    double sums[4] = {samples == 0 ? 0 : value * static_cast<double>(samples), static_cast<double>(samples), mark,
                      mark * mark};
    sum(sums);
    if (size * mark != sums[2] || size * mark * mark != sums[3]) [[unlikely]]  // each rank sees the difference
      shares_.meet_now();
    return sums[1] == 0 ? 0 : sums[0] / sums[1];
  }
  /// Sums over all ranks, in place.
  void sum(std::span<double> values) { communicator_.all_reduce(values, comm::ReduceOp::sum, {}); }
  /// Replaces a number, in memory of the parameters' device, by the maximum over all ranks.
  void make_largest(std::int32_t* number) { communicator_.all_reduce(std::span(number, 1), comm::ReduceOp::max, {}); }

  /// All ranks call it, so that they evaluate the model that is saved. If passes in training have changed buffers by
  /// each rank's own share, such as batch norm's running statistics, all take rank 0's, unless the policy doesn't share
  /// them; LocalSgd and ParameterServer also make parameters equal.
  void eval() {
    if (!joining_) {
      if (buffers_apart_ || passes_together_) meet();
      synchronize();
    }
    PolicyOn<D>::eval();
  }
  void train(bool training = true) {
    if (!training) return eval();
    PolicyOn<D>::train();
  }

  /// See PolicyOn::gathered.
  [[nodiscard]] typename PolicyOn<D>::Gathered gathered(const GatheredOptions& options = {}) {
    meet();
    return PolicyOn<D>::gathered(options);
  }
  /// The program intends ranks to step with, write or skip different things: passes stop comparing ranks. All ranks
  /// call it.
  void let_ranks_differ() { program_.let_ranks_differ(); }
  std::shared_ptr<BatchGroup> global_batch() const { return group_; }

  /// Whether `text` is the same on all ranks; a collective.
  [[gnu::cold]] bool same_on_all_ranks(std::string_view text) { return comm::same_text(communicator_, text); }

 protected:
  data::SamplerOptions sampler_options(const SamplingOptions& options) const {
    return {.rank = communicator_.rank(),
            .world_size = communicator_.size(),
            .shuffle = options.shuffle,
            .seed = this->seed(),
            .padding = options.padding,
            .ledger = program_.ledger()};
  }
  /// Accepts all parameters and buffers.
  struct All {
    bool operator()(const auto&) const { return true; }
  };

  /// `title`: the policy's name in messages.
  PolicyOfRanks(nn::Module& model, std::string_view title, Communicator& communicator, int dim, std::uint64_t seed);

  /// Throws UsageError, on every rank, if the ranks' models or `options` differ. All ranks take rank 0's seed.
  template <class Counts>
  [[gnu::cold]] void check_same(const std::string& options, const Counts& counts) {
    detail::check_same_description(communicator_, title_,
                                   options + own_options() + detail::model_description<D>(this->any_model_, counts));
    communicator_.broadcast(std::span(&this->random_.seed, 1), 0, {});
  }
  /// Options that ranks compare in addition to a policy's.
  virtual std::string own_options() const { return {}; }

  /// Calls `f(i)` when backward has the final gradient of the parameter that is now entry `i`.
  virtual void on_gradients(std::function<void(std::size_t)> f);
  /// Calls `f()` when the backward run of this thread has ended.
  virtual void when_backward_ends(std::function<void()> f);

  /// Aborts the group so that peers fail at once instead of waiting. For destructors: it allocates nothing.
  [[gnu::cold]] void give_up(bool unwinding = false) noexcept {
    communicator_.abort(unwinding ? comm::why_it_unwinds() : "its net has ended in the middle of a backward pass");
  }

  void broadcast_bytes(void* data, std::size_t bytes, int root, trace::Traffic traffic) {
    if (bytes == 0 || communicator_.size() == 1) return;
    communicator_.broadcast(std::span(static_cast<std::uint8_t*>(data), bytes), root, {.traffic = traffic});
  }

  /// Takes `root`'s parameters whose names `counts` accepts; these lie before the others.
  template <class Counts>
  [[gnu::cold]] void broadcast_parameters(int root, const Counts& counts) {
    std::vector<std::size_t> elements(this->flat_.groups().size());
    for (const auto& entry : this->flat_.entries())
      if (counts(entry.named.name)) {
        elements[entry.group] = entry.begin + entry.count;
        entry.parameter().touch();
      }
    for (std::size_t g = 0; g < elements.size(); ++g) {
      const auto& group = this->flat_.groups()[g];
      broadcast_bytes(group.value(0), elements[g] * size_of(group.dtype), root, trace::Traffic::parameters);
    }
  }

  /// Takes `root`'s buffers of the dtypes that `counts` accepts, in one message.
  template <class Counts = All>
  void broadcast_buffers(int root, const Counts& counts = {}) {
    buffers_apart_ = false;
    std::size_t bytes = 0;
    for (const auto& named : buffers_)
      if (counts(named.buffer->dtype())) bytes += named.buffer->size_bytes();
    if (bytes == 0 || communicator_.size() == 1) return;
    const D device = buffers_.front().buffer->where();
    if (buffer_message_.bytes() < bytes) {
      const MemoryScope scope(trace::Memory::buckets);
      buffer_message_ = Storage<D>(device, bytes);
    }
    const auto copy = [&](bool pack) {
      auto* place = static_cast<std::byte*>(buffer_message_.data());
      for (const auto& named : buffers_) {
        if (!counts(named.buffer->dtype())) continue;
        const std::size_t size = named.buffer->size_bytes();
        copy_bytes(device, pack ? place : named.buffer->memory(), device, pack ? named.buffer->memory() : place, size);
        place += size;
      }
    };
    if (communicator_.rank() == root) copy(true);
    broadcast_bytes(buffer_message_.data(), bytes, root, trace::Traffic::buffers);
    if (communicator_.rank() != root) copy(false);
  }

  /// Whether ranks evaluate with the same buffers.
  virtual bool shares_buffers() const { return true; }
  /// All ranks meet at the same point of their programs; otherwise all throw UsageError.
  virtual void meet() {
    if (!joining_) shares_.meet();
  }
  /// See eval().
  virtual void synchronize() {
    if (buffers_apart_) broadcast_buffers(0);
  }

  std::size_t ranks() const { return static_cast<std::size_t>(communicator_.size()); }
  /// The scope in which `sync` is off, so that gradients accumulate.
  NoSync scope_without(bool& sync) const { return whole_passes_ ? NoSync() : NoSync(sync); }
  /// Replaces the hook in summing the buckets of a DDP; null: the hook sums. `default_hook`: the hook is AllReduce.
  virtual std::unique_ptr<ddp::BucketSums> bucket_sums(ddp::Core<D, Communicator>&, bool default_hook);

  // For chorus::join.

  void begin_join(const detail::JoinFacts& facts) override;
  void end_join() override { joining_ = throw_early_ = false; }
  /// A forward pass that records gradients begins. `now`: ranks exchange their messages here.
  void begin_pass(const ddp::ForwardPass& pass, bool now) {
    if (this->any_model_.training()) ++program_.ledger()->passes;
    shares_.begin(pass, now || asks_in_forward_);
    check_all_here();
  }
  /// Checks the ranks' messages of this pass: throws if a rank has run out of batches and may not.
  void check_all_here() {
    if (!throw_early_) return;
    const auto joined = shares_.joined_ranks();
    check<UsageError>(joined.empty(), title_, "::join: rank ", joined,
                      " has run out of batches; throw_on_early_termination ends all ranks");
  }
  /// A pass of other ranks begins, in which this rank has no samples; false if all have ended.
  [[gnu::cold]] bool begin_shadow_pass() {
    constexpr int skew_to_warn_of = 1000;  // PyTorch's
    shares_.begin_joined();
    if (shares_.first_active() < 0) return false;
    if (shadow_passes_++ == skew_to_warn_of)
      detail::say(cat("warning: ", title_, "::join: rank ", communicator_.rank(), " has at least ", skew_to_warn_of,
                      " batches fewer than others have, and only joins their collective calls"));
    check_all_here();
    last_active_ = shares_.first_active();
    return true;
  }
  /// All ranks have ended: they agree on the number of passes, on which dropout masks depend. Returns a rank that ended
  /// last; -1 if all had the same number of batches: those that ended last don't know it.
  [[gnu::cold]] int end_shadow_passes() {
    std::int64_t last_and_passes[] = {last_active_, this->forward_passes()};
    communicator_.all_reduce(std::span(last_and_passes), comm::ReduceOp::max, {});
    this->set_forward_passes(static_cast<std::uint32_t>(last_and_passes[1]));
    program_.forget(last_and_passes[0] >= 0);
    return static_cast<int>(last_and_passes[0]);
  }

  /// Runs `call()`, a forward pass for which `begin_forward` was called, with the random numbers of this rank's share,
  /// and returns its result. `with_others`: all ranks join collectives of layers, so that synchronised layers in
  /// training see the whole batch. Throws UsageError if a layer has got other parameters or buffers since the policy
  /// took the model, or if another policy has taken it.
  template <class Call>
  auto run_forward(bool with_others, const Call& call) {
    handles_.check_kept(this->any_model_, this->flat_);
    const RandomScope scope(this->random_);
    const BatchGroupScope group(with_others ? group_ : nullptr);
    const detail::WatchScope watch(communicator_.rank() == 0 ? this->watch_once() : nullptr);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    if (!buffers_apart_ && !buffers_.empty() && (grad_enabled() ? this->any_training() : this->any_model_.training())) {
      buffers_apart_ = true;
      buffer_writes_ = count_buffer_writes();
    }
    auto output = call();
    this->end_forward();
    return output;
  }

  /// A forward pass that records gradients: its backward passes compute weights before they start.
  template <class Call>
  auto run_recorded(const Call& call) {
    auto& pass = recorded_[next_recorded_++ % recorded_.size()];
    pass = {};
    const auto begin = Node::next_sequence();
    watch_backward(watch_);
    auto output = run_forward(true, call);
    pass = {begin, Node::next_sequence()};
    return output;
  }
  /// Called at a gradient. Throws UsageError if backward began with losses that ranks divide in different ways, and did
  /// not pass through a forward pass of this policy: it is too late then to weight each loss.
  void check_weighed() {
    if (!whole_passes_) weigh_unless_weighed(true);
  }
  void weigh_unless_weighed(bool refuses_sums) {
    if (weighed_run_ == backward_run()) return;
    losses_.clear();
    bool has_sums = false;
    for (const Ref<Node>& node : in_captured_step() ? std::span<const Ref<Node>>() : means_of_backward()) {
      if (node->is_mean()) losses_.push_back(detail::LossShare::mean(node->mean_over()));
      has_sums = has_sums || (!node->is_mean() && refuses_sums && communicator_.size() > 1);
    }
    bool right = !has_sums;
    for (const double scale : weigh_run(has_sums)) right = right && scale == 1;
    check<UsageError>(right,
                      "policy: backward found a sum over the batch, or losses that are means over different counts, "
                      "but no forward pass of the net in this thread: call the net, not its module()");
  }
  /// Whether this thread's current backward run has its weights.
  bool weighed() const { return whole_passes_ || weighed_run_ == backward_run(); }
  /// All ranks exchange the means and sums in their losses.
  virtual std::span<const double> weigh(std::span<const detail::LossShare> losses, bool refused) {
    return shares_.weigh(losses, refused);
  }
  /// This rank's weight in the pass is known, and backward has not begun.
  virtual void backward_is_weighed() {}

  /// A forward pass without gradients is local to this rank, unless an operation asks for its position in the batch.
  template <class Call>
  auto run_without_grad(const ddp::ForwardPass& pass, const Call& call) {
    if (buffers_apart_ && !joining_ && communicator_.rank() > 0 && !this->any_model_.training())
      check_evaluates_rank_0s();
    shares_.begin_without_grad(pass, !joining_);
    return run_forward(!joining_, call);
  }
  /// Backward reaches one of this net's last passes: ranks compute weights for their losses, given by all these nodes.
  virtual void weigh_losses(std::span<const Ref<Node>> nodes);
  std::span<const double> weigh_run(bool refused) {
    weighed_run_ = backward_run();
    return weigh(losses_, refused);
  }

  const std::string_view title_;
  Communicator& communicator_;
  ddp::SameProgram<D, Communicator> program_;
  detail::BatchShares<Communicator> shares_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  Storage<D> buffer_message_;
  bool buffers_apart_ = false;       // passes in training may have made them differ between ranks
  std::uint64_t buffer_writes_ = 0;  // before those passes
  detail::ModelHandles handles_;
  bool joining_ = false, throw_early_ = false;
  bool whole_passes_ = false;     // every pass sums the whole batch's gradients by itself
  bool passes_together_ = false;  // all passes are collective: a rank can't evaluate alone
  bool asks_in_forward_ = false;  // ranks exchange messages before a pass begins
  bool operators_send_ = false;   // forward passes have had collectives; so will backward

  // Replays of a captured step (Graphed) don't exchange messages: weights are by samples, whose numbers stay the same.
  bool in_captured_step() const {
#if CHORUS_USE_CUDA
    if constexpr (!std::is_same_v<D, Cpu>)
      return cuda::is_capturing(cuda::current_stream(this->flat_.entries().front().parameter().where()));
#endif
    return false;
  }

 private:
  /// Nodes of the tape may outlive the policy: then the group is gone.
  struct Group final : BatchGroup {
    explicit Group(PolicyOfRanks& owner) : policy(&owner) {}
    void sum(std::span<double> values) override {
      of_living().operators_send_ = true;
      of_living().sum(values);
    }
    void max(std::span<double> values) override {
      const auto& net = of_living();
      check<UsageError>(!net.joining_ || net.throw_early_ || net.communicator_.size() == 1, net.title_,
                        "::join: QuantizationAware needs the batches of all ranks, and a rank has run out of batches: "
                        "set throw_on_early_termination");
      of_living().operators_send_ = true;
      of_living().communicator_.all_reduce(values, comm::ReduceOp::max, {.traffic = trace::Traffic::activations});
    }
    double weight() override { return of_living().shares_.weight(); }
    std::vector<std::any> exchange(const std::any& own) override {
      auto& net = of_living();
      check<UsageError>(!net.joining_, net.title_, "::join: a rank without batches calls no collectives of a model");
      check<UsageError>(!grad_enabled() || !net.program_.ledger()->own_gradients, net.title_,
                        ": each rank steps by itself, and a collective's gradients are for all ranks' losses: expected "
                        "DistributedDataParallel or FullyShardedDataParallel, or NoGrad around the call");
      net.operators_send_ = true;
      const auto texts = comm::all_gather_object(net.communicator_, std::any_cast<const std::string&>(own));
      return std::vector<std::any>(texts.begin(), texts.end());
    }
    std::size_t member() const override { return static_cast<std::size_t>(policy->communicator_.rank()); }
    PolicyOfRanks& of_living() {
      check<UsageError>(policy != nullptr, "SyncBatchNorm: the policy that ran the forward pass was destroyed");
      return *policy;
    }
    PolicyOfRanks* policy;
  };
  std::shared_ptr<Group> group_ = std::make_shared<Group>(*this);

  struct Watch final : BackwardWatch {
    explicit Watch(PolicyOfRanks& owner) : policy(&owner) {}
    void backward_begins(std::span<const Ref<Node>> nodes) override { policy->backward_begins(nodes); }
    PolicyOfRanks* policy;
  };
  // Weights are computed before backward passes through one of this net's last passes.
  void backward_begins(std::span<const Ref<Node>> nodes) {
    const auto in = [&](const Recorded& pass) {
      const auto first = std::partition_point(nodes.begin(), nodes.end(),
                                              [&](const Ref<Node>& node) { return node->sequence() >= pass.end; });
      return first != nodes.end() && (*first)->sequence() >= pass.begin;
    };
    if (std::none_of(recorded_.begin(), recorded_.end(), in)) return;
    losses_.clear();
    weigh_losses(nodes);
    backward_is_weighed();
  }
  void weigh_terms(std::span<const double> scales) {
    terms_.check_linear(title_);
    check<UsageError>(
        terms_.needs_alike() == nullptr || shares_.counted_alike(), title_, ": '", terms_.needs_alike(),
        "' of terms that ranks divide differently, and of a value with a gradient: expected one of each, or ",
        detail::whole_batch_line);
    for (std::size_t i = 0; i < scales.size(); ++i) {
      Node& node = *terms_.all()[i].node;
      if (node.scale() == scales[i]) continue;
      check<UsageError>(node.scale() == 1,
                        "backward: one loss has two nets whose batches are divided in different ways");
      scale_in_backward(node, scales[i]);
    }
  }
  std::uint64_t count_buffer_writes() const;
  [[gnu::cold]] void check_evaluates_rank_0s();
  struct Recorded {
    std::uint64_t begin = 0, end = 0;  // sequence numbers of nodes
  };
  std::array<Recorded, 16> recorded_{};
  std::size_t next_recorded_ = 0;
  std::uint64_t weighed_run_ = 0;  // the last backward run with weights
  detail::LossTerms terms_;
  std::vector<detail::LossShare> losses_;  // of the same run
  std::shared_ptr<Watch> watch_ = std::make_shared<Watch>(*this);

  // Used while joining_.
  int shadow_passes_ = 0, last_active_ = -1;
};

template <Device Where, class Communicator>
PolicyOfRanks<Where, Communicator>::~PolicyOfRanks() {
  group_->policy = nullptr;
}

template <Device Where, class Communicator>
PolicyOfRanks<Where, Communicator>::PolicyOfRanks(nn::Module& model, std::string_view title, Communicator& communicator,
                                                  int dim, std::uint64_t seed)
    : PolicyOn<D>(model, seed),
      title_(title),
      communicator_(communicator),
      program_(title, communicator),
      shares_(communicator),
      buffers_(nn::named_buffers<D>(model)),
      handles_(model) {
  if constexpr (!std::is_same_v<D, Cpu>)
    check<UsageError>(communicator.takes_device_memory(), "policy: expected a communicator for the memory of ", D::kind,
                      ", such as comm::StagedCommunicator, got ", communicator.backend());
  check<UsageError>(dim >= 0, title, ": expected dim of at least 0, got ", dim);
  shares_.compare(program_);
  program_.listen(this->flat_.parameters(), buffers_, {.contents = true});
  this->random_.dim = dim;
  this->random_.first_sample = [this] {
    const auto first = shares_.first_sample();
    if (const auto pass = shares_.pass(); pass != this->random_.step) this->settle_pass(pass);
    detail::random_context()->step = this->random_.step;  // backward recomputes a part with a copy of the context
    return first;
  };
  this->random_.devices = communicator.size();
  this->random_.is_share = [this](std::int64_t samples) { return shares_.is_share(samples); };
}

template <Device Where, class Communicator>
void PolicyOfRanks<Where, Communicator>::on_gradients(std::function<void(std::size_t)> f) {
  for (std::size_t i = 0; i < this->flat_.entries().size(); ++i)
    this->flat_.entries()[i].parameter().on_grad([f, alive = this->alive(), i] {
      if (!alive.expired()) f(i);
    });
}

template <Device Where, class Communicator>
void PolicyOfRanks<Where, Communicator>::when_backward_ends(std::function<void()> f) {
  at_backward_end([f = std::move(f), alive = this->alive()] {
    if (!alive.expired()) f();
  });
}

template <Device Where, class Communicator>
void PolicyOfRanks<Where, Communicator>::begin_join(const detail::JoinFacts& facts) {
  check<UsageError>(!joining_, title_, "::join: it is already inside join");
  joining_ = true;
  throw_early_ = facts.throw_early;
  shadow_passes_ = 0;
  last_active_ = -1;
}

template <Device Where, class Communicator>
void PolicyOfRanks<Where, Communicator>::check_evaluates_rank_0s() {
  const bool as_saved = !shares_buffers() || buffer_writes_ == count_buffer_writes() || this->any_training();
  check<UsageError>(as_saved, title_, ": rank ", communicator_.rank(),
                    " evaluates with its own buffers (running statistics), which a file does not store: call "
                    "net.eval() on all ranks, which copies rank 0's, not net.module().eval()");
}

template <Device Where, class Communicator>
std::uint64_t PolicyOfRanks<Where, Communicator>::count_buffer_writes() const {
  std::uint64_t all = 0;
  for (const auto& named : buffers_)
    if (const auto* const writes = named.buffer->storage().writes()) all += writes->counted();
  return all;
}

template <Device Where, class Communicator>
void PolicyOfRanks<Where, Communicator>::weigh_losses(std::span<const Ref<Node>> nodes) {
  if (communicator_.size() == 1 || in_captured_step()) {
    weigh_run(false);
  } else {
    std::uint64_t last = 0;
    for (const Recorded& pass : recorded_) last = std::max(last, pass.end);
    terms_.find(*nodes.front(), last);
    for (const auto& term : terms_.all()) losses_.push_back(detail::LossShare::of(term));
    weigh_terms(weigh_run(terms_.nonlinear() != nullptr));
  }
}

template <Device D, class Communicator>
std::unique_ptr<ddp::BucketSums> PolicyOfRanks<D, Communicator>::bucket_sums(ddp::Core<D, Communicator>&, bool) {
  return nullptr;
}

}  // namespace chorus
