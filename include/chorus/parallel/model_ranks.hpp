#pragma once
/// The ranks that have a model together, for what they decide by its parameters.

#include <chorus/comm/communicator.hpp>
#include <chorus/nn/module.hpp>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::detail {

template <class Communicator>
class CommunicatorRanks final : public ModelRanks {
 public:
  CommunicatorRanks(Communicator& ranks, std::weak_ptr<void> net) : ranks_(ranks), net_(std::move(net)) {}
  void sum(std::span<double> numbers) override { living().all_reduce(numbers, comm::ReduceOp::sum, {}); }
  void max(std::span<double> numbers) override { living().all_reduce(numbers, comm::ReduceOp::max, {}); }

 private:
  Communicator& living() const {
    check<UsageError>(!net_.expired(), "parameter: its net was destroyed, which split it over the ranks");
    return ranks_;
  }
  Communicator& ranks_;
  std::weak_ptr<void> net_;
};

/// Has `ranks` decide together what is decided by these parameters. `counts(named)`: whether this rank is the one of
/// those with the same numbers whose numbers count. `net`: what is empty once the policy is gone.
template <Device D, class Communicator, class Counts>
[[gnu::cold]] void decide_together(const std::vector<nn::NamedParameter<D>>& parameters, Communicator& ranks,
                                   const std::weak_ptr<void>& net, const Counts& counts) {
  if (ranks.size() == 1) return;
  const auto all = std::make_shared<CommunicatorRanks<Communicator>>(ranks, net);
  for (const auto& named : parameters) named.parameter->set_ranks(all, counts(named));
}

}  // namespace chorus::detail
