#pragma once
/// Gradients that every rank reads where another one has computed them, so that a step averages them on its way.

#include <chorus/comm/communicator.hpp>
#include <chorus/comm/shared_window.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace chorus::detail {

/// The flat gradients of all ranks, on CPUs of one machine, and what each rank's count in the average.
class SharedGradients {
 public:
  /// Memory for a group of flat gradients that all ranks reach; null, on all ranks, where they can't. A collective.
  template <class Communicator>
  [[gnu::cold]] std::shared_ptr<void> allocate(Communicator& communicator, std::size_t bytes) {
    std::erase_if(blocks_, [](const Block& block) { return block.memory.expired(); });
    rank_ = static_cast<std::size_t>(communicator.rank());
    const auto ranks = std::make_shared<Ranks>(comm::allocate_shared(communicator, bytes));
    if (ranks->empty()) return nullptr;
    blocks_.push_back({ranks, (*ranks)[rank_].get(), bytes});
    return {ranks, blocks_.back().own};
  }
  /// Whether others reach this rank's gradient there.
  bool reached(const void* own, std::size_t bytes) const { return find(own, bytes) != nullptr; }

  /// Tells all ranks what this rank's gradients count. After it all have computed theirs. A collective.
  template <class Communicator>
  void tell_weight(Communicator& communicator, double weight) {
    weights_.resize(static_cast<std::size_t>(communicator.size()));
    communicator.all_gather(std::span<const double>(&weight, 1), std::span(weights_), {});
  }
  /// What the averages of all ranks' numbers are the sum of, where `bytes` of this rank's lie at `own`. The order is
  /// the ring's, which begins after this rank: so not all of them read the same at once.
  std::vector<kernels::GradientTerm> terms(const void* own, std::size_t bytes) const {
    const Block& block = *find(own, bytes);
    const auto ranks = block.memory.lock();
    const auto offset = static_cast<const std::byte*>(own) - block.own;
    std::vector<kernels::GradientTerm> all;
    for (std::size_t step = 1; step <= ranks->size(); ++step) {
      const auto rank = (rank_ + step) % ranks->size();
      all.push_back({(*ranks)[rank].get() + offset, weights_[rank]});
      if (rank != rank_)  // as others read as many of this rank's
        trace::sent(static_cast<int>(rank_), static_cast<int>(rank), trace::Traffic::gradients, bytes);
    }
    return all;
  }

 private:
  using Ranks = std::vector<std::shared_ptr<std::byte>>;
  struct Block {
    std::weak_ptr<const Ranks> memory;
    std::byte* own;
    std::size_t bytes;
  };
  const Block* find(const void* own, std::size_t bytes) const {
    const auto* const begin = static_cast<const std::byte*>(own);
    for (const Block& block : blocks_)
      if (!block.memory.expired() && begin >= block.own && begin + bytes <= block.own + block.bytes) return &block;
    return nullptr;
  }

  std::vector<Block> blocks_;
  std::vector<double> weights_;  // by rank
  std::size_t rank_ = 0;
};

}  // namespace chorus::detail
