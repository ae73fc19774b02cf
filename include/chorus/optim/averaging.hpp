#pragma once
/// Averages of parameters over steps: exponential (EMA) and equal weights (SWA).

#include <algorithm>
#include <atomic>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/optim/replayed_steps.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::optim {

/// The weights of an average.
struct AverageRule {
  /// The weight of the old average in an update. Negative: all updates have equal weights.
  double decay = -1;
  double keep(std::int64_t updates) const {
    return decay >= 0 ? decay : static_cast<double>(updates) / static_cast<double>(updates + 1);
  }
};
/// An exponential moving average (EMA). Throws UsageError unless 0 <= decay < 1.
inline AverageRule exponential(double decay) {
  check<UsageError>(decay >= 0 && decay < 1, "exponential: expected a decay in [0, 1), got ", decay);
  return {decay};
}
/// The mean of the parameters at all updates: stochastic weight averaging (Izmailov et al. 2018).
inline AverageRule equal_weights() { return {}; }

namespace detail {
/// The averages that models hold now, by the parameter or buffer that each replaces. Each average stores the values it
/// displaced: the trained ones, or those of another average below it.
class HeldAverages {
 public:
  /// Where displaced values are stored.
  using Place = void*;

  static HeldAverages& all() {
    static HeldAverages held;
    return held;
  }
  void add(const void* number, Place displaced) {
    const std::lock_guard lock(mutex_);
    held_[number].push_back(displaced);
    ++count_;
  }
  /// Removes the average that holds the displaced values. Returns where its own values are, since an average above it
  /// may have displaced them; null if they are in the model.
  Place remove(const void* number, Place displaced) {
    const std::lock_guard lock(mutex_);
    auto& stack = held_.at(number);
    auto at = std::find(stack.begin(), stack.end(), displaced);
    at = stack.erase(at);
    const Place above = at == stack.end() ? nullptr : *at;
    if (stack.empty()) held_.erase(number);
    --count_;
    return above;
  }
  bool holds(const void* number) {
    if (count_ == 0) return false;
    const std::lock_guard lock(mutex_);
    return held_.contains(number);
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::vector<Place>> held_;
  std::atomic<int> count_{0};
};
}  // namespace detail

/// A policy: holds a model.
template <class Net>
concept HoldsModel = requires(Net& net) {
  net.module();
  net.parameters();
};

/// Options of ParameterAverage.
struct ParameterAverageOptions {
  /// Average the buffers, too. By default the average takes the last update's buffers, as PyTorch's AveragedModel.
  /// Integer buffers are never averaged.
  bool use_buffers = false;
};

/// A running average of a model's parameters. It starts as a copy. A ParameterServer's workers fetch a step's
/// parameters in the next forward pass, so there the average is one step behind the server's.
///
///   optim::ParameterAverage average{net.parameters(), optim::exponential(0.999)};
///   ...                                  // after each optimizer.step():
///   average.update();
///   ...
///   optim::AveragedScope use{average};   // the model computes with the averages while this lives
///
/// Batch norm's running statistics still belong to the trained parameters; `update_bn(net, loader)` inside of the scope
/// recomputes them. An average of the net, `ParameterAverage average{net, optim::equal_weights()}`, has its own
/// buffers, which are swapped with the averages. A scope with the net, `AveragedScope use{average, net}`, restores the
/// trained buffers.
template <Device D>
class ParameterAverage {
 public:
  /// Throws UsageError if there are no parameters.
  ParameterAverage(std::vector<nn::NamedParameter<D>> parameters, AverageRule rule) : rule_(rule) {
    check<UsageError>(!parameters.empty(), "ParameterAverage: expected at least one parameter");
    for (auto& named : parameters) {
      auto& parameter = *named.parameter;
      add({named.name, named.handle.shared(), &parameter, &parameter, {}});
    }
  }
  /// Averages all parameters and buffers of `net`, a policy.
  template <HoldsModel Net>
  ParameterAverage(Net& net, AverageRule rule, const ParameterAverageOptions& options = {})
      : ParameterAverage(net.parameters(), rule) {
    use_buffers_ = options.use_buffers;
    for (auto& named : nn::named_buffers<D>(net.module())) {
      auto& buffer = *named.buffer;
      add({named.name, named.handle.shared(), &buffer, nullptr, {}});
    }
  }
  ~ParameterAverage() {
    if (swapped_)
      for (Entry& entry : entries_) detail::HeldAverages::all().remove(entry.number(), entry.average.data());
  }
  ParameterAverage(const ParameterAverage&) = delete;
  ParameterAverage& operator=(const ParameterAverage&) = delete;

  /// average = keep average + (1 - keep) parameter. Throws UsageError while the model holds this or another average,
  /// and for `equal_weights` in a captured step.
  void update() {
    check<UsageError>(!swapped_, "ParameterAverage: can't update while the model holds the averages");
    check<UsageError>(
        !detail::HeldAverages::all().holds(entries_.front().number()),
        "ParameterAverage: can't update while the model holds other averages: expected the trained parameters");
#if CHORUS_USE_CUDA
    if constexpr (std::is_same_v<D, Cuda>)
      if (auto* numbers = cuda::replay_numbers()) {
        check<UsageError>(
            rule_.decay >= 0,
            "ParameterAverage: equal_weights() changes the weight with each update, and a captured step repeats one");
        replayed_.add(*numbers, {&updates_});
      }
#endif
    const double keep = rule_.keep(updates_++);
    for (Entry& entry : entries_) {
      const auto average = [&]<class T>(T* own, const T* value) {
        kernels::scale(entry.where(), entry.count(), static_cast<T>(keep), own);
        kernels::axpy(entry.where(), entry.count(), static_cast<T>(1 - keep), value, own);
      };
      const bool averages = entry.parameter != nullptr || use_buffers_;
      if (averages && entry.dtype() == DType::f32)
        average(static_cast<float*>(entry.average.data()), static_cast<const float*>(entry.value()));
      else if (averages && entry.dtype() == DType::f64)
        average(static_cast<double*>(entry.average.data()), static_cast<const double*>(entry.value()));
      else
        copy_bytes(entry.where(), entry.average.data(), entry.where(), entry.value(), entry.size_bytes());
    }
  }

