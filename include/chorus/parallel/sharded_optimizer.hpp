#pragma once
/// An optimizer whose state is shared out among the ranks (Rajbhandari et al., "ZeRO: memory optimizations toward
/// training trillion parameter models", SC 2020, stage 1).

#include <algorithm>
#include <array>
#include <chorus/comm/communicator.hpp>
#include <chorus/optim/optimizer.hpp>
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
      : HasLearningRate(options.lr), options_(options), step_([this, &net] { step(net); }), zero_grad_([&net] {
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

  // For checkpoints. For a moment each rank holds the whole state.

  /// A plain optimizer of all parameters, without state.
  template <class Net>
  std::unique_ptr<Opt> whole(Net& net) const {
    std::vector<nn::NamedParameter<typename Net::device_type>> all;
    for (const auto& entry : net.flat_parameters().entries()) all.push_back(entry.named);
    return std::make_unique<Opt>(std::move(all), options_);
  }
  /// One with the state of all ranks, on every rank; all of them call it.
  template <class Net>
  std::unique_ptr<Opt> gathered(Net& net) {
    auto all = whole(net);
    if (layout_.empty()) return all;  // nobody has stepped
    for_each_part(net, *all, [&](const optim::StateTensor& to, const optim::StateTensor* own, int owner, Range part) {
      if (own) copy(net, part.in(to), *own, own->data, part.bytes(to));
      net.communicator().broadcast(std::span(part.in(to), part.bytes(to)), owner);
    });
    return all;
  }
  /// Takes this rank's part of the state that `all`, made by `whole`, has.
  template <class Net>
  void adopt(Net& net, Opt& all) {
    layout_.clear();
    slices_.clear();
    own_.reset();
    share_out(net);
    for_each_part(net, all, [&](const optim::StateTensor& from, const optim::StateTensor* own, int, Range part) {
      if (own) copy(net, static_cast<std::uint8_t*>(own->data), from, part.in(from), part.bytes(from));
    });
  }

 private:
  /// Elements of a parameter.
  struct Range {
    std::size_t begin = 0, end = 0;

    std::uint8_t* in(const optim::StateTensor& t) const {
      return static_cast<std::uint8_t*>(t.data) + (t.on_host ? 0 : begin * size_of(t.dtype));
    }
    std::size_t bytes(const optim::StateTensor& t) const { return (t.on_host ? 1 : end - begin) * size_of(t.dtype); }
  };

  /// What rank r of n has of a parameter: of its dtype's elements [r, r + 1) * count / n, the last rank what is left
  /// over, too.
  template <class Flat, class Entry>
  static Range part_of(const Flat& flat, const Entry& entry, std::size_t rank, std::size_t ranks) {
    const std::size_t count = flat.groups()[entry.group].count, share = count / ranks;
    const std::size_t first = rank * share, last = rank + 1 == ranks ? count : first + share;
    const std::size_t begin = std::max(first, entry.begin), end = std::min(last, entry.begin + entry.count);
    return begin < end ? Range{begin - entry.begin, end - entry.begin} : Range{};
  }

  /// Calls `f(tensor of all, this rank's own or null, owner, part)` for each rank's part of each tensor.
  template <class Net, class F>
  void for_each_part(Net& net, Opt& all, const F& f) {
    const auto& flat = net.flat_parameters();
    const auto ranks = static_cast<std::size_t>(net.communicator().size()),
               rank = static_cast<std::size_t>(net.communicator().rank());
    const auto wholes = all.state(), owns = state();  // as many for each parameter, the last one its steps
    const std::size_t each = wholes.size() / flat.entries().size();
    std::map<std::string, std::size_t> last;  // the order may have changed since `all` was made
    for (std::size_t i = each - 1; i < wholes.size(); i += each) last.emplace(wholes[i].name, i);
    std::size_t own = 0;
    for (std::size_t e = 0; e < flat.entries().size(); ++e) {
      const std::size_t first = last.at(cat("steps.", flat.entries()[e].named.name)) + 1 - each;
      const bool mine = part_of(flat, flat.entries()[e], rank, ranks).end != 0;
      for (std::size_t t = 0; t < each; ++t)
        for (std::size_t owner = 0; owner < ranks; ++owner)
          if (const auto part = part_of(flat, flat.entries()[e], owner, ranks); part.end != 0)
            f(wholes[first + t], mine && owner == rank ? &owns[own + t] : nullptr, static_cast<int>(owner), part);
      if (mine) own += each;
    }
  }

  template <class Net>
  static void copy(Net& net, std::uint8_t* to, const optim::StateTensor& tensor, const void* from, std::size_t bytes) {
    if (tensor.on_host) {
      std::memcpy(to, from, bytes);
    } else {
      const auto device = net.flat_parameters().entries().front().parameter().where();
      copy_bytes(device, to, device, from, bytes);
    }
  }

  template <class Net>
  void step(Net& net) {
    const auto& flat = net.flat_parameters();
    if (layout_.empty()) {
      share_out(net);  // not earlier: the first backward pass settles the layout
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

  template <class Net>
  void share_out(Net& net) {
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
    if (!mine.empty()) own_ = std::make_unique<Opt>(std::move(mine), options_);
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

  typename Opt::options_type options_;
  std::function<void()> step_, zero_grad_;
  std::vector<std::byte*> layout_;             // where each dtype's parameters lay when they were shared out
  std::vector<std::shared_ptr<void>> slices_;  // of this rank
  std::unique_ptr<Opt> own_;                   // none where there are fewer numbers than ranks
};

}  // namespace chorus::inline CHORUS_ABI
