#pragma once
/// The base of all optimizers: the parameters, their state, and iteration over both in long ranges.

#include <algorithm>
#include <array>
#include <chorus/core/say.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/optim/averaged_gradients.hpp>
#include <chorus/optim/learning_rate.hpp>
#include <chorus/optim/parameter_group.hpp>
#include <chorus/optim/replayed_steps.hpp>
#include <chorus/optim/state_tensor.hpp>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

namespace chorus::optim {

namespace detail {
/// The state at `data` for this process's part of a parameter.
template <Device D>
StateTensor beside(const ParameterOn<D>& parameter, std::string name, void* data) {
  const auto extents = parameter.extents();
  StateTensor state{.name = std::move(name),
                    .dtype = parameter.dtype(),
                    .shape = {extents.begin(), extents.end()},
                    .data = data,
                    .part = parameter.part()};
  if (!parameter.is_part()) return state;
  state.part_begin = static_cast<std::size_t>(parameter.part_begin());
  state.part_count = static_cast<std::size_t>(parameter.count());
  return state;
}
}  // namespace detail

/// The base of all optimizers: parameter groups, a learning rate, zero_grad, the state for checkpoints.
template <Device D>
class Optimizer : public HasLearningRate {
 public:
  /// `numbers`: other options of the step, which ranks that step one net compare. Throws UsageError if there are no
  /// parameters.
  Optimizer(std::vector<nn::NamedParameter<D>> parameters, double lr, std::initializer_list<double> numbers = {});
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates every parameter that has a gradient. Throws UsageError and changes nothing if a gradient is local to one
  /// process: see ParameterOn::grad_local.
  virtual void step() = 0;

  /// For GPUs: `step()` in a captured graph. The device skips a replay if `*unwanted`, in its memory, is nonzero.
  /// Skipped replays don't count as steps. Needs `prepare_to_skip` before the capture.
  void step_unless(const std::int32_t* unwanted)
    requires(!std::is_same_v<D, Cpu>)
  {
    const auto before = std::exchange(replayed_.unwanted, unwanted);
    try {
      step();
    } catch (...) {
      replayed_.unwanted = before;
      throw;
    }
    replayed_.unwanted = before;
  }
  void prepare_to_skip()
    requires(!std::is_same_v<D, Cpu>)
  {
    make_state();  // all steps before the capture may have been skipped
    replayed_.prepare(device());
  }

  /// Called by GradScaler when it skips a step: the parameters' policy may have to know.
  void leave_out_step() { tell_ranks(0, /*stepped=*/false); }

  /// Clears all gradients.
  void zero_grad() {
    for (const Entry& entry : entries_) entry.named.parameter->set_grad_arrived(false);
  }

  /// All state for checkpoints, created by the first step or by this call; none for parameters of another process. Step
  /// counts are tensors of one integer.
  std::vector<StateTensor> state() {
    make_state();
    replayed_.settle();
    std::vector<Entry*> given(entries_.size());
    for (Entry& entry : entries_) given[entry.number] = &entry;
    std::vector<StateTensor> out;
    for (Entry* const each : given) {
      Entry& entry = *each;
      const auto& parameter = *entry.named.parameter;
      if (!parameter.is_here()) continue;
      std::size_t slot = 0;
      for (const std::string_view name : slots_of(entry.named))
        out.push_back(detail::beside(parameter, cat(name, '.', entry.named.name), state_data(entry, slot++)));
      out.push_back({cat("steps.", entry.named.name), DType::i64, {}, &entry.steps, true});
    }
    return out;
  }

  /// Sets options for the parameters that `chosen(NamedParameter)` selects (see IsBiasOrNorm and NameBegins). If
  /// several calls select a parameter, the last one counts. For other options, use several optimizers. Throws
  /// UsageError if no parameter is selected or an option is negative.
  template <class Chosen>
  void set_group(const Chosen& chosen, const GroupOptions& options) {
    check<UsageError>(options.lr_scale >= 0 && options.weight_decay.value_or(0) >= 0,
                      "optimizer: expected lr_scale and weight_decay of a group of at least 0, got ", options.lr_scale,
                      " and ", options.weight_decay.value_or(0));
    bool any = false;
    for (Entry& entry : entries_)
      if (chosen(std::as_const(entry.named))) {
        entry.group = options;
        any = true;
      }
    numbers_ = Ledger::mixed(Ledger::mixed(numbers_, options.lr_scale), options.weight_decay.value_or(-1));
    check<UsageError>(any, "optimizer: the group has no parameters");
  }
  /// Applies weight decay to weights only, not to biases and normalisation parameters.
  void no_decay_on_biases_and_norms() { set_group(IsBiasOrNorm{}, {.weight_decay = 0}); }

