/// huggingface/accelerate#226: "About the use of gather to compute metrics": a test set of 10,000 samples is scored as
/// 10,167, because each rank's last batch is full.
#include "bug.hpp"

namespace {
using namespace bug;

constexpr int batch = 4;

/// The samples of a rank's batch. Ranks take turns, and several have as many each: at the end the set begins anew.
std::vector<int> batch_of(int number, const Rank& rank, int samples) {
  std::vector<int> mine;
  const int begin = (number * rank.size() + rank.rank()) * batch;
  for (int i = begin; i < begin + batch; ++i)
    if (i < samples || rank.size() > 1) mine.push_back(i % samples);
  return mine;
}

double train(Rank& rank, const Case& with) {
  Linear net;
  net.w = {2, -1, 0.4};  // it is trained
  const int of_all = batch * rank.size();
  Numbers errors;
  for (int number = 0; number * of_all < with.samples; ++number) {
    Numbers mine;
    for (const int i : batch_of(number, rank, with.samples)) mine.push_back(std::abs(net.error(sample(with.seed, i))));
    const auto all = rank.gather(mine);
    errors.insert(errors.end(), all.begin(), all.end());
  }
  return std::accumulate(errors.begin(), errors.end(), 0.0) / static_cast<double>(errors.size());
}

const Program program(9, train);
}  // namespace
