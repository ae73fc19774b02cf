#pragma once
/// One forward pass of DataParallel: what the devices' threads work with, even where one comes back late.

#include <algorithm>
#include <chorus/core/random.hpp>
#include <chorus/core/share_tree.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/canonical/share_buffers.hpp>
#include <chorus/parallel/canonical/share_scope.hpp>
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

/// So many devices with one share each.
inline std::vector<ShareRange> one_each(std::size_t devices) {
  std::vector<ShareRange> runs;
  for (std::size_t i = 0; i < devices; ++i) runs.push_back({i, i + 1});
  return runs;
}

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

  /// `device_shares`: which of the shares each device has. `random`: the whole batch's. `watch`: of the first device's
  /// parameters, or null.
  Pass(const Split& how, std::vector<ShareRange> device_shares, bool shares_are_canonical, Model& model,
       const Replicas<Model>& replicas, const RandomContext& random, std::shared_ptr<detail::UnlistedParameters> watch)
      : split(how),
        runs(std::move(device_shares)),
        canonical(shares_are_canonical),
        shares(how.devices),
        returns(how.devices),
        outputs(how.devices),
        first_(model),
        buffers_(replicas.buffers(0)),
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
    RandomContext random = random_;
    if (i > 0) random.device = copies_[i - 1]->device().index;
    Model& model = i == 0 ? first_ : copies_[i - 1]->model();
    if (!canonical) return forward(model, random, i);
    canonical::ShareBuffers buffers(i == 0 ? buffers_ : copies_[i - 1]->buffers());
    buffers.begin_pass(runs[i].count());
    for (std::size_t share = runs[i].begin; share < runs[i].end; ++share) {
      buffers.enter(share - runs[i].begin);
      const canonical::ShareScope scope(random, split, share, static_cast<int>(split.devices), nullptr);
      outputs[share].emplace(call(model, *shares[share]));
      drew_[share] = scope.drew();
      buffers.leave(share - runs[i].begin);
    }
    buffers.end_pass();
  }

  /// Whether random operations have drawn numbers on any device.
  bool drew() const { return std::find(drew_.begin(), drew_.end(), true) != drew_.end(); }

  const Split split;
  const std::vector<ShareRange> runs;  // by device
  const bool canonical;                // shares are canonical ones; else each device has one
  // By share.
  std::vector<std::optional<Shares>> shares;
  std::vector<GradientReturns> returns;
  std::vector<std::optional<Output>> outputs;

 private:
  void forward(Model& model, RandomContext& random, std::size_t i) {
    random.first_sample = [this, i] { return split.begin(i); };
    random.samples = split.size(i);
    random.devices = static_cast<int>(split.devices);
    random.dim = split.dim;
    random.is_share = [this](std::int64_t samples) {
      return samples == split.size(0) || samples == split.size(split.devices - 1);
    };
    const RandomScope random_scope(random);
    outputs[i].emplace(call(model, *shares[i]));
    drew_[i] = random.drew;
  }

  Model& first_;
  const std::vector<nn::NamedBuffer<typename Replicas<Model>::D>>& buffers_;
  typename Replicas<Model>::Copies copies_;
  RandomContext random_;
  std::shared_ptr<detail::UnlistedParameters> watch_;
  bool grad_ = grad_enabled();
  std::vector<char> drew_;
  std::latch prepared_;
};

}  // namespace chorus::dp
