/// Times one training step of the reference models under DistributedDataParallel: ddp_step --ranks N [CASE ...]
/// One line a case: ranks, global batch (the same for any number of ranks), median step in ms, global samples per second.
/// First with one rank alone, then with N, so that their ratio is the scaling.

#include <cstdlib>
#include <cstring>

#include "cases.hpp"

namespace ch = chorus;

namespace {

struct AnyNet {
  static constexpr bool distributed = true;
};

int measure(int argc, char** argv, std::optional<int> ranks, const std::vector<std::string_view>& wanted) {
  bool known = true;
  const int status = ch::launch<AnyNet>(argc, argv, {.devices = ranks, .seed = 0, .timeout = {}}, [&](ch::Run& run) {
    known = bench::for_each_case(wanted, [&](const char* name, auto make, const auto& images, const auto& targets, auto make_optimizer) {
      using Model = decltype(make());
      ch::DistributedDataParallel<Model> net{make(), run};
      const auto batch = images.size(0);
      const auto begin = ch::detail::share_begin(batch, static_cast<std::size_t>(net.devices()), static_cast<std::size_t>(run.rank()));
      const auto end = ch::detail::share_begin(batch, static_cast<std::size_t>(net.devices()), static_cast<std::size_t>(run.rank()) + 1);
      const auto optimizer = make_optimizer(net.parameters());
      const auto step = bench::make_step(net, *optimizer, images.slice(0, begin, end),
                                         targets.slice(0, begin * targets.numel() / batch, end * targets.numel() / batch));
      // Every rank makes the same number of steps: a fixed number, not a time.
      const double ms = bench::median_ms(step, std::string_view(name).starts_with("resnet") ? 8 : 100, 1e9);
      if (run.is_main()) {
        std::printf("ddp %s ranks=%d global_batch=%ld median_ms=%.3f samples_per_s=%.0f\n", name, net.devices(), static_cast<long>(batch), ms, static_cast<double>(batch) / ms * 1e3);
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
    std::fprintf(stderr, "usage: ddp_step --ranks N [CASE ...]; N is from 1 to %d\n", ch::comm::max_ranks);
    return 2;
  }
  // A process that is a rank already comes here again, and measures what it was started for.
  if (std::getenv("WORLD_SIZE") != nullptr) return measure(argc, argv, std::nullopt, wanted);
  if (ranks > 1) {
    if (const int status = measure(argc, argv, 1, wanted); status != 0) return status;
  }
  return measure(argc, argv, ranks, wanted);
}
