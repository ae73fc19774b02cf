/// pytorch/pytorch#36382: "Fixing SyncBN dgrad": ranks may have batches of different sizes, and the backward pass of
/// SyncBatchNorm does not know it.
#include "bug.hpp"

namespace {
using namespace bug;

/// Normalizes by mean and variance of all ranks' samples.
struct SyncBatchNorm {
  double mean = 0, deviation = 1;

  Numbers forward(Rank& rank, const Numbers& z) {
    Numbers sums = {static_cast<double>(z.size()), 0, 0};
    for (const double one : z) sums[1] += one, sums[2] += one * one;
    rank.sum(sums);
    mean = sums[1] / sums[0];
    deviation = std::sqrt(sums[2] / sums[0] - mean * mean + 1e-5);
    Numbers out;
    for (const double one : z) out.push_back((one - mean) / deviation);
    return out;
  }
  /// The gradient by z, of dy, which is the one by what forward returned, `normal`.
  Numbers backward(Rank& rank, const Numbers& normal, const Numbers& dy) const {
    Numbers means(2);  // of dy, and of dy * normal
    for (std::size_t i = 0; i < dy.size(); ++i) {
      means[0] += dy[i] / static_cast<double>(dy.size());
      means[1] += dy[i] * normal[i] / static_cast<double>(dy.size());
    }
    rank.sum(means);
    for (auto& one : means) one /= rank.size();
    Numbers dz;
    for (std::size_t i = 0; i < dy.size(); ++i) dz.push_back((dy[i] - means[0] - normal[i] * means[1]) / deviation);
    return dz;
  }
};

double train(Rank& rank, const Case& with) {
  Numbers w = {0.3, 0.7};
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  double loss = 0;
  for (int step = 0; step < with.steps; ++step) {
    SyncBatchNorm norm;
    Numbers z, dy, gradient(3);
    for (int i = begin; i < end; ++i) {
      const auto s = sample(with.seed, i);
      z.push_back(w[0] * s.x[0] + w[1] * s.x[1]);
    }
    const auto normal = norm.forward(rank, z);
    for (int i = begin; i < end; ++i) dy.push_back((normal[dy.size()] - sample(with.seed, i).y) / with.samples);
    const auto dz = norm.backward(rank, normal, dy);
    for (std::size_t i = 0; i < dz.size(); ++i) {
      const auto s = sample(with.seed, begin + static_cast<int>(i));
      gradient[0] += dz[i] * s.x[0], gradient[1] += dz[i] * s.x[1];
      gradient[2] += std::pow(normal[i] - s.y, 2) / with.samples;
    }
    rank.sum(gradient);
    w[0] -= 0.3 * gradient[0], w[1] -= 0.3 * gradient[1];
    loss = gradient[2];
  }
  return loss;
}

const Program program(5, train);
}  // namespace
