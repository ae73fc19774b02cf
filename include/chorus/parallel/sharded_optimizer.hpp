#pragma once
/// An optimizer whose state is shared out among the ranks (Rajbhandari et al., "ZeRO: memory optimizations toward
/// training trillion parameter models", SC 2020, stages 1 and, with the hook ReduceScatter, 2).

#include <algorithm>
#include <array>
#include <chorus/comm/communicator.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/parallel/gradient_buckets.hpp>
#include <chorus/parallel/non_finite.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI {

namespace detail {

/// Some of a parameter's numbers, for an optimizer that steps these alone.
template <Device D>
class ParameterSlice final : public ParameterOn<D> {
 public:
  ParameterSlice(ParameterOn<D>& whole, Index begin, Index count) : whole_(whole), begin_(begin), count_{count} {}

  DType dtype() const override { return whole_.dtype(); }
  std::span<const Index> extents() const override { return count_; }
  D where() const override { return whole_.where(); }
  void* value_data() const override { return at(whole_.value_data()); }
  void* grad_data() const override { return at(whole_.grad_data()); }
  bool grad_arrived() const override { return whole_.grad_arrived(); }
  void set_grad_arrived(bool arrived) override { whole_.set_grad_arrived(arrived); }
  bool wants_grad() const override { return whole_.wants_grad(); }
  void set_wants_grad(bool wants) override { whole_.set_wants_grad(wants); }
  void bind(const Storage<D>&, void*, const Storage<D>&, void*) override { no_parameter(); }
  void on_grad(std::function<void()>) override { no_parameter(); }
  Ref<Node> copy_to(D) const override { no_parameter(); }
  void add_grad_of(const ParameterOn<D>&) override { no_parameter(); }
  void set_origin(Ref<Node>) override { no_parameter(); }

 private:
  [[noreturn]] static void no_parameter() { fail<UsageError>("ParameterSlice: a slice is no parameter of its own"); }
  void* at(void* whole) const {
    return static_cast<std::byte*>(whole) + static_cast<std::size_t>(begin_) * size_of(whole_.dtype());
  }
  ParameterOn<D>& whole_;
  Index begin_;
  std::array<Index, 1> count_;
};

}  // namespace detail

/// An optimizer of type `Opt` of which each of n ranks keeps and steps its part of each bucket of a
/// DistributedDataParallel net, an n-th of all parameters; then all gather all parts. The numbers are those of `Opt`
/// itself. A step sends (n - 1) / n of the parameters' bytes from each rank; the state takes an n-th of the memory. All
/// ranks make the same calls. Where the net's hook is ReduceScatter, gradients are averaged in these parts alone.
///
///   ch::ShardedOptimizer<ch::optim::Adam<ch::Cpu>> optimizer{net, {.lr = 1e-3}};
template <class Opt>
class ShardedOptimizer : public optim::HasLearningRate {
  static_assert(
      !requires { Opt::needs_whole_parameters; },
      "ShardedOptimizer: a shard ends in the middle of a parameter, and this optimizer needs whole ones");
  using D = decltype(std::declval<const Opt&>().device());

 public:
  /// Steps all parameters of `net`, which it must not outlive. Throws UsageError where ranks have parameters of their
  /// own.
  template <class Net>
  ShardedOptimizer(Net& net, const typename Opt::options_type& options)
      : HasLearningRate(options.lr),
        options_(options),
        step_([this, &net] { step(net); }),
        clip_([this, &net](double max_norm) { return clip(net, max_norm); }),
        zero_grad_([&net] {
          for (const auto& entry : net.flat_parameters().entries()) entry.parameter().set_grad_arrived(false);
          net.forget_parts();
        }) {
    check<UsageError>(net.options().parameters_and_buffers_to_ignore.empty(),
                      "ShardedOptimizer: parameters that are each rank's own can't be shared out");
  }
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  void step() { step_(); }
  /// Scales the gradients that will be stepped down so that the Euclidean norm of all ranks' together is at most
  /// `max_norm`; returns the norm before, the same on all ranks. Throws UsageError where `max_norm` is not positive.
  double clip_grad_norm(double max_norm) { return clip_(max_norm); }
  /// Forgets all gradients.
  void zero_grad() { zero_grad_(); }
  /// This rank's part of the state, made by the first step.
  std::vector<optim::StateTensor> state() { return own_ ? own_->state() : std::vector<optim::StateTensor>(); }

