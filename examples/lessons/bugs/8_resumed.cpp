/// deepspeedai/DeepSpeed#564: "tracking optimizer step in cpu-adam when loading checkpoint": a run that goes on from a
/// checkpoint trains as if its moments were young.
#include "bug.hpp"

namespace {
using namespace bug;

struct Adam {
  Numbers m = Numbers(3), v = Numbers(3);
  int count = 0;

  void step(Linear& net, const Numbers& gradient) {
    constexpr double b1 = 0.9, b2 = 0.999, rate = 0.1;
    ++count;
    for (std::size_t i = 0; i < net.w.size(); ++i) {
      m[i] = b1 * m[i] + (1 - b1) * gradient[i];
      v[i] = b2 * v[i] + (1 - b2) * gradient[i] * gradient[i];
      const double corrected = m[i] / (1 - std::pow(b1, count));
      net.w[i] -= rate * corrected / (std::sqrt(v[i] / (1 - std::pow(b2, count))) + 1e-8);
    }
  }
};

using File = Numbers;
File save(const Linear& net, const Adam& adam) {
  File file;
  for (const auto* part : {&net.w, &adam.m, &adam.v}) file.insert(file.end(), part->begin(), part->end());
  return file;
}
void load(const File& file, Linear& net, Adam& adam) {
  auto from = file.begin();
  for (auto* part : {&net.w, &adam.m, &adam.v})
    for (auto& number : *part) number = *from++;
}

double train(Rank& rank, const Case& with) {
  Linear net;
  Adam adam;
  const auto [begin, end] = share(with.samples, rank.rank(), rank.size());
  for (int step = 0; step < with.steps; ++step) {
    if (with.interrupted > 0 && step == with.interrupted) {
      const auto file = save(net, adam);
      net = {}, adam = {};  // another process
      load(file, net, adam);
    }
    Numbers gradient(3);
    for (int i = begin; i < end; ++i) net.add_gradient(sample(with.seed, i), gradient, 1.0 / with.samples);
    rank.sum(gradient);
    adam.step(net, gradient);
  }
  return net.loss(with.seed, with.samples);
}

const Program program(8, train);
}  // namespace
