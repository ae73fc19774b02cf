#pragma once
/// DataParallel: one process, several devices. The batch is scattered, copies of the model run on all devices at once,
/// the outputs are gathered, and in backward the gradients are reduced to the first device, where the optimizer steps.

#include <algorithm>
#include <chorus/parallel/dp/canonical_reduce.hpp>
#include <chorus/parallel/dp/collectives.hpp>
#include <chorus/parallel/dp/device_balance.hpp>
#include <chorus/parallel/dp/dp_options.hpp>
#include <chorus/parallel/dp/gather.hpp>
#include <chorus/parallel/dp/mean_loss.hpp>
#include <chorus/parallel/dp/parallel_apply.hpp>
#include <chorus/parallel/dp/pass.hpp>
#include <chorus/parallel/dp/recorded.hpp>
#include <chorus/parallel/dp/reduce.hpp>
#include <chorus/parallel/dp/replicate.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <chorus/parallel/model_handles.hpp>
#include <chorus/parallel/one_process_policy.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

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
template <class Model>
class DataParallel : public OneProcessPolicy<Model>, private dp::BackwardRunner {
 public:
  using D = typename Policy<Model>::device_type;
  static constexpr const char* name = "dp";
  /// The same policy around another model, for programs with several: `ch::Rebind<Net, Other>`.
  template <class Other>
  using rebind = DataParallel<Other>;

