#pragma once
/// An optimizer whose state is sharded over the ranks (Rajbhandari et al., "ZeRO: memory optimizations toward training
/// trillion parameter models", SC 2020, stages 1 and, with the hook ReduceScatter, 2).

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/while_alive.hpp>
#include <chorus/optim/averaged_gradients.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/parallel/access.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/parallel/model_ranks.hpp>
#include <chorus/parallel/sharded/parameter_shards.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {
/// A DistributedDataParallel: other policies have no buckets to shard an optimizer's state by.
template <class Net>
concept DistributedInBuckets = requires(AccessTo<Net> access) {
  access.buckets();
};
}  // namespace detail

/// An optimizer of type `Opt`. Each of n ranks keeps and steps its shard of each bucket of a DistributedDataParallel
/// net, 1/n of all parameters; then all ranks all-gather the shards. Results equal `Opt`'s. In a step each rank sends
/// (n - 1) / n of the parameters' bytes; state takes 1/n of the memory. All ranks make the same calls. If the net's
/// hook is ReduceScatter, gradients are averaged in these shards only.
///
///   ch::ShardedOptimizer<ch::optim::Adam<ch::Cpu>> optimizer{net, {.lr = 1e-3}};
///
/// It works with a MixedPrecision model, and `scaler.step(optimizer)` of optim::GradScaler: it steps the float
/// parameters, from which the 2-byte copies for computation are made. These stay whole on each rank, because they are
/// saved, compared and read by layers in float; only the optimizer state is sharded.
template <class Opt>
class ShardedOptimizer : public optim::HasLearningRate {
  static_assert(
      !requires { Opt::needs_whole_parameters; },
      "ShardedOptimizer: a shard may end inside a parameter, and this optimizer needs whole parameters");
  using D = decltype(std::declval<const Opt&>().device());
  using Shard = detail::ParameterShard<D>;
  using UseParts = std::function<void(const std::vector<nn::NamedParameter<D>>&)>;

 public:
  /// Steps all parameters of `net` as long as it lives: afterwards only its state is left, and other calls throw
  /// UsageError. Throws UsageError if ranks have different parameters or unaveraged gradients.
  template <detail::DistributedInBuckets Net>
  ShardedOptimizer(Net& net, const typename Opt::options_type& options)
      : HasLearningRate(options.lr), options_(options), in_parts_(detail::AccessTo<Net>::averages_in_parts) {
    check<UsageError>(
        !detail::AccessTo<Net>::own_gradients,
        "ShardedOptimizer: expected a hook that averages gradients, because a rank steps its shard for all ranks");
    check<UsageError>(net.options().parameters_and_buffers_to_ignore.empty(),
                      "ShardedOptimizer: expected no parameters_and_buffers_to_ignore: each rank has its own");
    const auto while_there = [&net](auto call) {
      return detail::while_alive("ShardedOptimizer", net.alive(), std::move(call));
    };
    step_ = while_there([this, &net](const std::int32_t* unwanted) { step(net, unwanted); });
    clip_ = while_there([this, &net](double max_norm, bool strict) { return clip(net, max_norm, strict); });
    with_parts_ = while_there([this, &net](const UseParts& use) {
      prepare(net);
      detail::access_to(net).with_gradients([&] { use(shards_.mine()); });
    });
    make_largest_ = while_there([&net](std::int32_t* number) { net.make_largest(number); });
    skip_step_ = while_there([&net] { detail::access_to(net).forget_parts(); });
    zero_grad_ = while_there([&net] {
      for (const auto& entry : net.flat_parameters().entries()) entry.parameter().set_grad_arrived(false);
      detail::access_to(net).forget_parts();
    });
    parameters_ = while_there([&net] { return net.parameters(); });
  }
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  void step() { step_(nullptr); }
  /// Scales the gradients to be stepped so that the Euclidean norm over all ranks is at most `max_norm`; returns the
  /// norm before scaling, the same on all ranks. Options, and the treatment of non-finite gradients, are those of
  /// optim::clip_grad_norm. Throws UsageError if `max_norm` is not positive, and in a captured step.
  double clip_grad_norm(double max_norm, const optim::ClipGradNormOptions& options = {}) {
    return clip_(max_norm, options.error_if_nonfinite);
  }
  /// Drops all gradients.
  void zero_grad() { zero_grad_(); }
  /// See Optimizer::set_group; all ranks make the same groups.
  template <class Chosen>
  void set_group(const Chosen& chosen, const optim::GroupOptions& options) {
    const auto all = parameters_();
    Opt(all, options_).set_group(chosen, options);  // throws as the plain one
    Group& group = groups_.emplace_back(Group{{}, options});
    for (const auto& named : all)
      if (chosen(named)) group.names.insert(named.name);
    if (own_) make_group(group);
  }
  /// See Optimizer::no_decay_on_biases_and_norms.
  void no_decay_on_biases_and_norms() { set_group(optim::IsBiasOrNorm{}, {.weight_decay = 0}); }
  /// This rank's shard of the state, made by the first step.
  std::vector<optim::StateTensor> state() { return own_ ? own_->state() : std::vector<optim::StateTensor>(); }

