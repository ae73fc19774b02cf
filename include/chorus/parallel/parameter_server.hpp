#pragma once
/// ParameterServer: rank 0 has the parameters; all others push gradients to it and pull parameters from it.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <chorus/parallel/gradients_aside.hpp>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI {

/// Synchronous SGD with a parameter server (Li et al., "Scaling distributed machine learning with the parameter
/// server", OSDI 2014). At the end of backward every worker sends its gradients, and has none left, so that its
/// optimizer's step changes nothing; the server, rank 0, which works on a share of the batch as well, adds them up and
/// steps, alone. At the beginning of the next forward pass in training every worker fetches the new parameters. The
/// training loop is that of the other policies, and so are the steps: gradients are means over the samples of the
/// batch. A GradScaler has to ask all ranks, for workers have no gradients to look at: `GradScaler scaler{net}`.
///
/// The server sends n - 1 times the model's bytes a step and receives as many; a worker sends and receives them once.
/// With DistributedDataParallel's ring every rank sends 2 (n - 1) / n times: as much in all, but no link is crowded.
/// Optimizer state exists on the server alone.
///
/// After the last step workers are behind: `eval()`, which all ranks call, fetches the parameters, too. A worker's
/// ParameterAverage that is updated behind each step lags by one: the server's is the one to use and to keep.
template <class Model, class Communicator = comm::AnyCommunicator>
class ParameterServer : public DistributedPolicy<Model, Communicator> {
  using Base = DistributedPolicy<Model, Communicator>;

 public:
  using D = typename Model::device_type;
  static constexpr const char* name = "parameter_server";

  /// Compares the models of all ranks. The communicator must outlive this.
  ParameterServer(Model model, Communicator& communicator, std::uint64_t seed = initial_seed())
      : Base(std::move(model), communicator, seed) {
    this->check_same("ParameterServer", "", [](const auto&) { return true; });
    pull();
    for (const auto& entry : this->flat_.entries())
      entry.parameter().on_grad([this, alive = this->alive()] {
        if (!alive.expired()) gradient_ready();
      });
  }
  /// For `launch`: takes communicator and seed from `run`.
  template <detail::LaunchedRun Run>
  ParameterServer(Model model, Run& run) : ParameterServer(std::move(model), run.communicator(), run.seed()) {
    run.check_options();
  }

  /// Peers don't wait for a rank that throws in the middle of a backward pass: the group is given up.
  ~ParameterServer() {
    if (in_backward_)
      this->communicator_.abort(
          cat("rank ", this->communicator_.rank(), ": its net has ended in the middle of a ", "backward pass"));
  }

  /// The model's output for this rank's share of the batch. Each is followed by one backward pass at most: another one
  /// throws UsageError.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!in_backward_,
                      "ParameterServer: the last backward pass ended early; its gradients are incomplete");
    const Index samples = detail::samples_of(0, inputs...);
    if (grad_enabled()) {
      pushed_ = false;
      this->shares_.begin(samples, true, this->training());
      if (stepped_) pull();
      keep_earlier_gradients();
    } else {
      this->shares_.begin_aside(samples, this->training());
    }
    return this->forward(samples, grad_enabled() || this->training(), inputs...);
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
  void eval() {
    if (stepped_) pull();
    Base::eval();
  }

 private:
  template <class F>
  static void with_numbers(const typename nn::FlatParameters<D>::Group& group, std::byte* at, const F& f) {
    check<UsageError>(group.dtype == DType::f32 || group.dtype == DType::f64,
                      "ParameterServer: parameters are F32 or F64, got ", group.dtype);
    if (group.dtype == DType::f32)
      f(std::span<float>(reinterpret_cast<float*>(at), group.count));
    else
      f(std::span<double>(reinterpret_cast<double*>(at), group.count));
  }

  // What earlier passes have left on the server, weighed and complete, is to stay as it is when `push` weighs all: it
  // is kept in the unit of the pass that begins. A pass in which this rank has no samples adds nothing.
  void keep_earlier_gradients() {
    const double weight = this->shares_.weight(), factor = unit_ / weight;
    aside_.forget();
    if (!is_server()) return;
    if (weight == 0) return aside_.take(this->flat_);
    unit_ = weight;
    for (const auto& entry : this->flat_.entries()) {
      auto& p = entry.parameter();
      if (!p.grad_arrived()) continue;
      const auto scale = [&]<class T>(T* grad) { kernels::scale(p.where(), p.count(), static_cast<T>(factor), grad); };
      if (p.dtype() == DType::f32)
        scale(static_cast<float*>(p.grad_data()));
      else
        scale(static_cast<double*>(p.grad_data()));
    }
  }

  // The first gradient of a backward pass.
  void gradient_ready() {
    if (in_backward_) return;
    check<UsageError>(!pushed_,
                      "ParameterServer: expected a forward pass between two backward passes; what the first one has "
                      "sent to the server can't be told from what the second one adds");
    in_backward_ = true;
    at_backward_end([this, alive = this->alive()] {
      if (alive.expired()) return;
      push();
      in_backward_ = false;
      pushed_ = stepped_ = true;
    });
  }

  // Gradients weighed by samples go to the server, with a mark for each parameter that has one.
  void push() {
    const double weight = is_server() ? std::exchange(unit_, 1) : this->shares_.weight();
    auto& communicator = this->communicator_;
    const auto& entries = this->flat_.entries();
    std::vector<std::uint8_t> own(entries.size()), marks(entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& p = entries[i].parameter();
      if (aside_.any()) aside_.put_back(this->flat_, i);
      own[i] = p.grad_arrived() ? 1 : 0;
      if (own[i] == 0) zero_bytes(p.where(), p.grad_data(), p.size_bytes());
    }
    aside_.forget();
    const D device = entries.front().parameter().where();
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
    if (is_server()) {
      for (int worker = 1; worker < this->devices(); ++worker) {
        communicator.recv(std::span<std::uint8_t>(marks), worker);
        for (std::size_t i = 0; i < own.size(); ++i) own[i] |= marks[i];
      }
    } else {
      communicator.send(std::span<const std::uint8_t>(own), 0);
    }
    for (std::size_t i = 0; i < entries.size(); ++i)
      entries[i].parameter().set_grad_arrived(is_server() && own[i] != 0);
  }

  detail::GradientsAside<D> aside_;  // the server's
  double unit_ = 1;                  // what the server's gradients are to be multiplied by
  bool in_backward_ = false;
  bool pushed_ = false;   // the gradients of the last forward pass have been sent
  bool stepped_ = false;  // the server's parameters may have changed since the last pull
};

}  // namespace chorus::inline CHORUS_ABI
