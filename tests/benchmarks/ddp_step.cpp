/// Times one training step of the reference models under DistributedDataParallel: ddp_step --ranks N [CASE ...]
/// One line a case: ranks, global batch (the same for any number of ranks), median step in ms, global samples per second.
/// First with one rank alone, then with N, so that their ratio is the scaling.

#include "ranks.hpp"

namespace ch = chorus;

namespace {

int measure(int argc, char** argv, std::optional<int> ranks, const std::vector<std::string_view>& wanted) {
  return bench::on_ranks(
      argc, argv, ranks, wanted,
      [](ch::Run& run, const char* name, const auto& make, const auto& images, const auto& targets,
         const auto& make_optimizer) {
        ch::DistributedDataParallel<decltype(make())> net{make(), run};
        const auto optimizer = make_optimizer(net.parameters());
        const double ms = bench::share_ms(net, *optimizer, run.rank(), images, targets, bench::fixed_steps(name));
        if (!run.is_main()) return;
        const auto batch = images.size(0);
        std::printf("ddp %s ranks=%d global_batch=%ld median_ms=%.3f samples_per_s=%.0f\n", name, net.devices(),
                    static_cast<long>(batch), ms, static_cast<double>(batch) / ms * 1e3);
        std::fflush(stdout);
      });
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = bench::ranks_and_cases("ddp_step", argc, argv);
  if (!asked) return 2;
  // A process that is a rank already comes here again, and measures what it was started for.
  if (std::getenv("WORLD_SIZE") != nullptr) return measure(argc, argv, std::nullopt, asked->wanted);
  if (asked->ranks > 1) {
    if (const int status = measure(argc, argv, 1, asked->wanted); status != 0) return status;
  }
  return measure(argc, argv, asked->ranks, asked->wanted);
}