  /// The model's numbers move to the first device, where they are not there; handles, optimizers and hooks that a
  /// program has from before stay theirs. Throws UsageError without devices, and for options that make no sense;
  /// DeviceError for a device that doesn't exist.
  DataParallel(Model model, DataParallelOptions options, std::uint64_t seed = initial_seed())
      : OneProcessPolicy<Model>(detail::moved_to(std::move(model), dp::first_device<D>(options)), seed),
        options_(dp::settled<D>(std::move(options))),
        buffers_(nn::named_buffers<D>(this->model_)),
        handles_(this->model_),
        replicas_(this->model_, this->flat_, buffers_, options_.device_ids),
        parallel_apply_(dp::replica_names<D>(options_.device_ids), options_.device_ids, *options_.timeout),
        collectives_(options_.device_ids, *options_.timeout, replicas_, parallel_apply_.threads()),
        canonical_(this->model_, replicas_, static_cast<std::size_t>(options_.canonical_shares)) {
    dp::warn_of_imbalance<D>(options_.device_ids);
  }
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
  /// one, on no more devices than there are samples; other arguments go to every copy as they are. Outputs are joined
  /// along the same axis; ShapeError for those that have their samples along another one (see dp::joined_axis). What a
  /// copy throws is thrown again, of the same kind, with the copy's number and device in the message. Throws UsageError
  /// where a layer of the model has got other parameters or buffers since the policy took it, and where another policy
  /// took it afterwards. `grad` goes through it; for gradients of gradients let an input be a GraphVariable: then all
  /// devices' work is one graph, through which backward goes in the calling thread.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const auto pass = begin_pass<dp::MakeShare>(inputs...);
    const trace::Span span(trace::Lane::forward, "forward", "DataParallel forward");
    const std::size_t devices = pass->runs.size();
    const bool replicated = collectives_.replicate(devices);
    parallel_apply_(devices, [&, pass, replicated](std::size_t i) {  // in the thread of device i
      pass->prepare([&] {
        // 1. Scatter: the device gets its share of each input; of canonical shares it may have several.
        for (std::size_t s = pass->runs[i].begin; s < pass->runs[i].end; ++s)
          pass->shares[s].emplace(dp::scatter(pass->split, s, replicas_.device(i), pass->returns[s], inputs...));
        // 2. Replicate: its copy of the model gets the parameters that have changed. The first has the model itself.
        if (!replicated) dp::replicate(replicas_, i);
      });
      // 3. Parallel apply: all copies run at once, each on what it has.
      pass->forward(i);
    });
    end_pass(*pass);
    // 4. Gather: the outputs become one, on the output device.
    const Ref<dp::BackwardNode> on_tape(
        new dp::BackwardNode(*this, this->alive(), std::move(pass->returns), canonical_.cut(pass->split)));
    return dp::gather(pass->outputs, pass->split, D{options_.output_device}, on_tape);
    // 5. Reduce: once the loss goes back through `on_tape`, which calls `backward` below.
  }
  /// The same with a GraphVariable among the inputs: an extension, see dp/recorded.hpp.
  template <class... Inputs>
  requires dp::is_recorded<Inputs...>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(canonical_.shares() == 0,
                      "canonical shares: GraphVariables, for gradients of gradients, are not cut into shares");
    const auto pass = begin_pass<dp::MakeRecordedShare>(inputs...);
    dp::recorded_forward(pass, replicas_, parallel_apply_, inputs...);
    end_pass(*pass);
    return dp::gather<dp::JoinRecordedOutputs>(pass->outputs, pass->split, D{options_.output_device}, {});
  }

  /// For models that return their loss, the mean over their share: of the last forward pass's losses, one a device, the
  /// mean over the whole batch. Each device counts by what its loss is a mean over (tokens that count, a sum of class
  /// weights), or by its number of samples where that is not known: of a loss computed by hand, and under NoGrad.
  /// Throws ShapeError for others, UsageError for sums of losses that are means over different numbers.
  template <Real T>
  Variable<T, 0, D> mean_loss(const Variable<T, 1, D>& losses) const {
    return scalars_.mean(losses);
  }

  int devices() const { return static_cast<int>(options_.device_ids.size()); }
  int canonical_shares() const { return static_cast<int>(canonical_.shares()); }
  const DataParallelOptions& options() const { return options_; }

 private:
  void backward(const dp::Roots& roots, bool keep) override {
    const std::size_t devices = roots.size();
    parallel_apply_.await();
    if (canonical_.shares() != 0)
      return canonical_.backward(roots, keep, [this](std::size_t used, const auto& task) {
        before_backward(used);
        parallel_apply_(used, task);
      });
    before_backward(devices);
    backward_on_devices(roots, keep);
    // 5. Reduce: the gradients of all copies are added to those of the model.
    if (!collectives_.reduce(devices))
      dp::reduce(replicas_, devices,
                 [this](std::size_t workers, const auto& task) { parallel_apply_.run(workers, task); });
  }

  void backward_to_wanted(const dp::Roots& roots, bool keep) override {
    check<UsageError>(canonical_.shares() == 0,
                      "canonical shares: grad() does not go through a policy's forward pass: expected backward()");
    parallel_apply_.await();
    before_backward(roots.size());
    dp::reduce_wanted(replicas_, roots.size(), [&] { backward_on_devices(roots, keep); });
  }

  void before_backward(std::size_t devices) {
    dp::forget_gradients(replicas_, devices);
    // What is recomputed finds the model as it is now on one device, whatever passes there were in between.
    for (std::size_t i = 1; i < devices; ++i) {
      replicas_[i].end_recording();
      replicas_[i].take_members(this->model_);
    }
  }
  void backward_on_devices(const dp::Roots& roots, bool keep) {
    parallel_apply_(roots.size(), [roots, keep, copies = replicas_.copies()](std::size_t i) {
      run_backward(roots[i], {.retain_graph = keep, .hooks = false});
    });
  }

  void for_each_parameter(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& entry : this->flat_.entries())
      if (entry.parameter().wants_grad()) visit(*entry.named.handle.shared(), context);
  }

  // How the batch is divided, and what the first device has beside numbers: the copies take it over.
  template <template <class> class Make, class... Inputs>
  auto begin_pass(const Inputs&... inputs) {
    parallel_apply_.await();
    handles_.check_kept(this->model_, this->flat_);
    const Index batch = detail::batch_size(options_.dim, inputs...);
    const bool canonical = canonical_.shares() != 0;
    const auto most = canonical ? static_cast<Index>(canonical_.shares()) : Index{devices()};
    const auto shares = static_cast<std::size_t>(std::clamp<Index>(batch, 1, most));
    auto runs = canonical ? canonical_.runs(shares) : dp::one_each(shares);
    const auto& random = this->begin_forward(batch);
    for (std::size_t i = 1; i < runs.size(); ++i) replicas_[i].take_members(this->model_);
    using Shares = dp::Shares<Make, D, Inputs...>;
    using Output = decltype(dp::call(this->model_, std::declval<const Shares&>()));
    return std::make_shared<dp::Pass<Model, Shares, Output>>(
        dp::Split{batch, shares, options_.dim}, std::move(runs), canonical_.devices(), this->model_, replicas_, random,
        this->watch_once());
  }
  template <class Pass>
  void end_pass(const Pass& pass) {
    this->random_.drew = pass.drew();
    this->end_forward();
    scalars_.begin_pass(pass.split, detail::holds_scalars<typename Pass::Output>);
  }

  DataParallelOptions options_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  detail::ModelHandles handles_;
  dp::Replicas<Model> replicas_;
  dp::ParallelApply parallel_apply_;
  // Extensions: what they do beyond the five steps is their files' matter.
  dp::Collectives<Model> collectives_;
  dp::CanonicalReduce<Model> canonical_;
  detail::GatheredScalars scalars_;
};

}  // namespace chorus
