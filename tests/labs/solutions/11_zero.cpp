/// Lab 11: a solution, in the place of the student's file.

#include "zero.hpp"

using namespace zero_lab;

Part part(std::size_t count, int ranks, int rank) {
  const auto n = static_cast<std::size_t>(ranks), r = static_cast<std::size_t>(rank), each = (count + n - 1) / n;
  return {std::min(r * each, count), std::min((r + 1) * each, count)};
}

void step(Ranks& ranks, std::span<float> parameters, std::span<const float> gradients, Adam& adam) {
  const auto n = static_cast<std::size_t>(ranks.size()), each = (parameters.size() + n - 1) / n;
  const auto [begin, end] = part(parameters.size(), ranks.size(), ranks.rank());
  std::vector<float> all(gradients.begin(), gradients.end()), mine(each);
  all.resize(n * each);  // padding
  ranks.reduce_scatter(all, std::span(mine), ch::comm::ReduceOp::sum, {.traffic = Traffic::gradients});
  const auto own = parameters.subspan(begin, end - begin);
  adam.step(own, std::span(mine).first(own.size()));
  std::copy(own.begin(), own.end(), mine.begin());
  ranks.all_gather(mine, std::span(all), {.traffic = Traffic::parameters});
  std::copy_n(all.begin(), parameters.size(), parameters.begin());
}

int main(int argc, char** argv) { return lab::run(argc, argv, title, check, {.part = part, .step = step}); }
