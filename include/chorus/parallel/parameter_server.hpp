#pragma once
/// ParameterServer: rank 0 owns the parameters; the others push gradients to it and pull parameters from it.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/parallel/ddp/earlier_gradients.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/join.hpp>
#include <chorus/parallel/no_sync.hpp>
#include <chorus/parallel/placed.hpp>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// Options of ParameterServer.
struct ParameterServerOptions {
  /// The axis of the inputs that holds their samples.
  int dim = 0;
};

/// Synchronous SGD with a parameter server (Li et al., "Scaling distributed machine learning with the parameter
/// server", OSDI 2014). At the end of backward every worker sends its gradients and drops them, so that its optimizer's
/// step changes nothing. The server, rank 0, also works on a share of the batch; it adds up the gradients and steps. At
/// the start of the next forward pass in training, of the model or one of its layers, every worker fetches the new
/// parameters. All ranks make that pass, with or without gradients; within `join`, passes without gradients don't
/// fetch. Training loop and steps equal those of other policies: gradients are means over the samples of the batch.
/// Construct `GradScaler scaler{net}`, which asks all ranks, as workers have no gradients to check.
///
/// Per step the server sends and receives n - 1 times the model's bytes, a worker once. In DistributedDataParallel's
/// ring every rank sends 2 (n - 1) / n times: the same total, but no link is a bottleneck. Only the server has
/// optimizer state.
///
/// After the last step workers have old parameters: `eval()` and `gathered()`, which all ranks call, fetch them, too. A
/// forward pass without gradients with old parameters throws UsageError if the whole model is in evaluation. A worker's
/// ParameterAverage that is updated after each step lags by one step: use and save the server's.
template <class Model, class Communicator>
class ParameterServer : public DistributedPolicy<Model, Communicator> {
  using Base = DistributedPolicy<Model, Communicator>;

 public:
  using D = typename Base::device_type;
  using policy_type = ParameterServer;
  static constexpr const char* name = "parameter_server";
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = ParameterServer<Other, Communicator>;

  /// Compares the models of all ranks. Throws UsageError, on every rank, if they or the options differ. The
  /// communicator must outlive this.
  ParameterServer(Model model, Communicator& communicator, const ParameterServerOptions& options = {},
                  std::uint64_t seed = initial_seed())
      : Base("ParameterServer", std::move(model), communicator, options.dim, seed) {
    this->check_same(cat("options: dim ", options.dim, "\n"), typename Base::All{});
    this->program_.alike().steps = false;
    pull();
    this->on_gradients([this](std::size_t i) { gradient_arrived(i); });
  }
  /// With a seed and no options.
  template <std::integral Seed>
  ParameterServer(Model model, Communicator& communicator, Seed seed)
      : ParameterServer(std::move(model), communicator, {}, static_cast<std::uint64_t>(seed)) {}
  /// For `launch`: takes communicator and seed from `run`. The model moves to the device that `run` names, if any.
  template <detail::LaunchedRun Run>
  ParameterServer(Model model, Run& run, const ParameterServerOptions& options = {})
      : ParameterServer(detail::placed(std::move(model), run), run.communicator(), options, run.seed()) {
    run.check_options();
  }

  /// If a rank throws during backward, it aborts the group, so that peers fail at once instead of waiting.
  ~ParameterServer() {
    if (in_backward_) this->give_up();
  }

