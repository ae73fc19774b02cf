#pragma once
/// An optimizer whose state is shared out among the ranks (Rajbhandari et al., "ZeRO: memory optimizations toward
/// training trillion parameter models", SC 2020, stage 1).

#include <algorithm>
#include <array>
#include <chorus/comm/communicator.hpp>
#include <chorus/optim/optimizer.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
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

/// An optimizer of type `Opt` of which each of n ranks keeps and steps an n-th part of the flat parameters; then all
/// gather all parts. The numbers are those of `Opt` itself. A step sends (n - 1) / n of the parameters' bytes from each
/// rank; the state takes an n-th of the memory. All ranks call `step` together.
///
///   ch::ShardedOptimizer<ch::optim::Adam<ch::Cpu>> optimizer{net, {.lr = 1e-3}};
template <class Opt>
class ShardedOptimizer : public optim::HasLearningRate {
  static_assert(!requires { Opt::needs_whole_parameters; },
                "ShardedOptimizer: a shard ends in the middle of a parameter, and this optimizer needs whole ones");

 public:
  /// Steps all parameters of `net`, which it must not outlive. Throws UsageError where ranks have parameters of their
  /// own.
  template <class Net>
  ShardedOptimizer(Net& net, const typename Opt::options_type& options)
      : HasLearningRate(options.lr), step_([this, &net, options] { step(net, options); }), zero_grad_([&net] {
          for (const auto& entry : net.flat_parameters().entries()) entry.parameter().set_grad_arrived(false);
        }) {
    check<UsageError>(net.options().parameters_and_buffers_to_ignore.empty(),
                      "ShardedOptimizer: parameters that are each rank's own can't be shared out");
  }
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  void step() { step_(); }
  /// Forgets all gradients.
  void zero_grad() { zero_grad_(); }
  /// This rank's part of the state, made by the first step.
  std::vector<optim::StateTensor> state() { return own_ ? own_->state() : std::vector<optim::StateTensor>(); }

 private:
  template <class Net>
  void step(Net& net, const typename Opt::options_type& options) {
    const auto& flat = net.flat_parameters();
    if (layout_.empty()) {
      share_out(net, options);  // not earlier: the first backward pass settles the layout
    } else {
      for (std::size_t g = 0; g < layout_.size(); ++g)
        check<UsageError>(flat.groups()[g].value(0) == layout_[g],
                          "ShardedOptimizer: the layout of the parameters has changed since the first step");
    }
    if (own_) {
      own_->set_lr(lr());
      own_->step();
    }
    gather(net);
    for (const auto& entry : flat.entries()) entry.parameter().touch();
  }

  /// Rank r has elements [r, r + 1) * count / n of each dtype, the last one what is left over, too.
  template <class Net>
  void share_out(Net& net, const typename Opt::options_type& options) {
    using D = typename Net::device_type;
    const auto& flat = net.flat_parameters();
    const auto ranks = static_cast<std::size_t>(net.communicator().size());
    const auto rank = static_cast<std::size_t>(net.communicator().rank());
    for (const auto& group : flat.groups()) layout_.push_back(group.value(0));
    std::vector<nn::NamedParameter<D>> mine;
    for (const auto& entry : flat.entries()) {
      const std::size_t count = flat.groups()[entry.group].count, share = count / ranks;
      const std::size_t first = rank * share, last = rank + 1 == ranks ? count : first + share;
      const auto elements = static_cast<std::size_t>(entry.parameter().count());
      const std::size_t begin = std::max(first, entry.begin), end = std::min(last, entry.begin + elements);
      if (begin >= end) continue;
      const auto slice = std::make_shared<detail::ParameterSlice<D>>(
          entry.parameter(), static_cast<Index>(begin - entry.begin), static_cast<Index>(end - begin));
      slices_.push_back(slice);
      mine.push_back({entry.named.name, entry.named.handle, slice.get()});
    }
    if (!mine.empty()) own_ = std::make_unique<Opt>(std::move(mine), options);
  }

  template <class Net>
  static void gather(Net& net) {
    auto& communicator = net.communicator();
    if (communicator.size() == 1) return;
    const comm::CollectiveOptions options{.traffic = trace::Traffic::parameters};
    const auto ranks = static_cast<std::size_t>(communicator.size()),
               rank = static_cast<std::size_t>(communicator.rank());
    for (const auto& group : net.flat_parameters().groups()) {
      const std::size_t share = group.count / ranks, even = share * ranks;
      const auto gather_as = [&]<class T>(T* values) {
        if (share > 0)
          communicator.all_gather(std::span<const T>(values + rank * share, share), std::span<T>(values, even),
                                  options);
        if (even < group.count)
          communicator.broadcast(std::span<T>(values + even, group.count - even), communicator.size() - 1, options);
      };
      if (group.dtype == DType::f32)
        gather_as(reinterpret_cast<float*>(group.value(0)));
      else
        gather_as(reinterpret_cast<double*>(group.value(0)));
    }
  }

  std::function<void()> step_, zero_grad_;
  std::vector<std::byte*> layout_;             // where each dtype's parameters lay when they were shared out
  std::vector<std::shared_ptr<void>> slices_;  // of this rank
  std::unique_ptr<Opt> own_;                   // none where there are fewer numbers than ranks
};

}  // namespace chorus::inline CHORUS_ABI
