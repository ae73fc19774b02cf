/// Times one training step of the reference models under DistributedDataParallel: ddp_step --ranks N [CASE ...]
/// One line a case: ranks, global batch (the same for any number of ranks), median step in ms, global samples per
/// second. First with one rank alone, then with N, so that their ratio is the scaling. With --sharded, each rank steps
/// its part of the parameters alone (ShardedOptimizer); --bucket-cap-mb X cuts other buckets. ddp_step --wrapper
/// [CASE ...]: what DistributedDataParallel itself costs on one rank: steps of SingleDevice and of
/// DistributedDataParallel in turn, their medians, and the median ratio of neighbours.

#include <chorus/parallel/sharded_optimizer.hpp>

#include "ranks.hpp"

namespace ch = chorus;

namespace {

int measure(int argc, char** argv, std::optional<int> ranks, const bench::RanksAndCases& asked) {
  return bench::on_ranks(
      argc, argv, ranks, asked.wanted,
      [sharded = asked.sharded, cap = asked.bucket_cap_mb](ch::Run& run, const char* name, const auto& make,
                                                           const auto& images, const auto& targets,
                                                           const auto& make_optimizer) {
        ch::DistributedDataParallel<decltype(make())> net{make(), run, {.bucket_cap_mb = cap}};
        const auto time = [&](auto&& optimizer) {
          return bench::share_ms(net, optimizer, run.rank(), images, targets, bench::fixed_steps(name));
        };
        using Optimizer = typename std::remove_cvref_t<decltype(make_optimizer)>::type;
        const double ms = sharded ? time(ch::ShardedOptimizer<Optimizer>(net, make_optimizer.options))
                                  : time(*make_optimizer(net.parameters()));
        if (!run.is_main()) return;
        const auto batch = images.size(0);
        std::printf("ddp %s ranks=%d global_batch=%ld median_ms=%.3f samples_per_s=%.0f\n", name, net.devices(),
                    static_cast<long>(batch), ms, static_cast<double>(batch) / ms * 1e3);
        std::fflush(stdout);
      });
}

using Clock = std::chrono::steady_clock;

/// Milliseconds of the second of two steps: the first one brings its net's memory back into the caches.
template <class Step>
double second_ms(const Step& step) {
  step();
  const auto start = Clock::now();
  step();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers[numbers.size() / 2];
}

int measure_wrapper(const std::vector<std::string_view>& wanted) {
  const bool known = bench::for_each_case(wanted, [](const char* name, const auto& make, const auto& images,
                                                     const auto& targets, const auto& make_optimizer) {
    ch::comm::AnyCommunicator alone;
    ch::SingleDevice<decltype(make())> plain{make()};
    ch::DistributedDataParallel<decltype(make())> wrapped{make(), alone};
    const auto plain_optimizer = make_optimizer(plain.parameters()), optimizer = make_optimizer(wrapped.parameters());
    const auto one = bench::make_step(plain, *plain_optimizer, images, targets),
               other = bench::make_step(wrapped, *optimizer, images, targets);
    std::vector<double> plain_ms, wrapped_ms, ratios;
    const auto start = Clock::now();
    // Which one comes first changes from round to round.
    for (std::size_t i = 0; i < 301 && (i < 5 || Clock::now() - start < std::chrono::seconds(12)); ++i) {
      double a = 0, b = 0;
      if (i % 2 == 0) a = second_ms(one);
      b = second_ms(other);
      if (i % 2 != 0) a = second_ms(one);
      if (i == 0) continue;
      plain_ms.push_back(a);
      wrapped_ms.push_back(b);
      ratios.push_back(b / a);
    }
    std::printf("wrapper %s plain_ms=%.3f ddp_ms=%.3f ratio=%.4f\n", name, median(plain_ms), median(wrapped_ms),
                median(ratios));
    std::fflush(stdout);
  });
  return known ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = bench::ranks_and_cases("ddp_step", argc, argv);
  if (!asked) return 2;
  if (asked->wrapper) return measure_wrapper(asked->wanted);
  // A process that is a rank already comes here again, and measures what it was started for.
  if (std::getenv("WORLD_SIZE") != nullptr) return measure(argc, argv, std::nullopt, *asked);
  if (asked->ranks > 1) {
    if (const int status = measure(argc, argv, 1, *asked); status != 0) return status;
  }
  return measure(argc, argv, asked->ranks, *asked);
}
