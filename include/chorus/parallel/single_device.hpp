#pragma once
/// SingleDevice: the policy of one device, which the others must agree with.

#include <chorus/parallel/one_process_policy.hpp>
#include <utility>

namespace chorus::inline CHORUS_ABI {

template <class Model>
class SingleDevice : public OneProcessPolicy<Model> {
 public:
  static constexpr const char* name = "single";

  explicit SingleDevice(Model model, std::uint64_t seed = initial_seed())
      : OneProcessPolicy<Model>(std::move(model), seed) {}
  /// For `launch`: takes the seed from `run`.
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  SingleDevice(Model model, Run& run) : SingleDevice(std::move(model), run.seed()) { run.check_options(); }

  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const RandomScope scope(this->begin_forward());
    const detail::WatchScope watch(this->watch_once());
    auto output = this->model_.forward(this->on_model_device(inputs)...);
    this->end_forward();
    return output;
  }

  int devices() const { return 1; }

  /// For models that return their loss: what backward starts from. The same under every policy.
  template <AnyVariable Loss>
  const Loss& mean_loss(const Loss& loss) const {
    return loss;
  }
};

}  // namespace chorus::inline CHORUS_ABI