  D device() const { return entries_.front().named.parameter->where(); }

  /// For an optimizer made of several: only one of them reports their step to the ranks.
  void keep_quiet() { quiet_ = true; }

 protected:
  static constexpr std::size_t max_slots = 3;

  /// Adjacent parameters of one dtype that have gradients and the same number of steps.
  struct Range {
    DType dtype;
    Index count;
    void* value;
    void* grad;
    std::array<void*, max_slots> state;
    std::int64_t steps;  // earlier steps
    GroupOptions group;
    std::size_t axes, number;  // of the first parameter, even if only a part of it is here; its place among the given
    const std::int64_t* counted;  // the host's counter of steps, including this one

    double weight_decay(double of_optimizer) const { return group.weight_decay.value_or(of_optimizer); }
  };
  double lr_of(const Range& range) const { return lr() * range.group.lr_scale; }

  /// A step's scalars for kernels. In a captured step they are in device memory, where each replay finds its learning
  /// rate and step number.
  template <class S>
  auto scalars(const S& now, [[maybe_unused]] const Range& range) {
#if CHORUS_USE_CUDA && defined(__CUDACC__)
    if constexpr (std::is_same_v<D, Cuda>) {
      kernels::cuda::Scalars<S> out{now, nullptr, {replayed_.unwanted, replayed_.left_out}};
      if (auto* numbers = cuda::replay_numbers())
        out.replayed = numbers->add(typename kernels::cuda::Scalars<S>::Replayed{now},
                                    [this, counted = range.counted, scale = range.group.lr_scale](auto& next, auto) {
                                      next.value.lr = lr() * scale;
                                      next.step = *counted;
                                    });
      return out;
    } else
#endif
      return now;
  }

  /// Throws UsageError in a captured step: replays would reuse this step's scalars.
  void refuse_capture([[maybe_unused]] const char* name) const {
#if CHORUS_USE_CUDA
    if constexpr (std::is_same_v<D, Cuda>)
      check<UsageError>(cuda::replay_numbers() == nullptr, name, ": its step can't be captured");
#endif
  }

  /// The names of each parameter's state tensors, which have its dtype and shape and start at 0.
  virtual std::span<const std::string_view> slots() const = 0;
  /// The same for one parameter, which may have fewer.
  virtual std::span<const std::string_view> slots_of(const nn::NamedParameter<D>&) const { return slots(); }