  // For checkpoints. For a moment each rank holds the whole state.

  /// A plain optimizer of all parameters, without state.
  template <class Net>
  std::unique_ptr<Opt> whole(Net& net) const {
    std::vector<nn::NamedParameter<D>> all;
    for (const auto& entry : net.flat_parameters().entries()) all.push_back(entry.named);
    return std::make_unique<Opt>(std::move(all), options_);
  }
  /// One with the state of all ranks, on every rank; all of them call it.
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
  /// Takes this rank's part of the state that `all`, made by `whole`, has.
  template <class Net>
  void adopt(Net& net, Opt& all) {
    share_out(net);
    for_each_tensor(net.communicator(), all, [&](const Shard& shard, const optim::StateTensor& from, const auto* own) {
      if (own) copy(static_cast<std::uint8_t*>(own->data), from, shard.in(from), shard.bytes(from));
    });
  }

 private:
  /// Numbers [begin, end) of a parameter, which one rank steps.
  struct Shard {
    nn::NamedParameter<D> named;
    int owner;
    std::size_t begin, end;

    std::uint8_t* in(const optim::StateTensor& t) const {
      return static_cast<std::uint8_t*>(t.data) + (t.on_host ? 0 : begin * size_of(t.dtype));
    }
    std::size_t bytes(const optim::StateTensor& t) const { return (t.on_host ? 1 : end - begin) * size_of(t.dtype); }
  };

  /// Calls `f(shard, tensor of all, this rank's own or null)` for the state of each shard.
  template <class Communicator, class F>
  void for_each_tensor(Communicator& communicator, Opt& all, const F& f) {
    const auto wholes = all.state(), owns = state();  // as many for each parameter, the last one its steps
    std::map<std::string, std::size_t> last;          // the order may have changed since `all` was made
    std::size_t each = 0;
    for (std::size_t i = 0; i < wholes.size(); ++i)
      if (wholes[i].name.starts_with("steps.")) {
        if (each == 0) each = i + 1;
        last.emplace(wholes[i].name, i);
      }
    std::size_t own = 0;
    for (const Shard& shard : shards_) {
      const bool mine = shard.owner == communicator.rank();
      const std::size_t first = last.at(cat("steps.", shard.named.name)) + 1 - each;
      for (std::size_t t = 0; t < each; ++t) f(shard, wholes[first + t], mine ? &owns[own++] : nullptr);
    }
  }

  void copy(std::uint8_t* to, const optim::StateTensor& tensor, const void* from, std::size_t bytes) const {
    const auto device = own_->device();
    if (tensor.on_host)
      std::memcpy(to, from, bytes);
    else
      copy_bytes(device, to, device, from, bytes);
  }

  template <class Net>
  void step(Net& net) {
    prepare(net);
    if (own_) {
      own_->set_lr(lr());
      net.with_gradients([&] { own_->step(); });
    }
    net.forget_parts();
    gather(net);
    for (const auto& entry : net.flat_parameters().entries()) entry.parameter().touch();
  }

  template <class Net>
  double clip(Net& net, double max_norm) {
    optim::detail::check_max_norm(max_norm);
    prepare(net);
    double squares = 0;
    net.with_gradients([&] { squares = optim::detail::square_sum(mine_); });
    net.communicator().all_reduce(std::span(&squares, 1), comm::ReduceOp::sum, {});
    const double norm = std::sqrt(squares);
    net.with_gradients([&] { optim::detail::scale_down(mine_, norm, max_norm); });
    return norm;
  }

