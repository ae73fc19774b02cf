/// Times one training step of the reference models under DistributedDataParallel: ddp_step --ranks N [CASE ...]
/// Two lines a case: ranks, global batch (the same for any number of ranks), median step in ms, global samples per
/// second; first of one rank alone, then of N with their scaling: the median ratio of blocks of steps that alternate.
/// With --apart, two more, of what the machine allows: N ranks that have nothing to tell each other ("apart"), and the
/// same with a barrier after each step, as no averaging does without ("in_step"). With --sharded, each rank averages
/// and steps its part of the parameters alone (ReduceScatter, ShardedOptimizer); with --fused, all in the midst of
/// backward (FusedOptimizer). --bucket-cap-mb X cuts other buckets; --all-reduce NAME averages them by ring, direct, in_place or hierarchical.
/// With --canonical-shares S, of one rank and of all, on nets whose batches are cut into S shares.
/// ddp_step --wrapper --canonical-shares S [CASE ...]: what shares cost SingleDevice, measured as
/// ddp_step --wrapper [CASE ...]: what DistributedDataParallel itself costs on one rank: steps of SingleDevice and of
/// DistributedDataParallel in turn, their medians, and the median ratio of neighbours.

#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>

#include "ranks.hpp"

namespace ch = chorus;

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers[numbers.size() / 2];
}

