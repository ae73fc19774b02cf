#pragma once
/// SingleDevice: the policy of one device. The other policies must give the same results.

#include <chorus/parallel/dp/samples.hpp>
#include <chorus/parallel/model_handles.hpp>
#include <chorus/parallel/one_process_policy.hpp>
#include <chorus/parallel/placed.hpp>
#include <utility>

namespace chorus {

/// Named as in other policies, so that changing the policy changes nothing else in a program.
struct SingleDeviceOptions {
  /// The axis of the inputs that holds the samples. Each sample has its own random numbers.
  int dim = 0;
};

/// The policy of one process and one device: the whole batch, the whole model, no communication.
template <class Model>
class SingleDevice : public OneProcessPolicy<Model> {
 public:
  static constexpr const char* name = "single";
  static constexpr bool one_device = true;
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = SingleDevice<Other>;

  explicit SingleDevice(Model model, std::uint64_t seed = initial_seed(), const SingleDeviceOptions& options = {})
      : OneProcessPolicy<Model>(std::move(model), seed), handles_(this->model_) {
    check<UsageError>(options.dim >= 0, "SingleDevice: expected dim of at least 0, got ", options.dim);
    this->random_.dim = options.dim;
  }
  /// For `launch`: takes the seed from `run`. The model moves to the device that `run` names, if any.
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  SingleDevice(Model model, Run& run, const SingleDeviceOptions& options = {})
      : SingleDevice(detail::placed(std::move(model), run), run.seed(), options) {
    run.check_options();
  }

  /// Returns the model's output. Throws UsageError if a layer has got other parameters or buffers since the policy took
  /// the model: optimizers hold the old ones.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    handles_.check_kept(this->model_);
    const int dim = this->random_.dim;
    const RandomScope scope(this->begin_forward(dim == 0 ? 0 : detail::samples_of(dim, inputs...)));
    const detail::WatchScope watch(this->watch_once());
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    auto output = this->model_.forward(this->on_model_device(inputs)...);
    this->end_forward();
    return output;
  }

  int devices() const { return 1; }

 private:
  detail::ModelHandles handles_;
};

}  // namespace chorus
