#pragma once
/// The ranks that share a model, for decisions that depend on its parameters.

#include <chorus/comm/communicator.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/paired_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::detail {

template <class Communicator>
class CommunicatorRanks final : public optim::PairedRanks {
 public:
  CommunicatorRanks(Communicator& ranks, std::weak_ptr<void> net) : ranks_(ranks), net_(std::move(net)) {}
  void sum(std::span<double> numbers) override { living().all_reduce(numbers, comm::ReduceOp::sum, {}); }
  void max(std::span<double> numbers) override { living().all_reduce(numbers, comm::ReduceOp::max, {}); }
  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  // In round k, two ranks are a pair if their sum is k modulo the number of ranks. The lower one sends first, so that
  // both never wait for room in each other's queue.
  void exchange(const Messages& to, Messages& from) override {
    auto& ranks = living();
    const comm::CollectiveOptions options{.traffic = trace::Traffic::gradients};
    for (int round = 0; round < size(); ++round) {
      const int peer = (round - rank() + size()) % size();
      if (peer == rank()) continue;
      const auto& out = to[static_cast<std::size_t>(peer)];
      auto& in = from[static_cast<std::size_t>(peer)];
      if (rank() < peer && !out.empty()) ranks.send(std::span(out), peer, options);
      if (!in.empty()) ranks.recv(std::span(in), peer, options);
      if (rank() > peer && !out.empty()) ranks.send(std::span(out), peer, options);
    }
  }

 private:
  Communicator& living() const {
    check<UsageError>(!net_.expired(), "parameter: its net was destroyed, which split it over the ranks");
    return ranks_;
  }
  Communicator& ranks_;
  std::weak_ptr<void> net_;
};

/// Makes `ranks` decide together about these parameters. `counts(named)`: whether this rank represents the ranks with
/// the same values. `net` expires with the policy.
template <Device D, class Communicator, class Counts>
[[gnu::cold]] void decide_together(const std::vector<nn::NamedParameter<D>>& parameters, Communicator& ranks,
                                   const std::weak_ptr<void>& net, const Counts& counts) {
  if (ranks.size() == 1) return;
  const auto all = std::make_shared<CommunicatorRanks<Communicator>>(ranks, net);
  for (const auto& named : parameters) named.parameter->set_ranks(all, counts(named));
}

}  // namespace chorus::detail
