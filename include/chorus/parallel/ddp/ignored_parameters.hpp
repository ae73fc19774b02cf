#pragma once
/// Option `parameters_and_buffers_to_ignore`.

#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>
#include <span>
#include <vector>

namespace chorus::ddp {

/// Some gradients belong to each rank alone. Parameters that are not sent lie at the end of the flat buffers, because
/// each rank may have different ones, of any size.
template <Device D, class Communicator>
class IgnoredParameters final : public Extension<D> {
 public:
  /// Must be the first extension: numbers follow the order that it makes.
  [[gnu::cold]] explicit IgnoredParameters(Core<D, Communicator>& core) : core_(core) {
    const auto place = [&](std::size_t i) {
      if (core.options.ignores(core.name(i))) return 2;
      return core.parameter(i).wants_grad() ? 0 : 1;
    };
    std::vector<std::size_t> order;
    for (const int wanted : {0, 1, 2})
      for (std::size_t i = 0; i < core.entries(); ++i)
        if (place(i) == wanted) order.push_back(i);
    core.flat.reorder(order);
    for (std::size_t i = 0; i < core.entries(); ++i)
      if (core.options.ignores(core.name(i))) ignored_.push_back(i);
  }

  void choose(std::span<char> sends) override {
    for (const std::size_t number : ignored_) sends[core_.entry_of(number)] = false;
  }

 private:
  Core<D, Communicator>& core_;
  std::vector<std::size_t> ignored_;  // numbers
};

}  // namespace chorus::ddp
