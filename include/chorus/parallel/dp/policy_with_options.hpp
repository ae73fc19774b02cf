#pragma once
/// DataParallel without its five steps: the copies and their threads, the start and end of a pass, options and
/// extensions.

#include <algorithm>
#include <chorus/parallel/dp/collectives.hpp>
#include <chorus/parallel/dp/device_balance.hpp>
#include <chorus/parallel/dp/dp_options.hpp>
#include <chorus/parallel/dp/input_roles.hpp>
#include <chorus/parallel/dp/mean_loss.hpp>
#include <chorus/parallel/dp/parallel_apply.hpp>
#include <chorus/parallel/dp/pass.hpp>
#include <chorus/parallel/dp/recorded.hpp>
#include <chorus/parallel/dp/reduce.hpp>
#include <chorus/parallel/model_handles.hpp>
#include <chorus/parallel/one_process_policy.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace chorus::dp {

/// Base of DataParallel.
template <class Model>
class PolicyWithOptions : public OneProcessPolicy<Model>, protected BackwardRunner {
 public:
  using D = typename Policy<Model>::device_type;

  /// For models that return their loss, the mean over their share: combines the last forward pass's losses, one per
  /// device, to the mean over the whole batch. A device is weighted by the elements of its loss's mean (counted tokens,
  /// a sum of class weights), or by its samples if unknown: for a loss computed by hand, and under NoGrad. Throws
  /// ShapeError for another number of losses, UsageError for sums of means over different numbers.
  template <Real T>
  Variable<T, 0, D> mean_loss(const Variable<T, 1, D>& losses) const {
    return scalars_.mean(losses);
  }

  int devices() const { return static_cast<int>(options_.device_ids.size()); }
  const DataParallelOptions& options() const { return options_; }

 protected:
  PolicyWithOptions(Model model, DataParallelOptions options, std::uint64_t seed)
      : OneProcessPolicy<Model>(detail::moved_to(std::move(model), first_device<D>(options)), seed),
        options_(settled<D>(std::move(options))),
        buffers_(nn::named_buffers<D>(this->model_)),
        handles_(this->model_),
        replicas_(this->model_, this->flat_, buffers_, options_.device_ids),
        parallel_apply_(replica_names<D>(options_.device_ids), options_.device_ids, D::first_slot, *options_.timeout),
        collectives_(options_.device_ids, *options_.timeout, replicas_, parallel_apply_.threads()) {
    warn_of_imbalance<D>(options_.device_ids);
  }

  /// Splits the batch and copies layer members other than parameters and buffers to the devices that take part.
  template <template <class> class Make, class... Inputs>
  auto begin_pass(const Inputs&... inputs) {
    return begin_shares<Make>(
        Index{devices()}, [](const Split& split) { return split.devices; }, inputs...);
  }
  /// The same for a batch in `most` shares, which go to `devices_of(split)` devices.
  template <template <class> class Make, class DevicesOf, class... Inputs>
  auto begin_shares(Index most, const DevicesOf& devices_of, const Inputs&... inputs) {
    parallel_apply_.await();
    handles_.check_kept(this->model_, this->flat_);
    const Split split = roles_.split("DataParallel", most, options_.dim, inputs...);
    const std::size_t count = devices_of(split);
    const auto& random = this->begin_forward(split.batch);
    for (std::size_t i = 1; i < count; ++i) replicas_[i].take_members(this->model_);
    using Made = Shares<Make, D, Inputs...>;
    using Output = decltype(call(this->model_, std::declval<const Made&>()));
    return std::make_shared<Pass<Model, Made, Output>>(split, count, this->model_, replicas_, random,
                                                       this->watch_once());
  }
  template <class Pass>
  void end_pass(const Pass& pass) {
    this->random_.drew = pass.drew();
    this->end_forward();
    scalars_.begin_pass(pass.split, detail::holds_scalars<typename Pass::Output>);
  }
  D output_device() const { return D{options_.output_device}; }

  /// A forward pass with a GraphVariable among the inputs: see dp/recorded.hpp.
  template <class... Inputs>
  auto forward_recorded(const Inputs&... inputs) {
    const auto pass = begin_pass<MakeRecordedShare>(inputs...);
    recorded_forward(pass, replicas_, parallel_apply_, inputs...);
    end_pass(*pass);
    return gather<JoinRecordedOutputs>(pass->outputs, pass->split, output_device(), {});
  }

  void before_backward(std::size_t devices) {
    forget_gradients(replicas_, devices);
    // Recomputation must see the model as it is now on the first device, whatever passes came between.
    for (std::size_t i = 1; i < devices; ++i) {
      replicas_[i].end_recording();
      replicas_[i].take_members(this->model_);
    }
  }
  void backward_on_devices(const Roots& roots, bool keep) {
    parallel_apply_(roots.size(), [roots, keep, copies = replicas_.copies()](std::size_t i) {
      run_backward(roots[i], {.retain_graph = keep, .hooks = false});
    });
  }
  void backward_to_wanted(const Roots& roots, bool keep) override {
    parallel_apply_.await();
    before_backward(roots.size());
    reduce_wanted(replicas_, roots.size(), [&] { backward_on_devices(roots, keep); });
  }
  void for_each_parameter(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& entry : this->flat_.entries())
      if (entry.parameter().wants_grad()) visit(*entry.named.handle.shared(), context);
  }

 private:
  DataParallelOptions options_;
  InputRoles roles_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  detail::ModelHandles handles_;

 protected:
  Replicas<Model> replicas_;
  ParallelApply parallel_apply_;
  Collectives<Model> collectives_;
  detail::GatheredScalars scalars_;
};

}  // namespace chorus::dp