  // For optim::GradScaler.

  /// Whether this rank has averages of its own shard only.
  bool in_parts() const { return in_parts_; }
  /// Calls `use(parts)` with this rank's shards while all parameters have their gradients.
  void with_parts(const UseParts& use) { with_parts_(use); }
  /// Replaces a number, in memory of the parameters' device, by the maximum over all ranks.
  void make_largest(std::int32_t* number) { make_largest_(number); }
  /// Called instead of `step` if the gradients are not finite.
  void skip_step() { skip_step_(); }
  /// See Optimizer::step_unless: in a replay without a step, ranks still all-gather their present parameters.
  void step_unless(const std::int32_t* unwanted) requires(!std::is_same_v<D, Cpu>) { step_(unwanted); }
  void prepare_to_skip() requires(!std::is_same_v<D, Cpu>) {
    with_parts_([this](const auto&) {
      if (own_) own_->prepare_to_skip();
    });
  }

  // For checkpoints. Each rank temporarily holds the whole state.

  /// A plain optimizer of all parameters, with the learning rate but without state.
  template <class Net>
  std::unique_ptr<Opt> whole(Net& net) const {
    std::vector<nn::NamedParameter<D>> all;
    for (const auto& entry : net.flat_parameters().entries()) all.push_back(entry.named);
    auto optimizer = std::make_unique<Opt>(std::move(all), options_);
    optimizer->set_lr(lr());
    return optimizer;
  }
  /// A plain optimizer with the state of all ranks, on every rank; all ranks call it.
  template <class Net>
  std::unique_ptr<Opt> gathered(Net& net) {
    auto all = whole(net);
    auto& communicator = net.communicator();
    for_each_tensor(communicator, *all, [&](const Shard& shard, const optim::StateTensor& to, const auto* own) {
      if (own) copy(shard.in(to), *own, own->data, shard.bytes(to));
      communicator.broadcast(std::span(shard.in(to), shard.bytes(to)), shard.owner);
    });
    return all;
  }
  /// Takes this rank's shard of the state of `all`, which `whole` made, and its learning rate.
  template <class Net>
  void adopt(Net& net, Opt& all) {
    resume_lr(all.lr());
    // Frozen parameters are in no bucket, but have state if they have been stepped.
    std::set<std::string> stepped;
    for (const auto& tensor : all.state())
      if (tensor.name.starts_with("steps.") && *static_cast<const std::int64_t*>(tensor.data) > 0)
        stepped.insert(tensor.name);
    shards_.place(net, [&](const std::string& name) { return stepped.contains(cat("steps.", name)); });
    cut_shards(net);
    for_each_tensor(net.communicator(), all, [&](const Shard& shard, const optim::StateTensor& from, const auto* own) {
      if (own) copy(static_cast<std::uint8_t*>(own->data), from, shard.in(from), shard.bytes(from));
    });
  }

