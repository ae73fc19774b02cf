#pragma once
/// One forward pass of DataParallel: the data of the devices' threads, kept alive for a thread that ends late.

#include <algorithm>
#include <chorus/core/random.hpp>
#include <chorus/core/trace_listener.hpp>
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

/// Calls a model with the inputs in a tuple. (Without std::apply, compile errors in `forward` are short.)
template <class Model, class... Own>
auto call(Model& model, const std::tuple<Own...>& shares) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return model.forward(std::get<I>(shares)...);
  }(std::index_sequence_for<Own...>{});
}

/// `Shares`: the tuple of a device's inputs. `Returned`: the model's output.
template <class Model, class Shares, class Returned>
class Pass {
 public:
  using Output = Returned;

  /// `devices`: how many take part. `random`: the whole batch's. `watch`: for the first device's parameters, or null.
  Pass(const Split& how, std::size_t devices, Model& model, const Replicas<Model>& replicas,
       const RandomContext& random, std::shared_ptr<detail::UnlistedParameters> watch)
      : split(how),
        shares(how.devices),
        returns(how.devices),
        outputs(how.devices),
        first_(model),
        copies_(replicas.copies()),
        random_(random),
        watch_(std::move(watch)),
        drew_(devices),
        prepared_(static_cast<std::ptrdiff_t>(devices)) {}

  std::size_t devices() const { return drew_.size(); }

  /// In the thread of device `i`: calls `task`, which must end, and waits until all devices have done so. Thus the
  /// buffers are copied before the first device's model writes to them.
  template <class Task>
  void prepare(const Task& task) {
    struct Wait {
      std::latch& all;
      ~Wait() { all.arrive_and_wait(); }
    } wait{prepared_};
    const GradMode mode(grad_);
    task();
  }

  /// In the thread of device `i`: its copy of the model computes the output for its share.
  void forward(std::size_t i) {
    forward(i, [&](Model& model, const RandomContext& whole) {
      RandomContext random = random_of_share(whole, split, i, static_cast<int>(split.devices));
      const RandomScope random_scope(random);
      outputs[i].emplace(call(model, *shares[i]));
      return random.drew;
    });
  }
  /// The same with `compute(model, random)`, which fills `outputs` and returns whether it drew random numbers.
  template <class Compute>
  void forward(std::size_t i, const Compute& compute) {
    const GradMode mode(grad_);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    const detail::WatchScope watch_scope(i == 0 ? watch_ : nullptr);
    RandomContext whole = random_;
    if (i > 0) whole.device_slot = trace_slot(copies_[i - 1]->device());
    drew_[i] = compute(i == 0 ? first_ : copies_[i - 1]->model(), whole);
  }

  /// Whether random operations drew numbers on any device.
  bool drew() const { return std::find(drew_.begin(), drew_.end(), true) != drew_.end(); }

  const Split split;
  // By share; each device has one.
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
