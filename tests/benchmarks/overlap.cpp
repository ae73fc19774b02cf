/// How much of DistributedDataParallel's communication is hidden behind backward: overlap --ranks N [CASE ...]
/// One line a case: the median step as it is, the same without communication, the buckets' all-reduces alone, and the
/// share of their time by which the step did not get longer. Hiding needs cores that the ranks don't compute on.

#include <cstdlib>
#include <cstring>

#include "cases.hpp"

namespace ch = chorus;

namespace {

struct AnyNet {
  static constexpr bool distributed = true;
};

/// The median step of a net with this hook, and its buckets' sizes.
template <class Hook, class Make, class Images, class MakeOptimizer>
std::pair<double, std::vector<std::size_t>> step_ms(ch::Run& run, const Make& make, const Images& images,
                                                    const ch::Tensor<std::int64_t, 1>& targets,
                                                    const MakeOptimizer& make_optimizer, std::size_t steps) {
  ch::DistributedDataParallel<decltype(make()), Hook> net{make(), run};
  const auto ranks = static_cast<std::size_t>(net.devices()), rank = static_cast<std::size_t>(run.rank());
  const auto batch = images.size(0), rows = targets.numel() / batch;
  const auto begin = ch::detail::share_begin(batch, ranks, rank), end = ch::detail::share_begin(batch, ranks, rank + 1);
  const auto optimizer = make_optimizer(net.parameters());
  const auto step =
      bench::make_step(net, *optimizer, images.slice(0, begin, end), targets.slice(0, begin * rows, end * rows));
  const double ms = bench::median_ms(step, steps, 1e9);
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

int measure(int argc, char** argv, std::optional<int> ranks, const std::vector<std::string_view>& wanted) {
  bool known = true;
  const int status = ch::launch<AnyNet>(argc, argv, {.devices = ranks, .seed = 0, .timeout = {}}, [&](ch::Run& run) {
    known = bench::for_each_case(
        wanted, [&](const char* name, auto make, const auto& images, const auto& targets, auto make_optimizer) {
          // Every rank makes the same number of steps: a fixed number, not a time.
          const std::size_t steps = std::string_view(name).starts_with("resnet") ? 8 : 100;
          const auto [full, buckets] = step_ms<ch::AllReduce>(run, make, images, targets, make_optimizer, steps);
          const double compute = step_ms<ch::NoCommunication>(run, make, images, targets, make_optimizer, steps).first;
          const double communication = communication_ms(run, buckets, steps);
          if (run.is_main()) {
            const double hidden = communication > 0 ? std::clamp(1 - (full - compute) / communication, 0.0, 1.0) : 1;
            std::printf(
                "overlap %s ranks=%d buckets=%zu step_ms=%.3f compute_ms=%.3f communication_ms=%.3f hidden=%.0f%%\n",
                name, run.world_size(), buckets.size(), full, compute, communication, 100 * hidden);
            std::fflush(stdout);
          }
        });
  });
  return known ? status : 2;
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 2;
  std::vector<std::string_view> wanted;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc)
      ranks = std::atoi(argv[++i]);
    else
      wanted.emplace_back(argv[i]);
  }
  if (ranks < 1 || ranks > ch::comm::max_ranks) {
    std::fprintf(stderr, "usage: overlap --ranks N [CASE ...]; N is from 1 to %d\n", ch::comm::max_ranks);
    return 2;
  }
  return measure(argc, argv, std::getenv("WORLD_SIZE") != nullptr ? std::nullopt : std::optional(ranks), wanted);
}