 private:
  /// Calls `f(shard, tensor of all, this rank's own or null)` for the state of each shard.
  template <class Communicator, class F>
  void for_each_tensor(Communicator& communicator, Opt& all, const F& f) {
    const auto wholes = all.state(), owns = state();  // the order may have changed since `all` was made
    const auto in_wholes = places(wholes), in_owns = places(owns);
    for (const Shard& shard : shards_.all()) {
      const auto name = cat("steps.", shard.named.name);
      const auto [first, count] = in_wholes.at(name);
      const auto* const own = shard.owner == communicator.rank() ? &owns[in_owns.at(name).first] : nullptr;
      for (std::size_t t = 0; t < count; ++t) f(shard, wholes[first + t], own == nullptr ? nullptr : own + t);
    }
  }
  /// Where each parameter's tensors begin, and their number; the last one is its steps.
  static std::map<std::string, std::pair<std::size_t, std::size_t>> places(const std::vector<optim::StateTensor>& all) {
    std::map<std::string, std::pair<std::size_t, std::size_t>> out;
    std::size_t first = 0;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].name.starts_with("steps.")) {
        out.emplace(all[i].name, std::pair(first, i + 1 - first));
        first = i + 1;
      }
    return out;
  }

  void copy(std::uint8_t* to, const optim::StateTensor& tensor, const void* from, std::size_t bytes) const {
    const auto device = own_->device();
    if (tensor.on_host)
      std::memcpy(to, from, bytes);
    else
      copy_bytes(device, to, device, from, bytes);
  }

  template <class Net>
  void step(Net& net, [[maybe_unused]] const std::int32_t* unwanted) {
    prepare(net);
    if (own_) {
      take_learning_rate();
      detail::access_to(net).with_gradients([&] {
        if constexpr (!std::is_same_v<D, Cpu>)
          if (unwanted != nullptr) return own_->step_unless(unwanted);
        own_->step();
      });
    }
    const auto& entries = net.flat_parameters().entries();
    if (Ledger* const ledger = entries.front().parameter().ledger().get()) ledger->step(this, lr(), groups_.size());
    detail::access_to(net).forget_parts();
    gather(net);
    for (const auto& entry : entries) {
      entry.parameter().touch();
      entry.parameter().storage().settle();
    }
  }

  void take_learning_rate() {
    own_->set_lr(lr());
#if CHORUS_USE_CUDA
    if constexpr (std::is_same_v<D, Cuda>)
      if (auto* numbers = cuda::replay_numbers()) numbers->at_replay([this] { own_->set_lr(lr()); });
#endif
  }

  template <class Net>
  double clip(Net& net, double max_norm, bool error_if_nonfinite) {
    optim::detail::check_max_norm(max_norm);
#if CHORUS_USE_CUDA
    check<UsageError>((std::is_same_v<D, Cpu> || cuda::replay_numbers() == nullptr),
                      "ShardedOptimizer: clip_grad_norm is not supported in a captured step");
#endif
    prepare(net);
    double norm = 0;
    detail::access_to(net).with_gradients([&] {
      if (auto* const room = optim::detail::norm_in_any_order<D>(net.parameters())) {
        detail::CommunicatorRanks ranks(net.communicator(), net.alive());
        norm = room(shards_.mine(), &ranks);
        return;
      }
      double squares = optim::detail::square_sum(shards_.mine());
      net.communicator().all_reduce(std::span(&squares, 1), comm::ReduceOp::sum, {});
      norm = std::sqrt(squares);
    });
    if (error_if_nonfinite && !std::isfinite(norm)) raise_not_finite(net, norm);
    detail::access_to(net).with_gradients([&] { optim::detail::scale_down(shards_.mine(), norm, max_norm); });
    return norm;
  }

  /// Throws NonFiniteError with the same message on all ranks.
  template <class Net>
  [[noreturn, gnu::cold]] void raise_not_finite(Net& net, double norm) {
    const auto& entries = net.flat_parameters().entries();
    std::size_t first = entries.size();
    detail::access_to(net).with_gradients([&] {
      if (const auto* bad = optim::detail::first_not_finite(shards_.mine()))
        for (first = 0; first < entries.size() && entries[first].named.name != bad->name;) ++first;
    });
    auto of_all = static_cast<std::int64_t>(first);
    net.communicator().all_reduce(std::span(&of_all, 1), comm::ReduceOp::min, {});
    first = static_cast<std::size_t>(of_all);
    optim::detail::raise_not_finite(norm, first < entries.size() ? entries[first].named.name : "several together");
  }

  /// Cuts the parameters into shards at the first step, because the first backward pass settles the buckets. Cuts
  /// again, with their state, after parameters were frozen or unfrozen.
  template <class Net>
  void prepare(Net& net) {
    for (const auto& entry : net.flat_parameters().entries()) optim::detail::check_averaged(entry.named);
    if (shards_.fit(net)) return;
    if (shards_.all().empty()) return cut_shards(net);
    const auto all = gathered(net);
    adopt(net, *all);
  }
  template <class Net>
  void cut_shards(Net& net) {
    own_.reset();  // it holds the old shards
    shards_.cut(net);
    if constexpr (requires { Opt::asks_ranks; }) shards_.share(net);
    if (shards_.mine().empty()) return;
    own_ = std::make_unique<Opt>(shards_.mine(), options_);
    for (const Group& group : groups_) make_group(group);
  }

  // By name, because a shard does not have its parameter's shape.
  struct Group {
    std::set<std::string> names;
    optim::GroupOptions options;
  };
  void make_group(const Group& group) {
    const auto chosen = [&](const auto& named) { return group.names.contains(named.name); };
    if (std::any_of(shards_.mine().begin(), shards_.mine().end(), chosen)) own_->set_group(chosen, group.options);
  }

  template <class Net>
  static void gather(Net& net) {
    auto& communicator = net.communicator();
    if (communicator.size() == 1) return;
    const comm::CollectiveOptions options{.traffic = trace::Traffic::parameters};
    const auto ranks = static_cast<std::size_t>(communicator.size()),
               rank = static_cast<std::size_t>(communicator.rank());
    for (const auto& bucket : detail::access_to(net).buckets()) {
      const auto& group = net.flat_parameters().groups()[bucket.group];
      ddp::with_type(group.dtype, group.value(bucket.begin), [&]<class T>(T* values) {
        const std::size_t shard = bucket.count / ranks, even = shard * ranks;
        if (shard > 0)
          communicator.all_gather(std::span<const T>(values + rank * shard, shard), std::span<T>(values, even),
                                  options);
        if (even < bucket.count)
          communicator.broadcast(std::span<T>(values + even, bucket.count - even), communicator.size() - 1, options);
      });
    }
  }

  typename Opt::options_type options_;
  // Functions that know the net's type.
  std::function<void(const std::int32_t*)> step_;
  std::function<double(double, bool)> clip_;
  std::function<void(const UseParts&)> with_parts_;
  std::function<void(std::int32_t*)> make_largest_;
  std::function<void()> zero_grad_, skip_step_;
  std::function<std::vector<nn::NamedParameter<D>>()> parameters_;
  bool in_parts_;
  detail::ParameterShards<D> shards_;
  std::vector<Group> groups_;
  std::unique_ptr<Opt> own_;  // null if this rank has no shard
};

}  // namespace chorus
