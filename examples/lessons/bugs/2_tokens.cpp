/// huggingface/transformers#24725: "Sum loss instead of mean loss should be used if gradient accumulation step is larger
/// than 1": sequences differ in length, and a mean of means is not the mean.
#include "bug.hpp"

namespace {
using namespace bug;

/// A sequence has 1 to 12 tokens; each is a sample of the toy.
int tokens(std::uint64_t seed, int sequence) {
  return 1 + static_cast<int>(uniform(seed + 77, static_cast<std::uint64_t>(sequence)) * 12);
}

/// Tokens of the sequences [begin, end).
int tokens_of(std::uint64_t seed, int begin, int end) {
  int count = 0;
  for (int sequence = begin; sequence < end; ++sequence) count += tokens(seed, sequence);
  return count;
}

/// Adds the gradient of the mean loss of the sequences [begin, end).
void backward(const Linear& net, std::uint64_t seed, int begin, int end, Numbers& gradient) {
  const double weight = 1.0 / tokens_of(seed, begin, end);
  for (int sequence = begin; sequence < end; ++sequence)
    for (int token = 0; token < tokens(seed, sequence); ++token)
      net.add_gradient(sample(seed, 12 * sequence + token), gradient, weight);
}

double train(Rank& rank, const Case& with) {
  Linear net;
  // One device takes the whole batch at once; a rank accumulates micro-batches of two sequences.
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  const int micro = rank.size() == 1 ? end - begin : 2, passes = (end - begin + micro - 1) / micro;
  for (int step = 0; step < with.steps; ++step) {
    Numbers gradient(3);
    for (int at = begin; at < end; at += micro)
      backward(net, with.seed, at, std::min(at + micro, end), gradient);
    for (auto& g : gradient) g /= passes;
    rank.sum(gradient);
    for (auto& g : gradient) g /= rank.size();
    net.step(gradient, 0.5);
  }
  return net.loss(with.seed, with.samples);
}

const Program program(2, train);
}  // namespace
