#pragma once
/// Common base of the policies of one process: they need no communication.

#include <chorus/parallel/access.hpp>
#include <chorus/parallel/join_options.hpp>
#include <chorus/parallel/no_sync.hpp>
#include <chorus/parallel/policy.hpp>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

namespace chorus {

/// Base of SingleDevice and DataParallel.
template <class Model>
class OneProcessPolicy : public Policy<Model> {
 public:
  using policy_type = OneProcessPolicy;
  static constexpr bool distributed = false;

  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(),
                         {.shuffle = options.shuffle, .seed = this->seed(), .padding = options.padding});
  }

  /// For loops that accumulate gradients of several batches: a single process needs no switch.
  [[nodiscard]] NoSync no_sync() { return {}; }
  /// For loops whose number of batches may differ between ranks: there is one rank, which runs `body`.
  template <class Body>
  void join(const Body& body, const JoinOptions& = {}) {
    body();
  }

  /// `value`, the mean over this process's samples, as the mean over the samples of all processes.
  double mean(double value, Index) const { return value; }
  /// Sums over all processes, in place.
  void sum(std::span<double>) const {}
  /// Whether `text` is the same in all processes.
  bool same_on_all_ranks(std::string_view) const { return true; }

 protected:
  OneProcessPolicy(Model model, std::uint64_t seed) : Policy<Model>(std::move(model), seed) {
    trace::set_place_of_process(this->model_device().index);
  }
};

}  // namespace chorus
