/// huggingface/transformers#608: "when using multiple GPUs, loss.mean() may have subtle bias": a batch of 13 is shares of
/// 7 and 6, and each share's mean counts the same.
#include "bug.hpp"

namespace {
using namespace bug;

/// The mean gradient of the rank's share of the batch.
Numbers backward(const Linear& net, std::uint64_t seed, int begin, int end) {
  Numbers gradient(3);
  for (int i = begin; i < end; ++i) net.add_gradient(sample(seed, i), gradient, 1.0 / (end - begin));
  return gradient;
}

/// DistributedDataParallel's mean.
void average(Rank& rank, Numbers& gradient) {
  for (auto& g : gradient) g /= rank.size();
  rank.sum(gradient);
}

double train(Rank& rank, const Case& with) {
  Linear net;
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  for (int step = 0; step < with.steps; ++step) {
    auto gradient = backward(net, with.seed, begin, end);
    average(rank, gradient);
    net.step(gradient, 0.5);
  }
  return net.loss(with.seed, with.samples);
}

const Program program(3, train);
}  // namespace
