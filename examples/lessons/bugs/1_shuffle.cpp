/// pytorch/pytorch#31771: "DistributedSampler can't shuffle the dataset": each epoch takes the samples in the same order.
#include "bug.hpp"

namespace {
using namespace bug;

/// A permutation of n numbers.
std::vector<int> shuffled(int n, std::uint64_t seed) {
  std::vector<int> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (int i = n - 1; i > 0; --i)
    std::swap(order[static_cast<std::size_t>(i)],
              order[static_cast<std::size_t>(uniform(seed, static_cast<std::uint64_t>(i)) * (i + 1))]);
  return order;
}

/// One device's: a new order whenever it is asked.
struct RandomSampler {
  std::uint64_t seed;
  int asked = 0;
  std::vector<int> order(int n) { return shuffled(n, seed + static_cast<std::uint64_t>(asked++)); }
};

/// A rank's: all ranks know the whole order, and each takes every size-th sample of it.
struct DistributedSampler {
  std::uint64_t seed;
  int epoch = 0;
  void set_epoch(int number) { epoch = number; }
  std::vector<int> order(int n, int rank, int size) const {
    const auto all = shuffled(n, seed + static_cast<std::uint64_t>(epoch));
    std::vector<int> mine;
    for (int i = rank; i < n; i += size) mine.push_back(all[static_cast<std::size_t>(i)]);
    return mine;
  }
};

double train(Rank& rank, const Case& with) {
  Linear net;
  RandomSampler alone{with.seed};
  DistributedSampler shared{with.seed};
  for (int epoch = 0; epoch < with.steps; ++epoch) {
    const auto order =
        rank.size() == 1 ? alone.order(with.samples) : shared.order(with.samples, rank.rank(), rank.size());
    constexpr std::size_t batch = 4;  // of all ranks
    const auto each = batch / static_cast<std::size_t>(rank.size());
    for (std::size_t at = 0; at < order.size(); at += each) {
      Numbers gradient(3);
      for (std::size_t i = at; i < std::min(at + each, order.size()); ++i)
        net.add_gradient(sample(with.seed, order[i]), gradient, 1.0 / batch);
      rank.sum(gradient);
      net.step(gradient, 0.3);
    }
  }
  return net.loss(with.seed, with.samples);
}

const Program program(1, train);
}  // namespace
