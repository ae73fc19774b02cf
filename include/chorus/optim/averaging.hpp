#pragma once
/// Averages of parameters over steps: exponential (EMA) and equal weights (SWA).

#include <algorithm>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/optim/replayed_steps.hpp>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::optim {

/// How an average follows.
struct AverageRule {
  /// The share of the average that stays in an update; below 0, all updates weigh the same.
  double decay = -1;
  double keep(std::int64_t updates) const {
    return decay >= 0 ? decay : static_cast<double>(updates) / static_cast<double>(updates + 1);
  }
};
/// An exponential moving average (EMA). Throws UsageError unless 0 <= decay < 1.
inline AverageRule exponential(double decay) {
  check<UsageError>(decay >= 0 && decay < 1, "exponential: the decay is in [0, 1), got ", decay);
  return {decay};
}
/// The mean of the parameters at all updates: stochastic weight averaging (Izmailov et al. 2018).
inline AverageRule equal_weights() { return {}; }

/// A second set of a model's parameters that follows them. It starts as a copy of them. On the workers of a
/// ParameterServer, which fetch a step's parameters with the next forward pass, it follows a step behind the server's.
///
///   optim::ParameterAverage average{net.parameters(), optim::exponential(0.999)};
///   ...                                  // after each optimizer.step():
///   average.update();
///   ...
///   optim::AveragedScope use{average};   // the model computes with the averages while this lives
template <Device D>
class ParameterAverage {
 public:
  /// Throws UsageError where there are no parameters.
  ParameterAverage(std::vector<nn::NamedParameter<D>> parameters, AverageRule rule) : rule_(rule) {
    check<UsageError>(!parameters.empty(), "ParameterAverage: there are no parameters");
    const MemoryScope scope(trace::Memory::optimizer);
    for (auto& named : parameters) {
      auto& parameter = *named.parameter;
      Storage<D> copy(parameter.where(), parameter.size_bytes());
      copy_bytes(parameter.where(), copy.data(), parameter.where(), parameter.value_data(), parameter.size_bytes());
      entries_.push_back({std::move(named), std::move(copy)});
    }
  }
  ParameterAverage(const ParameterAverage&) = delete;
  ParameterAverage& operator=(const ParameterAverage&) = delete;

  /// average = keep average + (1 - keep) parameter. Throws UsageError for `equal_weights` in a step that is captured.
  void update() {
    check<UsageError>(!swapped_, "ParameterAverage: no update while the model holds the averages");
#if CHORUS_USE_CUDA
    if constexpr (std::is_same_v<D, Cuda>)
      if (auto* numbers = cuda::replay_numbers()) {
        check<UsageError>(rule_.decay >= 0,
                          "ParameterAverage: equal_weights() weigh each update otherwise, and a step that is captured "
                          "repeats one");
        replayed_.add(*numbers, {&updates_});
      }
#endif
    const double keep = rule_.keep(updates_++);
    for (Entry& entry : entries_)
      with_type(entry, [&]<class T>(T* average, T* value, D device, Index count) {
        kernels::scale(device, count, static_cast<T>(keep), average);
        kernels::axpy(device, count, static_cast<T>(1 - keep), static_cast<const T*>(value), average);
      });
  }

  /// Exchanges the model's numbers and the averages. Both stay where they are, for captured steps know the places.
  /// Throws UsageError where ranks have the model's numbers in common.
  void swap() {
    for (const Entry& entry : entries_)
      check<UsageError>(!entry.named.parameter->in_common(), "ParameterAverage: all ranks have '", entry.named.name,
                        "' in common (share_parameters of ShardedOptimizer), and would each exchange it");
    for (Entry& entry : entries_) {
      auto& parameter = *entry.named.parameter;
      const auto device = parameter.where();
      Storage<D> aside(device, parameter.size_bytes());
      copy_bytes(device, aside.data(), device, parameter.value_data(), parameter.size_bytes());
      copy_bytes(device, parameter.value_data(), device, entry.average.data(), parameter.size_bytes());
      copy_bytes(device, entry.average.data(), device, aside.data(), parameter.size_bytes());
      parameter.touch();
    }
    swapped_ = !swapped_;
  }

  std::int64_t updates() const { return updates_; }

  D device() const { return entries_.front().named.parameter->where(); }
  /// The averages and their number, for checkpoints: `average.conv1.weight`.
  std::vector<StateTensor> state() {
    check<UsageError>(!swapped_, "ParameterAverage: no state to keep while the model holds the averages");
    std::vector<StateTensor> out;
    for (Entry& entry : entries_) {
      const auto extents = entry.named.parameter->extents();
      out.push_back({cat("average.", entry.named.name),
                     entry.named.parameter->dtype(),
                     {extents.begin(), extents.end()},
                     entry.average.data()});
    }
    out.push_back({"average_updates", DType::i64, {}, &updates_, true});
    return out;
  }

 private:
  struct Entry {
    nn::NamedParameter<D> named;
    Storage<D> average;
  };

  template <class F>
  static void with_type(Entry& entry, const F& f) {
    auto& parameter = *entry.named.parameter;
    const auto call = [&]<class T>(T) {
      f(static_cast<T*>(entry.average.data()), static_cast<T*>(parameter.value_data()), parameter.where(),
        parameter.count());
    };
    if (parameter.dtype() == DType::f32)
      call(float{});
    else
      call(double{});
  }

  AverageRule rule_;
  std::vector<Entry> entries_;
  std::int64_t updates_ = 0;
  bool swapped_ = false;
  detail::ReplayedSteps<D> replayed_;
};

/// While it lives, the model computes with the averages.
template <Device D>
class AveragedScope {
 public:
  explicit AveragedScope(ParameterAverage<D>& average) : average_(average) { average_.swap(); }
  ~AveragedScope() { average_.swap(); }
  AveragedScope(const AveragedScope&) = delete;
  AveragedScope& operator=(const AveragedScope&) = delete;

 private:
  ParameterAverage<D>& average_;
};

}  // namespace chorus::inline CHORUS_ABI::optim
