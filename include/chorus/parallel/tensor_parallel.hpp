#pragma once
/// TensorParallel: every rank has the whole batch and a part of each layer that can be divided.

#include <chorus/autograd/tape.hpp>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/tensor_group.hpp>
#include <chorus/io/write_in_parts.hpp>
#include <chorus/nn/deferred.hpp>
#include <chorus/ops/placement/placed.hpp>
#include <chorus/parallel/ddp/rank_device.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/model_handles.hpp>
#include <chorus/parallel/model_ranks.hpp>
#include <chorus/parallel/tensor/replicas.hpp>
#include <chorus/parallel/tensor/sequence_split.hpp>
#include <chorus/parallel/tensor/shared_layers.hpp>
#include <chorus/parallel/whole_batch_policy.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace chorus {

/// Options of TensorParallel.
struct TensorParallelOptions {
  /// The axis of the inputs that holds the samples. Each sample has its own random numbers.
  int dim = 0;
  /// In every `check_every`-th backward pass, beginning with the first, ranks compare the bits of the gradients of
  /// parameters that each of them has whole, in a message of 16 bytes. 0: never.
  int check_every = 100;
};

/// Divided layers (ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding, MultiheadAttention, and with
/// these transformer layers) hold 1 / ranks of their parameters, gradients and optimizer state on each rank. All ranks
/// compute the rest, with equal bits. Results, dropout masks included, are one device's up to the rounding of sums.
/// Every rank makes the same calls with the same batch.
///
/// A divided parameter becomes this rank's part of it in place: handles, and optimizers that have not stepped yet, now
/// refer to the part. Older tensors of its numbers keep the whole ones.
///
/// `Sequence`: with SequenceSplit, activations between the divided layers of a transformer (normalisation, dropout,
/// residual connections) are divided along the sequence. All-reduces become reduce-scatters and all-gathers with the
/// same total bytes; see split_sequence.
template <class Model, class Sequence, class Communicator>
class TensorParallel : public WholeBatchPolicy<Model, Communicator> {
  using Base = WholeBatchPolicy<Model, Communicator>;

 public:
  using D = typename Base::device_type;
  using policy_type = TensorParallel;
  static constexpr const char* name = "tensor_parallel";
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = TensorParallel<Other, Sequence, Communicator>;

  /// Compares the models of all ranks, takes rank 0's parameters, and keeps this rank's part. Throws UsageError, on
  /// every rank, if names, shapes, dtypes or options differ, if no layer can be divided, and if one has fewer entries
  /// than ranks. The communicator must outlive this.
  TensorParallel(Model model, Communicator& communicator, const TensorParallelOptions& options = {},
                 std::uint64_t seed = initial_seed())
      : TensorParallel(std::make_unique<Layers>(communicator, Sequence::splits_sequences), std::move(model),
                       communicator, options, seed) {}
  /// For `launch`: takes communicator and seed from `run`. A model for GPUs moves to this rank's GPU and uses NCCL.
  template <detail::LaunchedRun Run>
  TensorParallel(Model model, Run& run, const TensorParallelOptions& options = {})
      : TensorParallel(std::make_unique<detail::RankDevice<D>>(run), std::move(model), options, run.seed()) {
    run.check_options();
  }
  /// The same for a model that is constructed here: each rank draws only its own part; no rank ever holds the whole.
  template <class... Arguments, class... More>
  explicit TensorParallel(const Deferred<Model, Arguments...>& model, More&&... more)
      : TensorParallel(detail::Making<Model>(model).take(), std::forward<More>(more)...) {}
  /// Aborts the group after an exception, so that peers fail at once instead of waiting.
  ~TensorParallel() {
    if (std::uncaught_exceptions() > exceptions_before_ && this->communicator_.size() > 1)
      this->communicator_.abort(comm::why_it_unwinds());
  }

  /// Returns the model's output for the whole batch. Throws UsageError if a layer has got other parameters or buffers
  /// since the policy took the model.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    handles_.check_kept(this->model_, this->flat_);
    this->compare_programs();
    const int dim = this->random_.dim;
    const RandomScope random(this->begin_forward(dim == 0 ? 0 : detail::samples_of(dim, inputs...)));
    const TensorGroupScope group(layers_->group());
    const detail::WatchScope watch(this->communicator_.rank() == 0 ? this->watch_once() : nullptr);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    auto output = this->model_(this->on_model_device(inputs)...);
    CHORUS_WHOLE_OUTPUT("TensorParallel", decltype(output));
    this->end_forward();
    return output;
  }

  /// See Policy::gathered. The model is a copy and needs memory for it.
  template <class F>
  void gathered(const F& f) {
    this->meet();
    layers_->with_whole(this->model_, f);
  }
  /// For files that all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool, bool shared) const { return shared || this->communicator_.rank() == 0; }

 private:
  using Layers = detail::SharedLayers<Communicator>;

  TensorParallel(std::unique_ptr<detail::RankDevice<D>> device, Model model, const TensorParallelOptions& options,
                 std::uint64_t seed)
      : TensorParallel(device->place(std::move(model)), device->communicator(), options, seed) {
    device_ = std::move(device);
  }
  TensorParallel(std::unique_ptr<Layers> layers, Model model, Communicator& communicator,
                 const TensorParallelOptions& options, std::uint64_t seed)
      : Base("TensorParallel", detail::with_numbers(layers->share_out(std::move(model), described(options))),
             communicator, seed),
        layers_(std::move(layers)),
        handles_(this->model_),
        replicas_(this->flat_, communicator, this->alive(), options.check_every) {
    this->random_.dim = options.dim;
    detail::decide_together(this->parameters(), communicator, this->alive(), [&](const auto& named) {
      return named.parameter->part() != nullptr || communicator.rank() == 0;
    });
    this->program_.listen(this->flat_.parameters(), nn::named_buffers<D>(this->model_), {});
  }
  static std::string described(const TensorParallelOptions& options) {
    check<UsageError>(options.dim >= 0 && options.check_every >= 0,
                      "TensorParallel: expected dim and check_every of at least 0, got ", options.dim, " and ",
                      options.check_every);
    return cat("dim ", options.dim, "\ncheck_every ", options.check_every, "\n");
  }

  std::unique_ptr<detail::RankDevice<D>> device_;  // set if constructed from a run
  std::unique_ptr<Layers> layers_;
  detail::ModelHandles handles_;
  detail::ReplicaCheck<D, Communicator> replicas_;
  const int exceptions_before_ = std::uncaught_exceptions();
};

}  // namespace chorus
