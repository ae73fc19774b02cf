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

/// Keeps a copy of the model on each device from step to step; each forward pass sends it the parameters that have
/// changed, and what else the members of its layers say. What a copy writes into its buffers is lost, except the first
/// device's. `zero_grad` called by the model itself forgets what it does on one device, for gradients gather in the
/// first device's parameters alone. Must outlive the losses made through it.
///
/// Gradients are added in the order of the devices: a run repeated has the same bits. Between different GPUs NCCL sends
/// and adds, in its own order (dp::Collectives); what fails there is thrown as CommError or TimeoutError by the pass or
/// by the next one. Where a copy of the model does not come back, forward or backward, the pass throws TimeoutError,
/// `timeout` after the first device has ended (dp::ParallelApply).
///
/// Below stands the algorithm, in five steps, each a file of dp/. What options and extensions add is around it, in
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

  /// The model's numbers move to the first device, where they are not there; handles, optimizers and hooks that a
  /// program has from before stay theirs. Throws UsageError without devices, and for options that make no sense;
  /// DeviceError for a device that doesn't exist.
  DataParallel(Model model, DataParallelOptions options, std::uint64_t seed = initial_seed())
      : Base(std::move(model), std::move(options), seed) {}
  /// For `launch`: as many devices as `run` says, unless the options name them.
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  DataParallel(Model model, Run& run, DataParallelOptions options = {})
      : DataParallel(std::move(model), dp::options_of<D>(run, std::move(options)), run.seed()) {
    run.check_options();
  }

  /// The model's output for the whole batch, on the output device; scalars become a vector with one element a device,
  /// and a warning says so, once, where nobody has called `mean_loss` before the next pass. A tuple of outputs may have
  /// scalars; a struct with `fields()`, whose type stays, may not: there a field of shape [1] becomes one with an
  /// element a device.
  /// Tensors and Variables are cut along `dim`, or the axis that a BatchAxis says, into shares that differ by at most
  /// one, on no more devices than there are samples. There are as many samples as in the inputs that say their axis,
  /// else as in the first one. Every copy has all of what is `whole(x)`, and of what has another size there; see
  /// dp::InputRoles for inputs that may be as long as the batch by chance, of which some are refused with a ShapeError.
  /// Other arguments go to every copy as they are. Outputs are joined along the same axis; ShapeError for those that
  /// have their samples along another one (see dp::joined_axis). What a copy throws is thrown again, of the same kind,
  /// with the copy's number and device in the message. Throws UsageError where a layer of the model has got other
  /// parameters or buffers since the policy took it, and where another policy took it afterwards. `grad` goes through
  /// it; for gradients of gradients let an input be a GraphVariable: then all devices' work is one graph, through which
  /// backward goes in the calling thread.
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
        // 2. Replicate: its copy of the model gets the parameters that have changed. The first has the model itself.
        if (!replicated) dp::replicate(this->replicas_, i);
      });
      // 3. Parallel apply: all copies run at once, each on what it has.
      pass->forward(i);
    });
    this->end_pass(*pass);
    // 4. Gather: the outputs become one, on the output device.
    const Ref<dp::BackwardNode> on_tape(new dp::BackwardNode(*this, this->alive(), std::move(pass->returns)));
    return dp::gather(pass->outputs, pass->split, this->output_device(), on_tape);
  }
  /// The same with a GraphVariable among the inputs.
  template <class... Inputs>
  requires dp::is_recorded<Inputs...>
  auto operator()(const Inputs&... inputs) { return this->forward_recorded(inputs...); }

 private:
  // The loss goes back through `on_tape`, which calls this.
  void backward(const dp::Roots& roots, bool keep) override {
    this->parallel_apply_.await();
    this->before_backward(roots.size());
    this->backward_on_devices(roots, keep);
    // 5. Reduce: the gradients of all copies are added to those of the model.
    if (!this->collectives_.reduce(roots.size()))
      dp::reduce(this->replicas_, roots.size(),
                 [this](std::size_t workers, const auto& task) { this->parallel_apply_.run(workers, task); });
  }
};

}  // namespace chorus