template <class Step>
double ms_of(const Step& step) {
  const auto start = Clock::now();
  step();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// The median of some steps behind one that brings the net's memory back into the caches.
template <class Step>
double block_ms(const Step& step, std::size_t steps) {
  step();
  std::vector<double> times;
  for (std::size_t i = 0; i < steps; ++i) times.push_back(ms_of(step));
  return median(std::move(times));
}

/// Milliseconds of a case's blocks, and how much longer one rank alone took for its neighbours.
struct Blocks {
  std::vector<double> ms, scaling;

  void add(double block, double alone) {
    ms.push_back(block);
    scaling.push_back(alone / block);
  }
  void print(const char* what, const char* name, int ranks, ch::Index batch) const {
    if (ms.empty()) return;
    const double step = median(ms);
    std::printf("%s %s ranks=%d global_batch=%ld median_ms=%.3f samples_per_s=%.0f", what, name, ranks,
                static_cast<long>(batch), step, static_cast<double>(batch) / step * 1e3);
    if (ranks > 1) std::printf(" scaling=%.3f", median(scaling));
    std::printf("\n");
  }
};

/// Times blocks of steps of rank 0 alone, of all ranks, and, if asked for, of all ranks without any communication, by
/// turns. The machine is not the same from one second to the next, so what counts is the ratio of neighbours.
void measure_case(ch::Run& run, const bench::RanksAndCases& asked, const char* name, const auto& make,
                  const auto& images, const auto& targets, const auto& make_optimizer) {
  using Model = decltype(make());
  auto& communicator = run.communicator();
  ch::comm::AnyCommunicator nobody;
  ch::DistributedDataParallel<Model> alone{make(), nobody};
  ch::SingleDevice<Model> apart{make()};

  const auto batch = images.size(0);
  const auto share = bench::share_of(images, targets, run.rank(), run.world_size(), asked.canonical_shares);

  constexpr std::size_t rounds = 8;
  const std::size_t steps = std::max<std::size_t>(3, bench::fixed_steps(name) / rounds);
  Blocks of_one, of_all, of_apart, of_in_step;
  const auto apart_optimizer = make_optimizer(apart.parameters());
  const auto step_apart = bench::make_step(apart, *apart_optimizer, share.first, share.second);
  const auto measure_beside = [&](auto& net_of_one, auto& net, auto& optimizer) {
    const auto optimizer_of_one = make_optimizer(net_of_one.parameters());
    const auto step_alone = bench::make_step(net_of_one, *optimizer_of_one, images, targets);
    const auto step = bench::make_step(net, optimizer, share.first, share.second);
    for (std::size_t round = 0; round <= rounds; ++round) {
      const double one = run.is_main() ? block_ms(step_alone, steps) : 1;
      // The slowest rank's: that is how long a step takes.
      const auto block_of_all = [&](const auto& some_step) {
        communicator.barrier();
        double ms = block_ms(some_step, steps);
        communicator.all_reduce(std::span<double>(&ms, 1), ch::comm::ReduceOp::max, {});
        return ms;
      };
      const auto add = [&](Blocks& blocks, double ms) {
        if (round > 0) blocks.add(ms, one);  // the first one warms up
      };
      add(of_one, one);
      add(of_all, block_of_all(step));
      if (!asked.apart) continue;
      add(of_apart, block_of_all(step_apart));
      add(of_in_step, block_of_all([&] {
            step_apart();
            communicator.barrier();
          }));
    }
  };
  const auto measure_rounds = [&](auto& net, auto& optimizer) { measure_beside(alone, net, optimizer); };
  const ch::DistributedDataParallelOptions options{.bucket_cap_mb = asked.bucket_cap_mb};
  if (asked.canonical_shares != 0) {
    using Cut = ch::SameBits<Model>;
    ch::DistributedDataParallel<Cut> of_one_rank{Cut{make(), asked.canonical_shares}, nobody};
    ch::DistributedDataParallel<Cut> net{Cut{make(), asked.canonical_shares}, run, options};
    measure_beside(of_one_rank, net, *make_optimizer(net.parameters()));
  } else if (asked.sharded) {
    using Optimizer = typename std::remove_cvref_t<decltype(make_optimizer)>::type;
    ch::DistributedDataParallel<Model, ch::ReduceScatter> net{make(), run, options};
    ch::ShardedOptimizer<Optimizer> optimizer(net, make_optimizer.options);
    measure_rounds(net, optimizer);
  } else if (asked.fused) {
    using Optimizer = typename std::remove_cvref_t<decltype(make_optimizer)>::type;
    ch::DistributedDataParallel<Model> net{make(), run, options};
    ch::FusedOptimizer<Optimizer> optimizer(net, make_optimizer.options);
    measure_rounds(net, optimizer);
  } else {
    ch::DistributedDataParallel<Model> net{make(), run, options};
    measure_rounds(net, *make_optimizer(net.parameters()));
  }
  if (!run.is_main()) return;
  of_one.print("ddp", name, 1, batch);
  if (run.world_size() > 1) of_all.print("ddp", name, run.world_size(), batch);
  of_apart.print("apart", name, run.world_size(), batch);
  of_in_step.print("in_step", name, run.world_size(), batch);
  std::fflush(stdout);
}

int measure(int argc, char** argv, std::optional<int> ranks, const bench::RanksAndCases& asked) {
  return bench::on_ranks(argc, argv, ranks, asked.wanted,
                         [&](ch::Run& run, const auto&... of_case) { measure_case(run, asked, of_case...); },
                         asked.all_reduce);
}

/// Milliseconds of the second of two steps: the first one brings its net's memory back into the caches.
template <class Step>
double second_ms(const Step& step) {
  step();
  return ms_of(step);
}

int measure_wrapper(const bench::RanksAndCases& asked) {
  const auto by_turns = [](const char* name, const auto& make, const auto& images, const auto& targets,
                           const auto& make_optimizer, auto& wrapped, const std::string& what) {
    ch::SingleDevice<decltype(make())> plain{make()};
    const auto plain_optimizer = make_optimizer(plain.parameters()), optimizer = make_optimizer(wrapped.parameters());
    const auto one = bench::make_step(plain, *plain_optimizer, images, targets);
    const auto other = bench::make_step(wrapped, *optimizer, images, targets);
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
    std::printf("wrapper %s plain_ms=%.3f %s_ms=%.3f ratio=%.4f\n", name, median(plain_ms), what.c_str(),
                median(wrapped_ms), median(ratios));
    std::fflush(stdout);
  };
  const bool known = bench::for_each_case(asked.wanted, [&](const char* name, const auto& make, const auto&... rest) {
    using Model = decltype(make());
    if (asked.canonical_shares != 0) {
      ch::SingleDevice<ch::SameBits<Model>> net{ch::SameBits{make(), asked.canonical_shares}};
      return by_turns(name, make, rest..., net, ch::cat("in_", asked.canonical_shares, "_shares"));
    }
    ch::comm::AnyCommunicator alone;
    ch::DistributedDataParallel<Model> net{make(), alone};
    by_turns(name, make, rest..., net, "ddp");
  });
  return known ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = bench::ranks_and_cases("ddp_step", argc, argv);
  if (!asked) return 2;
  if (asked->wrapper) return measure_wrapper(*asked);
  // A process that is a rank already comes here again, and measures what it was started for.
  const bool is_rank = std::getenv("WORLD_SIZE") != nullptr;
  return measure(argc, argv, is_rank ? std::nullopt : std::optional(asked->ranks), *asked);
}
