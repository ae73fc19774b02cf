#pragma once
/// DataParallel: one process, several devices. The batch is scattered, copies of the model run on all devices at once,
/// the outputs are gathered, and in backward the gradients are summed to the first device, where the optimizer steps.

#include <algorithm>
#include <chorus/comm/world.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/parallel/dp/device_balance.hpp>
#include <chorus/parallel/dp/dp_options.hpp>
#include <chorus/parallel/dp/gather.hpp>
#include <chorus/parallel/dp/gathered_scalars.hpp>
#include <chorus/parallel/dp/replica_collectives.hpp>
#include <chorus/parallel/dp/replica_gradients.hpp>
#include <chorus/parallel/dp/replica_threads.hpp>
#include <chorus/parallel/dp/replicas.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <chorus/parallel/one_process_policy.hpp>
#include <chorus/parallel/taken_handles.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus {

/// Keeps a copy of the model on each device from step to step; each forward pass sends it the parameters that have
/// changed, and what else the members of its layers say. What a copy writes into its buffers is lost, but for the first
/// device's. `zero_grad` called by the model itself forgets what it does on one device, for gradients gather in the
/// first device's parameters alone. Must outlive the losses made through it.
///
/// Where the devices are different GPUs, and <chorus/comm/nccl.hpp> is included (chorus.hpp does it in builds with
/// NCCL), parameters and buffers go out by NCCL's broadcast, and gradients come in by its reduce. Else, and in passes
/// that don't use all devices or that begin with a GraphVariable, both go by copies from device to device, with
/// additions on the first, in the order of the devices. NCCL may add three and more gradients in another order, hence
/// with another rounding: a run repeated on one machine has the same bits as long as NCCL chooses the same algorithms
/// (it does where nothing about machine, versions and sizes has changed), but not those of devices {0, 0, 0}. Either
/// way `trace` counts the bytes that device 0 has for N-1 others, and each of those for it, whatever relay NCCL makes
/// of that.
///
/// Where the model's code on another device than the first does not come back, forward or backward, a pass throws
/// TimeoutError, `timeout` after the first device has ended, with the copy's name. Its thread can't be stopped and is
/// left to itself, with all tensors that it works with; other arguments, which it has by reference, should live on.
/// `module()` can be saved as ever. The next pass waits for the thread, and goes on once it has come back. The first
/// device works in the calling thread, where nothing can be thrown if it does not come back: others that wait for it in
/// SyncBatchNorm end the process, five deadlines after theirs.
///
/// What fails in a collective is thrown, as CommError or TimeoutError, by the pass that it belongs to or, where a
/// device finds out later, by the next one: then gradients and parameters are not to be relied on any more. The pass
/// after that forms the group anew, and sends all parameters. A captured step (Graphed) has one device, and none of
/// this.
template <class Model>
class DataParallel : public OneProcessPolicy<Model>, private detail::ReplicaRunner {
 public:
  using D = typename Policy<Model>::device_type;
  static constexpr const char* name = "dp";

  /// The model's numbers move to the first device, where they are not there; handles, optimizers and hooks that a
  /// program has from before stay theirs. Throws UsageError without devices, and for options that make no sense;
  /// DeviceError for a device that doesn't exist.
  DataParallel(Model model, DataParallelOptions options, std::uint64_t seed = initial_seed())
      : OneProcessPolicy<Model>(detail::moved_to(std::move(model), detail::first_device<D>(options)), seed),
        options_(detail::settled(std::move(options))),
        buffers_(nn::named_buffers<D>(this->model_)),
        handles_(this->model_),
        threads_(detail::replica_names<D>(options_), *options_.timeout),
        collectives_(this->flat_, buffers_, replicas_, threads_.threads(), options_.device_ids, *options_.timeout) {
    CachingAllocator<D>::of(D{options_.output_device});  // throws where it doesn't exist
    comm::check_timeout("DataParallel", *options_.timeout);
    check<UsageError>(options_.dim >= 0, "DataParallel: dim is at least 0, got ", options_.dim);
    for (std::size_t i = 1; i < options_.device_ids.size(); ++i)
      replicas_.push_back(std::make_shared<detail::Replica<Model>>(this->model_, device(i)));
    detail::warn_of_imbalance<D>(options_.device_ids);
  }
  /// For `launch`: as many devices as `run` says, unless the options name them.
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  DataParallel(Model model, Run& run, DataParallelOptions options = {})
      : DataParallel(std::move(model), detail::options_of<D>(run, std::move(options)), run.seed()) {
    run.check_options();
  }

