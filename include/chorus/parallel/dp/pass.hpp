#pragma once
/// One forward pass of DataParallel: what the devices' threads work with, even where one comes back late.

#include <algorithm>
#include <chorus/core/random.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/dp/replica.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <chorus/parallel/unlisted_parameters.hpp>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::dp {

/// Calls a model with the inputs in a tuple.
template <class Model, class Shares>
auto call(Model& model, const Shares& shares) {
  return std::apply([&](const auto&... own) { return model.forward(own...); }, shares);
}

/// `Shares`: the tuple of a device's inputs.
template <class Model, class Shares>
class Pass {
 public:
  using Output = decltype(call(std::declval<Model&>(), std::declval<const Shares&>()));

  /// `random`: the whole batch's. `watch`: of the first device's parameters, or null.
  Pass(const Split& how, Model& model, const Replicas<Model>& replicas, const RandomContext& random,
       std::shared_ptr<detail::UnlistedParameters> watch)
      : split(how),
        shares(how.devices),
        returns(how.devices),
        outputs(how.devices),
        first_(model),
        copies_(replicas.copies()),
        random_(random),
        watch_(std::move(watch)),
        drew_(how.devices),
        prepared_(static_cast<std::ptrdiff_t>(how.devices)) {}

  /// In the thread of device `i`: calls `task`, which comes to an end, and waits until it has on all devices. What the
  /// first device's model writes into its buffers, the others have copied before.
  template <class Task>
  void prepare(const Task& task) {
    struct Wait {
      std::latch& all;
      ~Wait() { all.arrive_and_wait(); }
    } wait{prepared_};
    const GradMode mode(grad_);
    task();
  }

  /// In the thread of device `i`: its copy of the model makes its output of its share.
  void forward(std::size_t i) {
    const GradMode mode(grad_);
    RandomContext context = random_;
    context.first_sample = [this, i] { return split.begin(i); };
    context.samples = split.size(i);
    context.devices = static_cast<int>(split.devices);
    context.dim = split.dim;
    context.is_share = [this](std::int64_t samples) {
      return samples == split.size(0) || samples == split.size(split.devices - 1);
    };
    if (i > 0) context.device = copies_[i - 1]->device().index;
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    const RandomScope random_scope(context);
    const detail::WatchScope watch_scope(i == 0 ? watch_ : nullptr);
    outputs[i].emplace(call(i == 0 ? first_ : copies_[i - 1]->model(), *shares[i]));
    drew_[i] = context.drew;
  }

  /// Whether random operations have drawn numbers on any device.
  bool drew() const { return std::find(drew_.begin(), drew_.end(), true) != drew_.end(); }

  const Split split;
  // By device.
  std::vector<std::optional<Shares>> shares;
  std::vector<GradientReturns> returns;
  std::vector<std::optional<Output>> outputs;

 private:
  Model& first_;
  typename Replicas<Model>::Copies copies_;
  RandomContext random_;
  std::shared_ptr<detail::UnlistedParameters> watch_;
  bool grad_ = grad_enabled();
  std::vector<char> drew_;
  std::latch prepared_;
};

}  // namespace chorus::dp
