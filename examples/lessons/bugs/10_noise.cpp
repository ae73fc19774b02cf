/// huggingface/transformers#37932: "Different DataLoader worker share the same seed and lost randomness": all ranks add
/// the same noise to their samples.
#include "bug.hpp"

namespace {
using namespace bug;

/// Augments samples by noise.
struct Augment {
  std::uint64_t seed;
  Sample operator()(Sample s, int i) const {
    const auto at = static_cast<std::uint64_t>(2 * i);
    s.x[0] += uniform(seed, at) - 0.5;
    s.x[1] += uniform(seed, at + 1) - 0.5;
    return s;
  }
};

/// A rank's samples: those of its share of the whole set.
struct Loader {
  std::uint64_t seed;
  int begin, end;
  Augment augment;

  std::vector<Sample> load() const {
    std::vector<Sample> samples;
    for (int i = 0; i < end - begin; ++i) samples.push_back(augment(sample(seed, begin + i), i));
    return samples;
  }
};

double train(Rank& rank, const Case& with) {
  Linear net;
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  for (int step = 0; step < with.steps; ++step) {
    const Loader loader{with.seed, begin, end, {with.seed + 1000 + static_cast<std::uint64_t>(step)}};
    Numbers gradient(3);
    for (const auto& s : loader.load()) net.add_gradient(s, gradient, 1.0 / with.samples);
    rank.sum(gradient);
    net.step(gradient, 0.5);
  }
  return net.loss(with.seed, with.samples);
}

const Program program(10, train);
}  // namespace