  /// The model's output for the whole batch, on the output device; scalars become a vector with one element a device,
  /// and a warning says so, once, where nobody has called `mean_loss` before the next pass. A tuple of outputs may have
  /// scalars; a struct with `fields()`, whose type stays, may not: there a field of shape [1] becomes one with an
  /// element a device.
  /// Tensors and Variables are cut along `dim` into shares that differ by at most one, on no more devices than there
  /// are samples; other arguments go to every copy as they are. What a copy throws is thrown again, of the same kind,
  /// with the copy's number and device in the message. Throws UsageError where a layer of the model has got other
  /// parameters or buffers since the policy took it, and where another policy took it afterwards. `grad` goes through
  /// it; for gradients of gradients let an input be a GraphVariable: then all devices' work is one graph, through which
  /// backward goes in the calling thread.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    threads_.await();
    handles_.check_kept(this->model_, this->flat_);
    const Index batch = detail::batch_size(options_.dim, inputs...);
    const auto& random = this->begin_forward(batch);
    const auto used = static_cast<std::size_t>(std::clamp<Index>(batch, 1, devices()));
    const bool grad = grad_enabled();
    using Shares = decltype(scatter(0, 1, inputs...));
    using Output =
        decltype(std::apply([&](const auto&... own) { return this->model_.forward(own...); }, std::declval<Shares&>()));
    const auto pass = std::make_shared<Pass<Shares, Output>>(used, replicas_);
    for (std::size_t i = 1; i < used; ++i) replicas_[i - 1]->take_members(this->model_);
    const auto update_copy = [&](std::size_t i) {
      if (i > 0) replicas_[i - 1]->follow(this->flat_, buffers_, device(0));
    };
    // The first device's forward pass may write into the buffers: all others have copied them before.
    const bool together = !recorded<Inputs...> && collectives_.serve(used);
    const bool copied = together || recorded<Inputs...> || !buffers_.empty();
    if (together)
      collectives_.broadcast();
    else if (copied)
      threads_.run(used, update_copy);
    // On the tape in the order of the devices, not of their threads: in the reverse of it backward adds up.
    if constexpr (recorded<Inputs...>)
      for (std::size_t i = 0; i < used; ++i) {
        if (i > 0) replicas_[i - 1]->record_copies(this->flat_);
        pass->shares[i].emplace(scatter(i, used, inputs...));
      }
    const auto prepare = [&](std::size_t i) {
      const GradMode mode(grad);
      if (!pass->shares[i]) pass->shares[i].emplace(scatter(i, used, inputs...));
      if (!copied) update_copy(i);
    };
    threads_.run_together(used, recorded<Inputs...>, prepare,
                          [pass, grad, used, batch, seed = random.seed, step = random.step, dim = options_.dim,
                           first_device = random.device, &first = this->model_,
                           watch = this->watch_once()](std::size_t i) {
                            const GradMode mode(grad);
                            const Index begin = detail::share_begin(batch, used, i),
                                        end = detail::share_begin(batch, used, i + 1);
                            RandomContext context{seed, step, 0, [begin] { return begin; }, end - begin};
                            context.devices = static_cast<int>(used);
                            context.dim = dim;
                            context.is_share = [batch, used](std::int64_t samples) {
                              return samples == batch / static_cast<Index>(used) ||
                                     samples == detail::share_begin(batch, used, 1);
                            };
                            context.device_kind = D::kind;
                            context.device = i == 0 ? first_device : pass->replicas[i - 1]->device().index;
                            const RandomScope scope(context);
                            const detail::WatchScope watch_scope(i == 0 ? watch : nullptr);
                            Model& model = i == 0 ? first : pass->replicas[i - 1]->model();
                            pass->outputs[i].emplace(std::apply(
                                [&](const auto&... own) { return model.forward(own...); }, *pass->shares[i]));
                            pass->drew[i] = context.drew;
                          });
    this->random_.drew = std::find(pass->drew.begin(), pass->drew.end(), true) != pass->drew.end();
    this->end_forward();
    scalars_.begin_pass(batch, used, detail::holds_scalars<Output>);
    return gather(pass->outputs, pass->shares, std::index_sequence_for<Inputs...>{}, inputs...);
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
  const DataParallelOptions& options() const { return options_; }

 private:
  using typename detail::ReplicaRunner::Roots;
  using Replicas = typename detail::ReplicaGradients<Model>::Replicas;

