/// Times one training step of the reference models: train_step THREADS [--devices] [CASE ...]
/// One line a case: name, threads, median step in ms, samples per second, the process's peak resident size so far. A
/// step is zero_grad, forward, cross entropy, backward, optimizer step, on one fixed random batch, in float. Operations
/// share their work out over the threads; with --devices, DataParallel has one device for each thread instead.

#include <sys/resource.h>

#include <chorus/core/threads.hpp>
#include <cstdlib>

#include "cases.hpp"

namespace ch = chorus;

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1 || threads > 64) {
    std::fprintf(stderr, "usage: train_step THREADS [--devices] [CASE ...]; THREADS is from 1 to 64\n");
    return 2;
  }
  const bool devices = argc > 2 && std::string_view(argv[2]) == "--devices";
  const std::vector<std::string_view> wanted(argv + std::min(argc, devices ? 3 : 2), argv + argc);
  const bool known = bench::for_each_case(
      wanted, [&](const char* name, auto make, const auto& images, const auto& targets, auto make_optimizer) {
        const auto time = [&](auto& net) {
          const auto optimizer = make_optimizer(net.parameters());
          const double ms = bench::median_ms(bench::make_step(net, *optimizer, images, targets), 300, 4);
          rusage use{};
          getrusage(RUSAGE_SELF, &use);
          std::printf("%s threads=%d median_ms=%.3f samples_per_s=%.0f peak_rss_mib=%.0f\n", name, threads, ms,
                      static_cast<double>(images.size(0)) / ms * 1e3, static_cast<double>(use.ru_maxrss) / 1024);
          std::fflush(stdout);
        };
        using Model = decltype(make());
        if (!devices) {
          ch::set_num_threads(threads);
          ch::SingleDevice<Model> net{make()};
          time(net);
        } else {
          std::vector<int> ids;
          for (int i = 0; i < threads; ++i) ids.push_back(i);
          ch::DataParallel<Model> net{make(), {.device_ids = ids}};
          time(net);
        }
      });
  return known ? 0 : 2;
}
