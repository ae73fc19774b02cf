/// How much of DistributedDataParallel's communication is hidden behind backward: overlap --ranks N [CASE ...]
/// One line a case: the median step as it is, the same without communication, the buckets' all-reduces alone, and the
/// share of their time by which the step did not get longer. Hiding needs cores that the ranks don't compute on.

#include "ranks.hpp"

namespace ch = chorus;

namespace {

/// The median step of a net with this hook, and its buckets' sizes.
template <class Hook, class Make, class Images, class MakeOptimizer>
std::pair<double, std::vector<std::size_t>> step_ms(ch::Run& run, const Make& make, const Images& images,
                                                    const ch::Tensor<std::int64_t, 1>& targets,
                                                    const MakeOptimizer& make_optimizer, std::size_t steps) {
  ch::DistributedDataParallel<decltype(make()), Hook> net{make(), run};
  const auto optimizer = make_optimizer(net.parameters());
  const double ms = bench::share_ms(net, *optimizer, run.rank(), images, targets, steps);
  return {ms, net.bucket_bytes()};
}

/// The all-reduces of such buckets, one after the other, with nothing else to do.
double communication_ms(ch::Run& run, const std::vector<std::size_t>& buckets, std::size_t steps) {
  std::vector<std::vector<float>> data;
  for (const auto bytes : buckets) data.emplace_back(bytes / sizeof(float));
  return bench::median_ms(
      [&] {
        for (auto& bucket : data)
          run.communicator().all_reduce(std::span<float>(bucket), ch::comm::ReduceOp::sum, {.scale = 0.5});
      },
      steps, 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = bench::ranks_and_cases("overlap", argc, argv);
  if (!asked) return 2;
  const auto ranks = std::getenv("WORLD_SIZE") != nullptr ? std::nullopt : std::optional(asked->ranks);
  return bench::on_ranks(
      argc, argv, ranks, asked->wanted,
      [](ch::Run& run, const char* name, const auto& make, const auto& images, const auto& targets,
         const auto& make_optimizer) {
        const std::size_t steps = bench::fixed_steps(name);
        const auto [full, buckets] = step_ms<ch::AllReduce>(run, make, images, targets, make_optimizer, steps);
        const double compute = step_ms<ch::NoCommunication>(run, make, images, targets, make_optimizer, steps).first;
        const double communication = communication_ms(run, buckets, steps);
        if (!run.is_main()) return;
        const double hidden = communication > 0 ? std::clamp(1 - (full - compute) / communication, 0.0, 1.0) : 1;
        std::printf(
            "overlap %s ranks=%d buckets=%zu step_ms=%.3f compute_ms=%.3f communication_ms=%.3f hidden=%.0f%%\n", name,
            run.world_size(), buckets.size(), full, compute, communication, 100 * hidden);
        std::fflush(stdout);
      });
}