  struct Walk {
    bool each_alone = false;  ///< each range is one parameter, of which this process has all
    bool in_pieces = false;   ///< or a piece: the optimizer asks the ranks with the others
  };
  /// Calls `update(T{}, range)` for ranges that cover all parameters with gradients; then counts the step.
  template <class Update>
  void for_each_range(const Update& update) {
    for_each_range({}, update);
  }
  template <class Update>
  void for_each_range(const Walk& walk, const Update& update) {
    const trace::Span span(trace::Lane::optimizer, "optimizer", "optimizer step");
    for (const Entry& entry : entries_) {  // before any parameter is updated
      entry.named.parameter->check_grad_whole();
      detail::check_averaged(entry.named);
      if (walk.each_alone && !walk.in_pieces)
        nn::check_whole("optimizer", entry.named,
                        "it needs the norm of whole parameters: use an element-wise optimizer, such as Adam or Sgd");
    }
    make_state();
    Range range{};
#if CHORUS_USE_CUDA
    if constexpr (std::is_same_v<D, Cuda>) {
      if (auto* numbers = cuda::replay_numbers()) {
        std::vector<std::int64_t*> steps;
        for (Entry& entry : entries_)
          if (entry.named.parameter->grad_arrived() && entry.named.parameter->wants_grad())
            steps.push_back(&entry.steps);
        replayed_.add(*numbers, std::move(steps));
      } else {
        replayed_.settle();
      }
    }
#endif
    const auto flush = [&] {
      if (range.count == 0) return;
      if (range.dtype == DType::f32)
        update(float{}, range);
      else
        update(double{}, range);
      range.count = 0;
    };
    bool any = false;
    std::uint64_t hash_of_steps = 0;  // of the first parameter's earlier steps
    for (Entry& entry : entries_) {
      auto& parameter = *entry.named.parameter;
      if (!parameter.grad_arrived() || !parameter.wants_grad()) continue;
      any = true;
      if (hash_of_steps == 0) hash_of_steps = Ledger::mixed(1, static_cast<std::uint64_t>(entry.steps));
      Range next{parameter.dtype(), parameter.count(), parameter.memory(), parameter.grad_data(), {}, entry.steps++,
                 entry.group, parameter.extents().size(), entry.number, &entry.steps};
      for (std::size_t slot = 0, n = slots_of(entry.named).size(); slot < n; ++slot)
        next.state[slot] = state_data(entry, slot);
      parameter.storage().look();
      parameter.touch();
      if (walk.each_alone || !continues(range, next)) {
        flush();
        range = next;
      } else {
        range.count = static_cast<Index>(occupied(range)) + next.count;
      }
    }
    flush();
    tell_ranks(hash_of_steps, /*stepped=*/true);
    if (!any) warn_of_no_gradient();
    if (auto* const steps = trace::step_counter()) [[unlikely]]
      steps->stepped();
#if CHORUS_USE_CUDA && defined(__CUDACC__)
    if constexpr (std::is_same_v<D, Cuda>)
      if (replayed_.left_out != nullptr)
        kernels::cuda::count_left_out(device(), replayed_.unwanted, std::exchange(replayed_.left_out, nullptr));
#endif
  }

 private:
  struct Entry {
    nn::NamedParameter<D> named;
    std::size_t number;  // index in the given order
    std::int64_t steps = 0;
    std::size_t state_begin = 0;  // in bytes
    GroupOptions group = {};
  };