  /// Returns the model's output for this rank's share of the batch. At most one backward pass may follow each, except
  /// under no_sync: another one throws UsageError.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!in_backward_,
                      "ParameterServer: the last backward pass ended early; its gradients are incomplete");
    ddp::ForwardPass pass{.samples = detail::samples_of(this->random_.dim, inputs...), .sync = sync_};
    pass.number = this->begin_forward(pass.samples).step;
    const auto model = [&] { return this->call_model(inputs...); };
    if (grad_enabled()) {
      pushed_ = false;
      this->begin_pass(pass, this->joining_);  // ranks without batches must hear of it
      if (stepped_) pull();
      return this->run_recorded(model);
    }
    if (stepped_ && !this->joining_) {
      check<UsageError>(this->any_training(),
                        "ParameterServer: the server has stepped since workers fetched its parameters; call eval() on "
                        "all ranks before a forward pass in evaluation");
      pull();
    }
    return this->run_without_grad(pass, model);
  }

  /// While it lives, backward accumulates locally; the first backward after it pushes the sum. Each pass is weighted by
  /// its own global batch.
  [[nodiscard]] NoSync no_sync() { return this->scope_without(sync_); }

  /// Runs `body`, a loop over batches whose number may differ between ranks: see chorus::join. The server calls
  /// `options.step` if it runs out of batches before other ranks; without it, that throws UsageError. Buffers are the
  /// server's.
  template <class Body>
  void join(const Body& body, const JoinOptions& options = {}) {
    chorus::join(body, options, *this);
  }
  /// See PolicyOn::gathered. Workers fetch the server's parameters first, unless they are inside `join`.
  [[nodiscard]] typename Base::Gathered gathered(const GatheredOptions& options = {}) {
    this->meet();
    if (stepped_ && !this->joining_) pull();
    return PolicyOn<D>::gathered(options);
  }
  template <class F>
  requires std::invocable<const F&, typename Base::model_type&>
  void gathered(const F& f) {
    const auto whole = gathered();
    f(this->module());
  }
  bool is_server() const { return this->communicator_.rank() == 0; }

  /// Workers take the server's parameters and buffers now; all ranks call it.
  void pull() {
    const comm::CollectiveOptions options{.traffic = trace::Traffic::parameters};
    for (const auto& group : this->flat_.groups())
      with_numbers(group, group.value(0), [&](auto values) {
        if (is_server())
          for (int worker = 1; worker < this->devices(); ++worker) this->communicator_.send(values, worker, options);
        else
          this->communicator_.recv(values, 0, options);
      });
    if (!is_server())
      for (const auto& entry : this->flat_.entries()) entry.parameter().touch();
    this->broadcast_buffers(0);
    stepped_ = false;
  }

 private:
  void synchronize() override {
    if (stepped_) return pull();
    Base::synchronize();
  }
  void begin_join(const detail::JoinFacts& facts) override {
    check<UsageError>(facts.steps || facts.throw_early,
                      "ParameterServer::join: the server must step for all ranks, also after its own batches: set "
                      "JoinOptions::step, or pass a function after the net");
    Base::begin_join(facts);
  }
  [[gnu::cold]] JoinedPass take_part_in_pass() override {
    if (!this->begin_shadow_pass()) return JoinedPass::none;
    if (stepped_) pull();
    this->shares_.weigh({});
    if (!this->shares_.active_pass().sync) return JoinedPass::passed;
    push(/*ended=*/true);
    return JoinedPass::averaged;
  }
  [[gnu::cold]] void all_have_run_out() override {
    this->end_shadow_passes();
    if (stepped_) pull();
  }

  // Calls `f` with all numbers of a group that begin at `at`.
  template <class F>
  static void with_numbers(const typename nn::FlatParameters<D>::Group& group, std::byte* at, const F& f) {
    ddp::with_type("ParameterServer: parameters", group.dtype, at,
                   [&]<class T>(T* numbers) { f(std::span<T>(numbers, group.count)); });
  }

  // Rescales earlier gradients (on the server or under no_sync) so that `push`'s weight leaves them unchanged.
  void backward_is_weighed() override {
    earlier_.change_unit(this->flat_, this->shares_.weight(), [](std::size_t) { return true; });
  }

  void gradient_arrived(std::size_t i) {
    if (!in_backward_) begin_backward();
    auto& p = this->flat_.entries()[i].parameter();
    earlier_.gradient_arrived(p);
    if (!sync_ && this->devices() > 1) p.set_grad_local(true);
  }
  void begin_backward() {
    check<UsageError>(this->weighed(),
                      "ParameterServer: backward found the model, but no forward pass of the net in this thread: call "
                      "the net, not its module(), so that workers fetch the parameters");
    check<UsageError>(!pushed_,
                      "ParameterServer: expected a forward pass between two backward passes; the server can't separate "
                      "the gradients of both");
    in_backward_ = true;
    this->when_backward_ends([this] {
      if (sync_)
        push();
      else
        accumulated_ = true;
      in_backward_ = false;
    });
  }

  // A rank's flags of a parameter: whether it has a gradient, and whether its loop has called zero_grad since the last
  // push, as the loop would have on a server that has run out of batches.
  static constexpr std::uint8_t has_gradient = 1, forgotten = 2;

  std::vector<std::uint8_t> own_marks(bool ended) const {
    std::vector<std::uint8_t> marks;
    for (const auto& entry : this->flat_.entries()) {
      const auto& p = entry.parameter();
      const auto i = marks.size();
      const bool was_forgotten = forgotten_before_.empty() || p.times_forgotten() != forgotten_before_[i];
      marks.push_back((p.grad_arrived() ? has_gradient : 0) | (!ended && was_forgotten ? forgotten : 0));
    }
    return marks;
  }
  // On the server: the union of all workers' flags.
  std::vector<std::uint8_t> workers_marks(const std::vector<std::uint8_t>& own) {
    std::vector<std::uint8_t> all(own.size()), marks(own.size());
    if (!is_server()) this->communicator_.send(std::span<const std::uint8_t>(own), 0);
    for (int worker = 1; is_server() && worker < this->devices(); ++worker) {
      this->communicator_.recv(std::span<std::uint8_t>(marks), worker);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] |= marks[i];
    }
    return all;
  }

  // Sends gradients, weighted by samples, to the server. `ended`: this rank has run out of batches.
  void push(bool ended = false) {
    const double weight = std::exchange(earlier_.unit, 1);
    const bool accumulated = std::exchange(accumulated_, false);
    const auto& entries = this->flat_.entries();
    auto own = own_marks(ended);
    const auto workers = workers_marks(own);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& p = entries[i].parameter();
      // A step has already used the rest of an earlier push.
      if (ended && !accumulated && (workers[i] & forgotten) != 0) own[i] = 0;
      if ((own[i] & has_gradient) == 0) zero_bytes(p.where(), p.grad_place(), p.size_bytes());
    }
    if constexpr (Base::adds_up_in_pass)
      this->push_sums(/*server=*/0);
    else
      push_weighed(weight);
    forgotten_before_.clear();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& p = entries[i].parameter();
      p.set_grad_arrived(is_server() && ((own[i] | workers[i]) & has_gradient) != 0);
      p.set_grad_local(false);
      p.set_grad_sent(!is_server());
      forgotten_before_.push_back(p.times_forgotten());
    }
    pushed_ = stepped_ = true;
  }
  void push_weighed(double weight) {
    auto& communicator = this->communicator_;
    const D device = this->flat_.entries().front().parameter().where();
    const comm::CollectiveOptions options{.traffic = trace::Traffic::gradients};
    for (const auto& group : this->flat_.groups())
      with_numbers(group, group.grad(0), [&]<class T>(std::span<T> grads) {
        const auto count = static_cast<Index>(grads.size());
        kernels::scale(device, count, static_cast<T>(weight), grads.data());
        if (!is_server()) return communicator.send(grads, 0, options);
        const MemoryScope scope(trace::Memory::buckets);
        const auto theirs = Tensor<T, 1, D>::empty({count}, device);
        for (int worker = 1; worker < this->devices(); ++worker) {
          communicator.recv(std::span<T>(theirs.data(), grads.size()), worker, options);
          kernels::axpy(device, count, T{1}, theirs.data(), grads.data());
        }
      });
  }
  ddp::EarlierGradients<D> earlier_;
  bool sync_ = true;
  bool accumulated_ = false;  // there are gradients that no push has sent
  bool in_backward_ = false;
  bool pushed_ = false;                          // the last pass's gradients have been sent
  bool stepped_ = false;                         // the server's parameters may have changed since the last pull
  std::vector<std::uint32_t> forgotten_before_;  // times_forgotten of all parameters at the last push
};

}  // namespace chorus
