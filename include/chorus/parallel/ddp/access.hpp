#pragma once
/// The members of DistributedDataParallel that classes of the library need and users don't call.

#include <algorithm>
#include <chorus/optim/state_tensor.hpp>
#include <chorus/parallel/access.hpp>
#include <chorus/parallel/ddp/parameter_memory.hpp>
#include <chorus/parallel/ddp/policy_with_options.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

template <class Model, class Hook, class Communicator>
class DistributedDataParallel;

namespace detail {

template <class Model, class Hook, class Communicator>
class Access<DistributedDataParallel<Model, Hook, Communicator>> {
  using Net = DistributedDataParallel<Model, Hook, Communicator>;
  using D = typename nn::detail::DeviceOfModel<Model>::type;
  using Traits = ddp::HookTraits<Hook, D, Communicator>;
  using Core = ddp::Core<D, Communicator>;
  using Parts = ddp::GradientParts<D, Communicator>;

 public:
  explicit Access(Net& net) : net_(net) {}

  // For checkpoints.

  /// Lays out the flat buffers in a checkpoint's order. Names that the model doesn't have are ignored. `learned`: a
  /// backward pass has settled this order; otherwise the next one will.
  [[gnu::cold]] void set_parameter_order(std::span<const std::string> names, bool learned = true) {
    std::vector<std::size_t> order;
    for (const auto& wanted : names)
      for (std::size_t i = 0; i < core().entries(); ++i)
        if (core().name(i) == wanted) order.push_back(i);
    auto sorted = order;  // each name once, else the order is another model's
    std::sort(sorted.begin(), sorted.end());
    const bool twice = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
    if (order.size() != core().entries() || twice) return;
    // Ignored parameters stay at the end, wherever the checkpoint's ranks had them.
    std::stable_partition(order.begin(), order.end(),
                          [&](std::size_t i) { return !core().options.ignores(core().name(i)); });
    core().reorder(order);
    if (auto* const known = core().template find<ddp::LearnedOrder<D, Communicator>>()) known->set_learned(learned);
  }
  /// Whether the hook has state, so that all ranks take part in a checkpoint.
  static constexpr bool hook_remembers = Traits::remembers_parameters || Traits::remembers_numbers;
  /// Whether ranks can have different parameters and optimizer states; `ranks_differ()`: whether they do now.
  static constexpr bool ranks_may_differ = Traits::ranks_may_differ;
  bool ranks_differ() {
    if constexpr (ranks_may_differ)
      return net_.hook().ranks_differ();
    else
      return false;
  }
  /// The parameters that ranks have stepped by themselves since all ranks last had equal ones.
  std::vector<std::string> parameters_apart() requires ranks_may_differ {
    return net_.hook().stepped.names(net_.flat_);
  }
  void set_parameters_apart(std::span<const std::string> names) requires ranks_may_differ {
    net_.hook().stepped.set(net_.flat_, names);
  }
  /// The hook's state per parameter: see ddp::ParameterMemory.
  std::vector<optim::StateTensor> hook_state(bool full = false) {
    if (auto* const memory = core().template find<ddp::ParameterMemory<D>>()) return memory->state(full);
    return {};
  }
  void set_hook_state(const std::vector<optim::StateTensor>& tensors) {
    if (auto* const memory = core().template find<ddp::ParameterMemory<D>>()) memory->replace(tensors);
  }

  // For optimizers.

  /// Multiplies the hook's residual (its error feedback), which includes the loss scale: for GradScaler.
  void scale_hook_rest(double factor) requires(Traits::remembers_parameters) {
    core().template find<ddp::ParameterMemory<D>>()->scale_rest(factor);
  }
  /// Calls `step` with each parameter as soon as its averaged gradient arrives, during backward; an empty function ends
  /// this. Throws UsageError if a function is set already, and under a NonFinite policy, which decides after backward.
  void step_in_backward(std::function<void(const ParameterOn<D>&)> step) {
    const auto& options = core().options;
    check<UsageError>(!step || options.non_finite == NonFinite::propagate,
                      "DistributedDataParallel: an optimizer that steps in backward needs NonFinite::propagate");
    check<UsageError>(!step || !averages_in_parts,
                      "DistributedDataParallel: an optimizer that steps in backward needs whole averages, and this "
                      "hook gives each rank a part");
    using Steps = ddp::StepInBackward<D, Communicator>;
    auto* steps = core().template find<Steps>();
    const bool at_the_end = Traits::several_rounds || (options.find_unused_parameters && !options.static_graph);
    if (steps == nullptr) steps = &core().template add<Steps>(core(), at_the_end);
    steps->set(std::move(step));
  }
  /// Whether the hook gives each rank the averages of its own part only.
  static constexpr bool averages_in_parts = Traits::in_parts;
  /// Whether the hook may leave unaveraged gradients on each rank.
  static constexpr bool own_gradients = Traits::own_gradients;
  const std::vector<ddp::Bucket>& buckets() const { return std::as_const(core().buckets).all(); }
  /// Calls `f` while the parameters have their gradients, whether the hook averages whole gradients or parts.
  template <class F>
  void with_gradients(const F& f) {
    if constexpr (averages_in_parts)
      parts().show(f);
    else
      f();
  }
  /// The averages in parts have been used.
  void forget_parts() requires averages_in_parts { parts().forget(); }
  void forget_parts() {}

 private:
  Core& core() const { return net_.core(); }
  Parts& parts() const { return *core().template find<Parts>(); }
  Net& net_;
};

}  // namespace detail
}  // namespace chorus