  /// Swaps the model's values and the averages. Addresses don't change, since captured steps know them. If the model
  /// holds several averages, they may be removed in any order.
  void swap() {
    for (Entry& entry : entries_) {
      const auto device = entry.where();
      const auto bytes = entry.size_bytes();
      void* const mine = entry.average.data();
      void* other = nullptr;
      if (swapped_)
        other = detail::HeldAverages::all().remove(entry.number(), mine);
      else
        detail::HeldAverages::all().add(entry.number(), mine);
      if (other == nullptr) other = entry.value();
      const Storage<D> aside(device, bytes);
      copy_bytes(device, aside.data(), device, other, bytes);
      copy_bytes(device, other, device, mine, bytes);
      copy_bytes(device, mine, device, aside.data(), bytes);
      entry.numbers->touch();
    }
    swapped_ = !swapped_;
  }
  /// Whether the model holds the averages.
  bool swapped() const { return swapped_; }

  std::int64_t updates() const { return updates_; }

  D device() const { return entries_.front().where(); }
  /// The averages and the number of updates, for checkpoints: `average.conv1.weight`.
  std::vector<StateTensor> state() {
    check<UsageError>(!swapped_, "ParameterAverage: can't save its state while the model holds the averages");
    std::vector<StateTensor> out;
    for (Entry& entry : entries_) {
      if (!entry.is_here()) continue;
      const auto name = cat("average.", entry.name);
      if (entry.parameter != nullptr) {
        out.push_back(detail::beside(*entry.parameter, name, entry.average.data()));
      } else {
        const auto extents = entry.numbers->extents();
        out.push_back({name, entry.dtype(), {extents.begin(), extents.end()}, entry.average.data()});
      }
    }
    out.push_back({"average_updates", DType::i64, {}, &updates_, true});
    return out;
  }

 private:
  /// A parameter or buffer and its average.
  struct Entry {
    std::string name;
    Ref<Node> owner;
    chorus::detail::AtHome<D>* numbers;
    ParameterOn<D>* parameter;  // null for a buffer
    Storage<D> average;

    const void* number() const { return owner.get(); }
    // Whether the values are here, or in another process, which then has the state.
    bool is_here() const { return numbers->is_here(); }
    void* value() const { return is_here() ? numbers->memory() : nullptr; }
    D where() const { return numbers->where(); }
    DType dtype() const { return numbers->dtype(); }
    Index count() const { return is_here() ? numbers->count() : 0; }
    std::size_t size_bytes() const { return is_here() ? numbers->size_bytes() : 0; }
  };

  void add(Entry entry) {
    const MemoryScope scope(trace::Memory::optimizer);
    entry.average = Storage<D>(entry.where(), entry.size_bytes());
    copy_bytes(entry.where(), entry.average.data(), entry.where(), entry.value(), entry.size_bytes());
    entries_.push_back(std::move(entry));
  }

  AverageRule rule_;
  std::vector<Entry> entries_;
  std::int64_t updates_ = 0;
  bool swapped_ = false, use_buffers_ = false;
  detail::ReplayedSteps<D> replayed_;
};

template <Device D>
ParameterAverage(std::vector<nn::NamedParameter<D>>, AverageRule) -> ParameterAverage<D>;
template <HoldsModel Net>
ParameterAverage(Net&, AverageRule, const ParameterAverageOptions& = {}) -> ParameterAverage<typename Net::device_type>;

/// While it lives, the model computes with the averages. No optimizer may step meanwhile: the step would change the
/// averages and be lost. Scopes of several averages may be nested; the innermost one counts. Throws UsageError if the
/// model already holds this average.
template <Device D>
class AveragedScope {
 public:
  explicit AveragedScope(ParameterAverage<D>& average) : average_(average) {
    check_free();
    average_.swap();
  }
  /// Also restores the buffers of `net`, a policy, at the end, whatever passes with the averages changed.
  template <HoldsModel Net>
  AveragedScope(ParameterAverage<D>& average, Net& net) : average_(average) {
    check_free();
    for (const auto& named : nn::named_buffers<D>(net.module())) {
      auto& buffer = *named.buffer;
      if (!buffer.is_here()) continue;
      kept_.push_back({named.handle.shared(), &buffer, Storage<D>(buffer.where(), buffer.size_bytes())});
      copy_bytes(buffer.where(), kept_.back().numbers.data(), buffer.where(), buffer.memory(), buffer.size_bytes());
    }
    average_.swap();
  }
  ~AveragedScope() {
    average_.swap();
    for (const Kept& kept : kept_)
      copy_bytes(kept.buffer->where(), kept.buffer->memory(), kept.buffer->where(), kept.numbers.data(),
                 kept.buffer->size_bytes());
  }
  AveragedScope(const AveragedScope&) = delete;
  AveragedScope& operator=(const AveragedScope&) = delete;

 private:
  void check_free() const {
    check<UsageError>(!average_.swapped(), "AveragedScope: the model holds this average already");
  }
  struct Kept {
    Ref<Node> owner;
    BufferOn<D>* buffer;
    Storage<D> numbers;
  };
  ParameterAverage<D>& average_;
  std::vector<Kept> kept_;
};

}  // namespace chorus::optim
