#pragma once
/// SequenceParallel: every rank has the whole model, and a part of every sample's tokens. mesh::Sequence: the same as
/// an axis of Mesh.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/parallel/ddp/access.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/sequence/axis.hpp>
#include <chorus/parallel/sequence/stretched.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace chorus {

/// Options of SequenceParallel: those of DistributedDataParallel. `dim` must be 0.
using SequenceParallelOptions = DistributedDataParallelOptions;

/// Each rank has some places of every sample: of 2 * ranks stretches the r-th and the r-th last. Keys and values of
/// attention travel round the ring of ranks; gradients are averaged as by DistributedDataParallel, which this is but
/// for the places. All ranks pass the same whole samples, [batch, length, ...], and get their places' outputs; if the
/// model returns its loss, that of all places. Positions (GPT, BERT, nn::LearnedPositions, SinusoidalPositions,
/// rotary_positions), masks, dropout and losses are one device's. Labels must be shifted before the net is called.
///
/// Refused: operators that mix places in another way (convolution, recurrence, batch statistics, pooling, attention by
/// hand), attention to another sequence, `join`, GPUs.
template <class Model>
class SequenceParallel : public sequence::Stretched<DistributedDataParallel<Model>> {
  using Base = sequence::Stretched<DistributedDataParallel<Model>>;
  using Communicator = comm::AnyCommunicator;

 public:
  using policy_type = SequenceParallel;
  static constexpr const char* name = "sequence_parallel";
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = SequenceParallel<Other>;

  /// See DistributedDataParallel. The communicator must outlive this.
  SequenceParallel(Model model, Communicator& communicator, const SequenceParallelOptions& options = {},
                   std::uint64_t seed = initial_seed())
      : Base(sequence::Ring<Communicator>(communicator), 1, std::move(model), communicator, checked(options), seed) {}
  /// For `launch`: takes communicator and seed from `run`.
  template <detail::LaunchedRun Run>
  SequenceParallel(Model model, Run& run, const SequenceParallelOptions& options = {})
      : SequenceParallel(std::move(model), run.communicator(), options, run.seed()) {
    run.check_options();
  }

 private:
  static const SequenceParallelOptions& checked(const SequenceParallelOptions& options) {
    check<UsageError>(options.dim == 0, "SequenceParallel: expected samples along axis 0, got dim ", options.dim);
    return options;
  }
};

/// For checkpoints: the order of parameters, which affects rounding.
template <class Model>
class detail::Access<SequenceParallel<Model>> : public detail::Access<DistributedDataParallel<Model>> {
 public:
  explicit Access(SequenceParallel<Model>& net) : Access<DistributedDataParallel<Model>>(net) {}
};

}  // namespace chorus
