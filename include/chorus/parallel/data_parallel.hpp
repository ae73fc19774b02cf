#pragma once
/// DataParallel: one process, several devices. The batch is scattered, copies of the model run on all devices at once,
/// the outputs are gathered, and in backward the gradients are reduced to the first device, where the optimizer steps.

#include <chorus/parallel/dp/gather.hpp>
#include <chorus/parallel/dp/parallel_apply.hpp>
#include <chorus/parallel/dp/policy_with_options.hpp>
#include <chorus/parallel/dp/reduce.hpp>
#include <chorus/parallel/dp/replicate.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace chorus {

/// Each device keeps its copy of the model from step to step; a forward pass sends it the parameters and layer members
/// that changed. Writes of a copy to its buffers are lost, except on the first device. `zero_grad` inside the model
/// works as on one device, because gradients accumulate in the first device's parameters only. Must outlive the losses
/// made through it.
///
/// Gradients are added in the order of the devices, so that a repeated run has the same bits. Between different GPUs
/// NCCL sends and adds, in its own order (dp::Collectives); the pass or the next one throws its failures as CommError
/// or TimeoutError. If a copy of the model does not finish forward or backward within `timeout` after the first device,
/// the pass throws TimeoutError (dp::ParallelApply).
///
/// This file holds the algorithm, in five steps, each a file of dp/. Options and extensions are in
/// dp/policy_with_options.hpp.
template <class Model>
class DataParallel : public dp::PolicyWithOptions<Model> {
  using Base = dp::PolicyWithOptions<Model>;

 public:
  using typename Base::D;
  static constexpr const char* name = "dp";
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = DataParallel<Other>;

  /// Moves the model's parameters and buffers to the first device. Existing handles, optimizers and hooks stay valid.
  /// Throws UsageError without devices and for invalid options; DeviceError for a device that doesn't exist.
  DataParallel(Model model, DataParallelOptions options, std::uint64_t seed = initial_seed())
      : Base(std::move(model), std::move(options), seed) {}
  /// For `launch`: uses as many devices as `run` says, unless the options name them.
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  DataParallel(Model model, Run& run, DataParallelOptions options = {})
      : DataParallel(std::move(model), dp::options_of<D>(run, std::move(options)), run.seed()) {
    run.check_options();
  }

  /// Returns the model's output for the whole batch, on the output device. Scalars become a vector with one element per
  /// device; a warning says so once unless `mean_loss` is called before the next pass. A tuple of outputs may hold
  /// scalars. A struct with `fields()` keeps its type and may not: its field of shape [1] becomes one with an element
  /// per device.
  /// Tensors and Variables are cut along `dim`, or the axis of their BatchAxis, into shares that differ by at most one
  /// sample, on no more devices than samples. The inputs that name their axis give the number of samples, else the
  /// first input. Every copy gets all of `whole(x)` and of an input with another size; dp::InputRoles decides about
  /// inputs that may have the batch's length by chance, and refuses some with a ShapeError. Other arguments go to every
  /// copy unchanged. Outputs are joined along the same axis; ShapeError if their samples lie along another one (see
  /// dp::joined_axis). An exception of a copy is rethrown with the same type; its message names the copy and its
  /// device. Throws UsageError if a layer has got other parameters or buffers since the policy took the model, or if
  /// another policy has taken it. `grad` works through it; for gradients of gradients pass a GraphVariable as an input:
  /// then the work of all devices is one graph, and backward runs in the calling thread.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const auto pass = this->template begin_pass<dp::MakeShare>(inputs...);
    const trace::Span span(trace::Lane::forward, "forward", "DataParallel forward");
    const std::size_t devices = pass->devices();
    const bool replicated = this->collectives_.replicate(devices);
    this->parallel_apply_(devices, [&, pass, replicated](std::size_t i) {  // in the thread of device i
      pass->prepare([&] {
        // 1. Scatter: the device gets its share of each input.
        pass->shares[i].emplace(dp::scatter(pass->split, i, this->replicas_.device(i), pass->returns[i], inputs...));
        // 2. Replicate: its copy of the model gets the changed parameters. The first device uses the model itself.
        if (!replicated) dp::replicate(this->replicas_, i);
      });
      // 3. Parallel apply: all copies run at once, each on its share.
      pass->forward(i);
    });
    this->end_pass(*pass);
    // 4. Gather: the outputs are joined on the output device.
    const Ref<dp::BackwardNode> on_tape(new dp::BackwardNode(*this, this->alive(), std::move(pass->returns)));
    return dp::gather(pass->outputs, pass->split, this->output_device(), on_tape);
  }
  /// The same with a GraphVariable among the inputs.
  template <class... Inputs>
  requires dp::is_recorded<Inputs...>
  auto operator()(const Inputs&... inputs) { return this->forward_recorded(inputs...); }

 private:
  // Backward of the loss reaches `on_tape`, which calls this.
  void backward(const dp::Roots& roots, bool keep) override {
    this->parallel_apply_.await();
    this->before_backward(roots.size());
    this->backward_on_devices(roots, keep);
    // 5. Reduce: the gradients of all copies are added to the model's.
    if (!this->collectives_.reduce(roots.size()))
      dp::reduce(this->replicas_, roots.size(),
                 [this](std::size_t workers, const auto& task) { this->parallel_apply_.run(workers, task); });
  }
};

}  // namespace chorus
