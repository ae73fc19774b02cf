#pragma once
/// Common base of policies whose ranks all have the whole batch and parts of the model.

#include <chorus/comm/communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/parallel/ddp/same_program.hpp>
#include <chorus/parallel/join.hpp>
#include <chorus/parallel/no_sync.hpp>
#include <chorus/parallel/policy.hpp>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

namespace chorus {

/// Base of TensorParallel and Pipeline.
template <class Model, class Communicator>
class WholeBatchPolicy : public Policy<Model> {
 public:
  static constexpr bool distributed = true;

  /// The same samples on all ranks.
  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(
        dataset.size(),
        {.shuffle = options.shuffle, .seed = this->seed(), .padding = options.padding, .ledger = program_.ledger()});
  }
  int devices() const { return communicator_.size(); }
  /// The number of groups of ranks among which a batch is divided.
  int shares() const { return 1; }
  Communicator& communicator() const { return communicator_; }

  /// For loops that accumulate gradients of several batches: gradients are always the whole batches'.
  [[nodiscard]] NoSync no_sync() { return {}; }
  /// All ranks have the same batches, so this only runs `body`.
  template <class Body>
  void join(const Body& body, const JoinOptions& = {}) {
    body();
  }
  /// `value` is the mean over the whole batch on every rank, and a rank's sums are complete.
  double mean(double value, Index) const { return value; }
  void sum(std::span<double>) const {}
  /// Replaces a number, in memory of the parameters' device, by the maximum over all ranks.
  void make_largest(std::int32_t* number) { communicator_.all_reduce(std::span(number, 1), comm::ReduceOp::max, {}); }
  /// All ranks call it.
  void eval() {
    meet();
    Policy<Model>::eval();
  }
  void train(bool training = true) {
    if (!training) return eval();
    Policy<Model>::train();
  }
  /// The program intends ranks to step with, write or skip different things: passes stop comparing ranks. All ranks
  /// call it.
  void let_ranks_differ() { program_.let_ranks_differ(); }
  /// Whether `text` is the same on all ranks; a collective.
  [[gnu::cold]] bool same_on_all_ranks(std::string_view text) { return comm::same_text(communicator_, text); }

 protected:
  /// All ranks take rank 0's seed.
  WholeBatchPolicy(std::string_view title, Model model, Communicator& communicator, std::uint64_t seed)
      : Policy<Model>(std::move(model), seed), communicator_(communicator), program_(title, communicator) {
    communicator.broadcast(std::span(&this->random_.seed, 1), 0, {});
  }

  /// A forward pass begins: if it records gradients, ranks compare their calls since the last comparison.
  void compare_programs() {
    if (!grad_enabled()) return;
    if (this->model_.training()) ++program_.ledger()->passes;
    program_.compare_now(false);
    met_ = false;
  }
  /// All ranks meet at the same point of their programs; otherwise all throw UsageError.
  void meet() {
    if (!std::exchange(met_, true)) program_.compare_now(true);
  }

  Communicator& communicator_;
  ddp::SameProgram<typename Policy<Model>::device_type, Communicator> program_;

 private:
  bool met_ = true;
};

}  // namespace chorus
