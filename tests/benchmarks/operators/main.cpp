/// Times operators, forward and backward: operators [THREADS [--seconds S] [--check] CASE ...]. Without arguments it
/// names the cases. One line a case: name, threads, the median step in microseconds, of wall and of processor time, and
/// the millions of multiply-adds of its forward pass; with --check the checksums of results and gradients instead, three
/// for each array.

#include <time.h>

#include <algorithm>
#include <chorus/core/layer_watch.hpp>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "cases.hpp"

namespace {

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}
double wall() { return seconds(CLOCK_MONOTONIC); }
double processor() { return seconds(CLOCK_PROCESS_CPUTIME_ID); }

/// The multiply-adds of forward passes, while it lives.
class Counted : public ch::detail::LayerWatch {
 public:
  Counted() { ch::detail::layer_watch = this; }
  ~Counted() override { ch::detail::layer_watch = nullptr; }
  void begins(const void*) override {}
  void ended(const std::string&) override {}
  void multiply_adds(std::int64_t count) override { all += count; }

  std::int64_t all = 0;
};

void time_case(const char* name, const Run& run, int threads, double budget) {
  run.step();
  const auto multiply_adds = [&] {
    Counted counted;
    run.step();
    return static_cast<double>(counted.all);
  }();
  const double before = wall();
  run.step();
  // Short steps are timed together.
  const int together = std::clamp(static_cast<int>(0.0003 / std::max(wall() - before, 1e-9)), 1, 10000);
  std::vector<double> walls, processors;
  const double begin = wall();
  while ((wall() - begin < budget || walls.size() < 3) && walls.size() < 3000) {
    const double w = wall(), p = processor();
    for (int i = 0; i < together; ++i) run.step();
    walls.push_back((wall() - w) / together * 1e6);
    processors.push_back((processor() - p) / together * 1e6);
  }
  std::sort(walls.begin(), walls.end());
  std::sort(processors.begin(), processors.end());
  std::printf("%s threads=%d us=%.3f processor_us=%.3f forward_mmacs=%.3f\n", name, threads, walls[walls.size() / 2],
              processors[processors.size() / 2], multiply_adds / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2)
    for (const auto& [name, make] : cases()) std::puts(name.c_str());
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1 || threads > 64) {
    std::fprintf(stderr, "usage: operators [THREADS [--seconds S] [--check] CASE ...]; THREADS is from 1 to 64\n");
    return 2;
  }
  ch::set_num_threads(threads);
  double budget = 0.3;
  bool check = false;
  for (int i = 2; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--seconds" && i + 1 < argc) {
      budget = std::atof(argv[++i]);
      continue;
    }
    if (argument == "--check") {
      check = true;
      continue;
    }
    const auto found = cases().find(argv[i]);
    if (found == cases().end()) {
      std::fprintf(stderr, "operators: no case %s\n", argv[i]);
      return 2;
    }
    const Run run = found->second();
    if (!check) {
      time_case(argv[i], run, threads, budget);
      continue;
    }
    Sums sums;
    if (run.outputs) run.outputs(sums);
    std::printf("%s", argv[i]);
    for (const Sum& sum : sums) std::printf(" %.9g %.9g %.9g", sum.a, sum.b, sum.c);
    std::puts("");
  }
}
