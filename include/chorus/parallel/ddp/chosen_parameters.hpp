#pragma once
/// Options `parameters_and_buffers_to_ignore` and `delay_all_reduce_named_params`.

#include <algorithm>
#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>
#include <span>
#include <vector>

namespace chorus::ddp {

/// Some gradients are each rank's own; others leave late. What is not sent lies at the end of the flat buffers, for
/// there ranks may have parameters of their own, of any size.
template <Device D, class Communicator>
class ChosenParameters final : public Extension<D> {
 public:
  static bool wanted(const DistributedDataParallelOptions& options) {
    return !options.parameters_and_buffers_to_ignore.empty() || !options.delay_all_reduce_named_params.empty();
  }

  /// The first extension: numbers are given out in the order that it makes.
  [[gnu::cold]] explicit ChosenParameters(Core<D, Communicator>& core) : core_(core) {
    const auto& late = core.options.delay_all_reduce_named_params;
    const auto place = [&](std::size_t i) {
      if (core.options.ignores(core.name(i))) return 3;
      if (!core.parameter(i).wants_grad()) return 2;
      return std::find(late.begin(), late.end(), core.name(i)) != late.end() ? 1 : 0;
    };
    std::vector<std::size_t> order;
    for (const int wanted : {0, 1, 2, 3})
      for (std::size_t i = 0; i < core.entries(); ++i)
        if (place(i) == wanted) order.push_back(i);
    core.flat.reorder(order);
    for (std::size_t i = 0; i < core.entries(); ++i) {
      if (core.options.ignores(core.name(i))) ignored_.push_back(i);
      if (std::find(late.begin(), late.end(), core.name(i)) != late.end()) late_.push_back(i);
    }
  }

  void choose(std::span<Sending> sending) override {
    for (const std::size_t number : late_)
      if (auto& when = sending[core_.entry_of(number)]; when == Sending::early) when = Sending::late;
    for (const std::size_t number : ignored_) sending[core_.entry_of(number)] = Sending::no;
  }

 private:
  Core<D, Communicator>& core_;
  std::vector<std::size_t> ignored_, late_;  // numbers
};

}  // namespace chorus::ddp