  // No gradients arrived, so no parameter changes. This is usually a mistake, except for a slice of the parameters, as
  // a ZeRO rank has.
  [[gnu::noinline, gnu::cold]] void warn_of_no_gradient() {
    const auto sent = [](const Entry& entry) { return entry.named.parameter->grad_sent(); };
    const auto elsewhere = [](const Entry& entry) { return !entry.named.parameter->is_here(); };
    const bool wanted = std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
      return entry.named.parameter->wants_grad() && !elsewhere(entry);
    });
    if (std::any_of(entries_.begin(), entries_.end(), sent) ||
        (!wanted && std::any_of(entries_.begin(), entries_.end(), elsewhere)) || std::exchange(warned_, true))
      return;
    chorus::detail::say(cat("warning: optimizer: a step found no gradient in its ", entries_.size(), " parameters ('",
                            entries_.front().named.name, "', ...) and changed nothing",
                            wanted ? ": call backward on a loss that depends on them after zero_grad"
                                   : ": no parameter requires a gradient"));
  }

  // Reports the step to the policies of these parameters. A skipped step is reported if ranks might decide differently.
  void tell_ranks(std::uint64_t hash_of_steps, bool stepped) {
    if (!std::exchange(knows_type_, true))
      for (const char* name = typeid(*this).name(); *name != '\0'; ++name)
        numbers_ = Ledger::mixed(numbers_, static_cast<std::uint64_t>(*name));
    std::array<Ledger*, 4> told{};  // of several nets
    Ledger* last = nullptr;
    for (const Entry& entry : entries_) {
      entry.named.parameter->storage().settle();
      Ledger* const ledger = entry.named.parameter->ledger().get();
      if (ledger == std::exchange(last, ledger) || ledger == nullptr || quiet_) continue;
      const auto place = std::find_if(told.begin(), told.end(), [&](auto* one) { return !one || one == ledger; });
      if (place == told.end() || std::exchange(*place, ledger) == ledger) continue;
      if (!stepped && !ledger->own_gradients) continue;
      const bool alike = !ledger->uneven && !ledger->own_gradients;
      ledger->step(this, lr(), Ledger::mixed(numbers_, alike ? hash_of_steps : 0));
    }
  }

  [[gnu::cold]] void make_state() {
    if (made_) return move_state();
    made_ = true;
    for (const DType type : {DType::f32, DType::f64}) sort_by_address(type);
    const MemoryScope scope(trace::Memory::optimizer);
    std::size_t bytes = 0;
    for (std::size_t slot = slots().size(); slot-- > 0;) {  // parameters with fewer slots lie behind those with more
      for (const DType type : {DType::f32, DType::f64})  // a dtype's state is contiguous, like its parameters
        for (Entry& entry : entries_)
          if (entry.named.parameter->dtype() == type && slots_of(entry.named).size() == slot + 1) {
            const bool here = entry.named.parameter->is_here();  // parameters of another process have no state here
            const auto count = here ? static_cast<std::size_t>(entry.named.parameter->count()) : 0;
            const std::size_t size = size_of(type);
            entry.state_begin = parameter_place<D>((bytes + size - 1) / size, count, size) * size;
            bytes = entry.state_begin + padded_count<D>(count, size) * size;
          }
      state_[slot] = Storage<D>(device(), bytes);
      zero_bytes(device(), state_[slot].data(), bytes);
    }
  }

  // A policy may have moved the parameters to another device since the first step.
  void move_state() {
    for (std::size_t slot = 0; slot < slots().size(); ++slot) {
      if (!state_[slot] || state_[slot].device() == device()) continue;
      const MemoryScope scope(trace::Memory::optimizer);
      Storage<D> near(device(), state_[slot].bytes());
      copy_bytes(device(), near.data(), state_[slot].device(), state_[slot].data(), near.bytes());
      state_[slot] = std::move(near);
    }
  }

  // Sorts a dtype's parameters by address, which may differ from the order in which they were given.
  [[gnu::cold]] void sort_by_address(DType type) {
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i].named.parameter->dtype() == type) places.push_back(i);
    auto order = places;
    std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {  // a rank's empty parts
      return std::less<>()(entries_[a].named.parameter->place(), entries_[b].named.parameter->place());
    });
    std::vector<Entry> sorted;
    for (const std::size_t i : order) sorted.push_back(std::move(entries_[i]));
    for (std::size_t i = 0; i < places.size(); ++i) entries_[places[i]] = std::move(sorted[i]);
  }

  void* state_data(const Entry& entry, std::size_t slot) const {
    return static_cast<std::byte*>(state_[slot].data()) + entry.state_begin;
  }

  // The number of elements up to a possible next parameter. A parameter that starts farther away, as large ones may,
  // begins a new range.
  static std::size_t occupied(const Range& range) {
    return padded_count<D>(static_cast<std::size_t>(range.count), size_of(range.dtype));
  }

  bool continues(const Range& range, const Range& next) const {
    const std::size_t bytes = occupied(range) * size_of(range.dtype);
    const auto follows = [bytes](const void* first, const void* second) {
      return static_cast<const std::byte*>(first) + bytes == second;
    };
    bool all = range.count > 0 && range.dtype == next.dtype && range.steps == next.steps &&
               range.group.lr_scale == next.group.lr_scale && range.group.weight_decay == next.group.weight_decay &&
               follows(range.value, next.value) && follows(range.grad, next.grad);
    for (std::size_t slot = 0; slot < slots().size(); ++slot) all = all && follows(range.state[slot], next.state[slot]);
    return all;
  }

  std::vector<Entry> entries_;
  std::array<Storage<D>, max_slots> state_;
  bool made_ = false, warned_ = false, quiet_ = false, knows_type_ = false;
  std::uint64_t numbers_ = 0;  // a hash of the options, the groups and the type
  detail::ReplayedSteps<D> replayed_;
};

template <Device D>
Optimizer<D>::~Optimizer() = default;

template <Device D>
Optimizer<D>::Optimizer(std::vector<nn::NamedParameter<D>> parameters, double lr, std::initializer_list<double> numbers)
    : HasLearningRate(lr) {
  for (const double number : numbers) numbers_ = Ledger::mixed(numbers_, number);
  check<UsageError>(!parameters.empty(), "optimizer: expected at least one parameter");
  for (auto& named : parameters) entries_.push_back({.named = std::move(named), .number = entries_.size()});
}

}  // namespace chorus::optim