  // What the devices' threads work with in a forward pass, from which one may come back late.
  template <class Shares, class Output>
  struct Pass {
    Pass(std::size_t used, const Replicas& all) : shares(used), outputs(used), drew(used), replicas(all) {}
    std::vector<std::optional<Shares>> shares;
    std::vector<std::optional<Output>> outputs;
    std::vector<char> drew;  // whether random operations have drawn numbers there
    Replicas replicas;
  };

  D device(std::size_t i) const { return D{options_.device_ids[i]}; }

  // Whether a forward pass makes one graph of all devices.
  template <class... Inputs>
  static constexpr bool recorded = (detail::holds_graph_variables<Inputs> || ...);

  template <class... Inputs>
  auto scatter(std::size_t i, std::size_t used, const Inputs&... inputs) const {
    [[maybe_unused]] constexpr bool graph = recorded<Inputs...>;
    return std::tuple<decltype(detail::scatter<graph>(inputs, 0, used, i, D{}))...>(
        detail::scatter<graph>(inputs, options_.dim, used, i, device(i))...);
  }

  template <class Outputs, class Shares, std::size_t... I, class... Inputs>
  auto gather(const Outputs& outputs, Shares& shares, std::index_sequence<I...>, const Inputs&... inputs) {
    using Output = typename Outputs::value_type::value_type;
    std::vector<Output> parts;
    for (const auto& output : outputs) parts.push_back(*output);
    if constexpr (recorded<Inputs...>) {
      return detail::gather(parts, options_.dim, D{options_.output_device}, detail::RecordedReplicas{});
    } else {
      Ref<detail::ReplicaBackward> backward(new detail::ReplicaBackward(*this, parts.size()));
      const auto share = [&]<std::size_t At>(std::integral_constant<std::size_t, At>, const auto& input) {
        if constexpr (detail::holds_operands<decltype(input)>) {
          std::vector<std::remove_reference_t<std::tuple_element_t<At, typename Shares::value_type::value_type>>*> list;
          for (auto& own : shares) list.push_back(&std::get<At>(*own));
          detail::return_gradient(input, options_.dim, list, *backward);
        }
      };
      (share(std::integral_constant<std::size_t, I>{}, inputs), ...);
      return detail::gather(parts, options_.dim, D{options_.output_device}, backward);
    }
  }

  // Sums over the first `used` devices.
  detail::ReplicaGradients<Model> gradients(std::size_t used) const {
    return {this->flat_, device(0), replicas_, used};
  }

  void backward_on_replicas(const Roots& roots, bool keep) {
    // What is recomputed finds the model as it is now on one device, whatever passes there were in between.
    for (std::size_t i = 1; i < roots.size(); ++i) {
      replicas_[i - 1]->end_recording();
      replicas_[i - 1]->take_members(this->model_);
    }
    threads_.run_together(
        roots.size(), false, [](std::size_t) {},
        [roots, keep, replicas = replicas_](std::size_t i) {
          run_backward(roots[i], {.retain_graph = keep, .hooks = false});
        });
  }

  void backward(const Roots& roots, bool keep) override {
    threads_.await();
    gradients(roots.size()).clear();
    backward_on_replicas(roots, keep);
    if (collectives_.serve(roots.size()))
      collectives_.reduce();
    else
      gradients(roots.size()).reduce([this](std::size_t used, const auto& task) { threads_.run(used, task); });
  }

  void backward_to_wanted(const Roots& roots, bool keep) override {
    threads_.await();
    const auto copies = gradients(roots.size());
    copies.clear();
    struct Skipped {
      const detail::ReplicaGradients<Model>& copies;
      explicit Skipped(const detail::ReplicaGradients<Model>& c) : copies(c) { copies.skip_as_original(true); }
      ~Skipped() { copies.skip_as_original(false); }
    };
    {
      const Skipped skipped(copies);
      backward_on_replicas(roots, keep);
    }
    copies.reduce_diverted();
  }

  void for_each_parameter(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& entry : this->flat_.entries())
      if (entry.parameter().wants_grad()) visit(*entry.named.handle.shared(), context);
  }

  DataParallelOptions options_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  detail::TakenHandles handles_;
  Replicas replicas_;  // number 0 is the model itself
  detail::ReplicaThreads threads_;
  detail::ReplicaCollectives<Model> collectives_;
  detail::GatheredScalars scalars_;
};

}  // namespace chorus
