#pragma once
/// One forward pass of DataParallel: what the devices' threads work with, even where one comes back late.

#include <algorithm>
#include <chorus/core/random.hpp>
#include <chorus/core/share_tree.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/canonical/device_shares.hpp>
#include <chorus/parallel/dp/replica.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <chorus/parallel/unlisted_parameters.hpp>
#include <cstddef>
#include <latch>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::dp {

/// So many devices with one share each.
inline std::vector<ShareRange> one_each(std::size_t devices) {
  std::vector<ShareRange> runs;
  for (std::size_t i = 0; i < devices; ++i) runs.push_back({i, i + 1});
  return runs;
}

/// Calls a model with the inputs in a tuple. (What the compiler says of a mistake in `forward` is short without
/// std::apply.)
template <class Model, class... Own>
auto call(Model& model, const std::tuple<Own...>& shares) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return model.forward(std::get<I>(shares)...);
  }(std::index_sequence_for<Own...>{});
}

/// `Shares`: the tuple of a device's inputs. `Returned`: what the model makes of them.
template <class Model, class Shares, class Returned>
class Pass {
 public:
  using Output = Returned;
  using Devices = std::vector<std::shared_ptr<canonical::DeviceShares<typename Replicas<Model>::D>>>;

  /// `device_shares`: which of the shares each device has; where they are canonical ones, they are computed by
  /// `canonical_devices`, else there are none of these, and each device has one share. `random`: the whole batch's.
  /// `watch`: of the first device's parameters, or null.
  Pass(const Split& how, std::vector<ShareRange> device_shares, Devices canonical_devices, Model& model,
       const Replicas<Model>& replicas, const RandomContext& random, std::shared_ptr<detail::UnlistedParameters> watch)
      : split(how),
        runs(std::move(device_shares)),
        shares(how.devices),
        returns(how.devices),
        outputs(how.devices),
        first_(model),
        devices_(std::move(canonical_devices)),
        copies_(replicas.copies()),
        random_(random),
        watch_(std::move(watch)),
        drew_(how.devices),
        prepared_(static_cast<std::ptrdiff_t>(runs.size())) {}

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

  /// In the thread of device `i`: its copy of the model makes its output of each of its shares.
  void forward(std::size_t i) {
    const GradMode mode(grad_);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    const detail::WatchScope watch_scope(i == 0 ? watch_ : nullptr);
    RandomContext whole = random_;
    if (i > 0) whole.device_slot = trace_slot(copies_[i - 1]->device());
    Model& model = i == 0 ? first_ : copies_[i - 1]->model();
    if (devices_.empty()) return forward(model, whole, i);
    drew_[i] = devices_[i]->forward(whole, split, runs[i].begin, runs[i].count(), [&](std::size_t share) {
      outputs[runs[i].begin + share].emplace(call(model, *shares[runs[i].begin + share]));
    });
  }

  /// Whether random operations have drawn numbers on any device.
  bool drew() const { return std::find(drew_.begin(), drew_.end(), true) != drew_.end(); }

  const Split split;
  const std::vector<ShareRange> runs;  // by device
  // By share.
  std::vector<std::optional<Shares>> shares;
  std::vector<GradientReturns> returns;
  std::vector<std::optional<Output>> outputs;

 private:
  void forward(Model& model, const RandomContext& whole, std::size_t i) {
    RandomContext random = random_of_share(whole, split, i, static_cast<int>(split.devices));
    const RandomScope random_scope(random);
    outputs[i].emplace(call(model, *shares[i]));
    drew_[i] = random.drew;
  }

  Model& first_;
  Devices devices_;
  typename Replicas<Model>::Copies copies_;
  RandomContext random_;
  std::shared_ptr<detail::UnlistedParameters> watch_;
  bool grad_ = grad_enabled();
  std::vector<char> drew_;
  std::latch prepared_;
};

}  // namespace chorus::dp
