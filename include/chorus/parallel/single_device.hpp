#pragma once
/// SingleDevice: the policy of one device, which the others must agree with.

#include <chorus/parallel/policy.hpp>
#include <span>
#include <string_view>
#include <utility>

namespace chorus::inline CHORUS_ABI {

template <class Model>
class SingleDevice : public Policy<Model> {
 public:
  static constexpr bool distributed = false;
  static constexpr const char* name = "single";

  explicit SingleDevice(Model model, std::uint64_t seed = initial_seed()) : Policy<Model>(std::move(model), seed) {}
  /// For `launch`: takes the seed from `run`.
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  SingleDevice(Model model, Run& run) : SingleDevice(std::move(model), run.seed()) { run.check_options(); }

  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const RandomScope scope(this->begin_forward());
    auto output = this->model_.forward(this->on_model_device(inputs)...);
    this->end_forward();
    return output;
  }

  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(),
                         {.shuffle = options.shuffle, .seed = this->seed(), .padding = options.padding});
  }
  int devices() const { return 1; }

  /// For models that return their loss: what backward starts from. The same under every policy.
  template <AnyVariable Loss>
  const Loss& mean_loss(const Loss& loss) const {
    return loss;
  }

  /// `value`, the mean over this process's `samples`, as the mean over the samples of all processes.
  double mean(double value, Index) const { return value; }
  /// Sums over all processes, in place.
  void sum(std::span<double>) const {}
  /// Whether `text` is the same in all processes.
  bool same_on_all_ranks(std::string_view) const { return true; }
};

}  // namespace chorus::inline CHORUS_ABI
