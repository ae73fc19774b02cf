/// pytorch/pytorch#115710: "sharded grad scaler: copy found_inf after waiting on async reduce_all": one rank finds an
/// infinite gradient and skips its step, the others don't.
#include <limits>

#include "bug.hpp"

namespace {
using namespace bug;

/// A number as float16 would have it: of large ones only that they are infinite.
double half(double x) { return std::abs(x) > 65504 ? std::numeric_limits<double>::infinity() : x; }

struct Scaler {
  double scale = 262144;
  /// Whether this step has to be skipped: on all ranks, if one rank's part of the gradients is infinite.
  bool skips(Rank& rank, const Numbers& mine) {
    Numbers found = {0};
    for (const double g : mine)
      if (std::isinf(g)) found[0] = 1;
    const auto wait = rank.start_sum(found);
    const bool any = found[0] > 0;
    wait();
    if (any) scale /= 2;
    return any;
  }
};

double train(Rank& rank, const Case& with) {
  Linear net;
  Scaler scaler;
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  for (int step = 0; step < with.steps; ++step) {
    const double scale = scaler.scale;
    Numbers gradient(3);
    for (int i = begin; i < end; ++i) net.add_gradient(sample(with.seed, i), gradient, scale / with.samples);
    rank.sum(gradient);
    // A rank has, and steps, every size-th parameter.
    Numbers mine;
    for (auto i = static_cast<std::size_t>(rank.rank()); i < gradient.size(); i += static_cast<std::size_t>(rank.size()))
      mine.push_back(half(gradient[i]));
    if (!scaler.skips(rank, mine))
      for (std::size_t i = 0; i < mine.size(); ++i)
        net.w[static_cast<std::size_t>(rank.rank()) + i * static_cast<std::size_t>(rank.size())] -= 0.5 * mine[i] / scale;
    for (int i = 0; i < 3; ++i) rank.broadcast({&net.w[static_cast<std::size_t>(i)], 1}, i % rank.size());
  }
  return net.loss(with.seed, with.samples);
}

const Program program(6, train);
}  // namespace