  /// Shares the parameters out, at the first step, for the first backward pass settles the buckets; and anew, with
  /// their state, when some were frozen or thawed meanwhile.
  template <class Net>
  void prepare(Net& net) {
    if (order_of(net) == order_) return;
    if (shards_.empty()) return share_out(net);
    const auto all = gathered(net);
    adopt(net, *all);
  }
  /// The parameters of all buckets, and where each bucket ends.
  template <class Net>
  static std::vector<std::pair<const ParameterOn<D>*, std::size_t>> order_of(Net& net) {
    std::vector<std::pair<const ParameterOn<D>*, std::size_t>> order;
    for (const auto& bucket : net.buckets())
      for (const std::size_t i : bucket.parameters)
        order.emplace_back(&net.flat_parameters().entries()[i].parameter(), bucket.begin + bucket.count);
    return order;
  }

  template <class Net>
  void share_out(Net& net) {
    own_.reset();
    mine_.clear();
    slices_.clear();
    order_ = order_of(net);
    const auto before = std::exchange(shards_, {});
    const auto& communicator = net.communicator();
    for (const auto& bucket : net.buckets())
      for (int rank = 0; rank < communicator.size(); ++rank) {
        const auto part = detail::part_of(bucket.count, static_cast<std::size_t>(rank),
                                          static_cast<std::size_t>(communicator.size()));
        for (const std::size_t i : bucket.parameters) {
          const auto& entry = net.flat_parameters().entries()[i];
          const auto from = entry.begin - bucket.begin;
          const auto end = std::min(part.end, from + static_cast<std::size_t>(entry.parameter().count()));
          if (const auto begin = std::max(part.begin, from); begin < end)
            shards_.push_back({entry.named, rank, begin - from, end - from});
        }
      }
    // Those that are frozen now keep their state where it was.
    for (const Shard& shard : before)
      if (std::none_of(order_.begin(), order_.end(),
                       [&](const auto& placed) { return placed.first == shard.named.parameter; }))
        shards_.push_back(shard);
    for (const Shard& shard : shards_) {
      if (shard.owner != communicator.rank()) continue;
      slices_.push_back(std::make_unique<detail::ParameterSlice<D>>(
          *shard.named.parameter, static_cast<Index>(shard.begin), static_cast<Index>(shard.end - shard.begin)));
      mine_.push_back({shard.named.name, shard.named.handle, slices_.back().get()});
    }
    if (!mine_.empty()) own_ = std::make_unique<Opt>(mine_, options_);
  }

  template <class Net>
  static void gather(Net& net) {
    auto& communicator = net.communicator();
    if (communicator.size() == 1) return;
    const comm::CollectiveOptions options{.traffic = trace::Traffic::parameters};
    const auto ranks = static_cast<std::size_t>(communicator.size()),
               rank = static_cast<std::size_t>(communicator.rank());
    for (const auto& bucket : net.buckets()) {
      const auto& group = net.flat_parameters().groups()[bucket.group];
      detail::with_type(group.dtype, group.value(bucket.begin), [&]<class T>(T* values) {
        const std::size_t share = bucket.count / ranks, even = share * ranks;
        if (share > 0)
          communicator.all_gather(std::span<const T>(values + rank * share, share), std::span<T>(values, even),
                                  options);
        if (even < bucket.count)
          communicator.broadcast(std::span<T>(values + even, bucket.count - even), communicator.size() - 1, options);
      });
    }
  }

  typename Opt::options_type options_;
  std::function<void()> step_;
  std::function<double(double)> clip_;
  std::function<void()> zero_grad_;
  std::vector<std::pair<const ParameterOn<D>*, std::size_t>> order_;  // when parameters were shared out
  std::vector<Shard> shards_;                                         // of all ranks
  std::vector<std::unique_ptr<detail::ParameterSlice<D>>> slices_;    // this rank's
  std::vector<nn::NamedParameter<D>> mine_;                           // the same, as optimizers take them
  std::unique_ptr<Opt> own_;                                          // none where there are fewer numbers than ranks
};

}  // namespace chorus::inline CHORUS_ABI
