/// How much of DistributedDataParallel's communication is hidden behind backward: overlap --ranks N [CASE ...]
/// One line a case, of means over its steps: backward until its last gradient; the buckets' collectives, each from its
/// start to its end, with waits for the other rank; the part of that time in which backward's own thread had
/// communication to do or to wait for; and the share that was hidden. Then the median step as it is and without any
/// communication, and the all-reduces of such buckets alone. Where ranks compute on all cores, a hidden collective
/// still takes processor time from backward: the two steps tell how much. CHORUS_BACKEND=tcp sends over TCP;
/// --bucket-cap-mb X cuts smaller buckets.

#include <numeric>

#include "ranks.hpp"

namespace ch = chorus;

namespace {

struct Measured {
  double ms = 0;  ///< median step
  ch::DdpTimes times;
  std::vector<std::size_t> buckets;  ///< bytes
};

/// Steps of a net with this hook.
template <class Hook, class Make, class Images, class MakeOptimizer>
Measured measure(ch::Run& run, const Make& make, const Images& images, const ch::Tensor<std::int64_t, 1>& targets,
                 const MakeOptimizer& make_optimizer, std::size_t steps, double cap) {
  ch::DistributedDataParallel<decltype(make()), Hook> net{make(), run, {.bucket_cap_mb = cap}};
  const auto optimizer = make_optimizer(net.parameters());
  bench::share_ms(net, *optimizer, run.rank(), images, targets, 1);
  net.reset_logging_data();
  const double ms = bench::share_ms(net, *optimizer, run.rank(), images, targets, steps);
  return {ms, net.logging_data().avg, net.bucket_bytes()};
}

/// The all-reduces of such buckets, one after the other, with nothing else to do, in memory as DDP's gradients have it.
double communication_ms(ch::Run& run, const std::vector<std::size_t>& buckets, std::size_t steps) {
  const auto bytes = std::accumulate(buckets.begin(), buckets.end(), std::size_t{0});
  std::vector<float> own;
  const auto lent = run.communicator().allocate(bytes);
  if (!lent) own.resize(bytes / sizeof(float));
  auto* const data = lent ? reinterpret_cast<float*>(lent.get()) : own.data();
  return bench::median_ms(
      [&] {
        std::size_t begin = 0;
        for (const auto bucket : buckets) {
          const std::span<float> gradients(data + begin / sizeof(float), bucket / sizeof(float));
          run.communicator().all_reduce(gradients, ch::comm::ReduceOp::sum, {.scale = 0.5});
          begin += bucket;
        }
      },
      steps, 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = bench::ranks_and_cases("overlap", argc, argv);
  if (!asked) return 2;
  const auto ranks = std::getenv("WORLD_SIZE") != nullptr ? std::nullopt : std::optional(asked->ranks);
  const double cap = asked->bucket_cap_mb.value_or(ch::default_bucket_cap_mb<ch::Cpu>);
  return bench::on_ranks(
      argc, argv, ranks, asked->wanted,
      [cap](ch::Run& run, const char* name, const auto& make, const auto& images, const auto& targets,
            const auto& make_optimizer) {
        const std::size_t steps = bench::fixed_steps(name);
        const auto full = measure<ch::AllReduce>(run, make, images, targets, make_optimizer, steps, cap);
        const auto quiet = measure<ch::NoCommunication>(run, make, images, targets, make_optimizer, steps, cap);
        const double alone = communication_ms(run, full.buckets, steps);
        if (!run.is_main()) return;
        std::printf(
            "overlap %s ranks=%d buckets=%zu backward_ms=%.3f communication_ms=%.3f exposed_ms=%.3f hidden=%.0f%% "
            "step_ms=%.3f without_ms=%.3f all_reduce_alone_ms=%.3f\n",
            name, run.world_size(), full.buckets.size(), 1e3 * full.times.backward_compute_time,
            1e3 * full.times.bucket_comm_time, 1e3 * full.times.exposed_comm_time, 100 * full.times.hidden(), full.ms,
            quiet.ms, alone);
        std::fflush(stdout);
      });
}
