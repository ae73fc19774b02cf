// One of two ranks over a link whose rate is known: DistributedDataParallel's step over TCP as it is, and simulated.
// Alpha and beta of the link are fitted from all-reduces of two sizes; times of computing are those of a step in which
// nothing is sent. Where computing is to take as long as sending, ranks sleep for most of it: on two cores their
// threads that send would take time from those that compute, which the simulation does not know. Rank 0 prints what was
// measured and what was simulated; its status is 1 where they differ by more than a tenth.

#include <algorithm>
#include <chorus/launch/launch.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/training.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

namespace ch = chorus;
namespace cs = chorus::comm::simulated;
using namespace std::chrono_literals;

namespace {

struct TwoRanks {
  static constexpr bool distributed = true;
  static constexpr const char* name = "ddp";
};

/// Four layers of 1 MiB of weights each.
struct Model : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc1{512, 512}, fc2{512, 512}, fc3{512, 512}, fc4{512, 512};
  CHORUS_MODULE(Model, fc1, fc2, fc3, fc4)
  auto forward(const auto& x) const { return fc4(tanh(fc3(tanh(fc2(tanh(fc1(x))))))); }
};
constexpr double cap_mb = 1.01;

using Steady = std::chrono::steady_clock;
double since(Steady::time_point begin) { return std::chrono::duration<double>(Steady::now() - begin).count(); }

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

/// Seconds of an all-reduce, the median of several.
double reduce_time(ch::comm::AnyCommunicator& c, std::size_t bytes, int rounds) {
  std::vector<float> x(bytes / sizeof(float), 1);
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    c.barrier();
    const auto begin = Steady::now();
    c.all_reduce(std::span(x), ch::comm::ReduceOp::max);
    times.push_back(since(begin));
  }
  return median(times);
}

cs::Links link(double alpha, double bandwidth) {
  return {.name = "fitted", .inside = {alpha, bandwidth}, .between = {alpha, bandwidth}};
}
double simulated_reduce(const cs::Links& links, std::size_t bytes) {
  return cs::simulate({.ranks = 2, .links = links, .true_numbers = false},
                      [&](cs::SimulatedRank& rank) { rank.call(ch::comm::Op::all_reduce, bytes); })
      .seconds();
}
/// The link for which two sizes take these times: a secant step or two, for times are nearly linear in both.
cs::Links fitted(std::size_t small, double small_time, std::size_t large, double large_time) {
  double alpha = 100e-6, bandwidth = 12.5e6;
  for (int round = 0; round < 30; ++round) {
    bandwidth *= simulated_reduce(link(alpha, bandwidth), large) / large_time;
    const double off = small_time - simulated_reduce(link(alpha, bandwidth), small);
    alpha = std::max(0.0, alpha + off / 2);
  }
  return link(alpha, bandwidth);
}

/// Steps in which each layer's gradient takes `pause` longer than its numbers; where `training` is given, nothing is
/// sent, and it is told the times of the last one's parts.
double step_time(ch::comm::AnyCommunicator& c, std::chrono::milliseconds pause, int steps,
                 ch::simulated::Training* training = nullptr) {
  ch::DistributedDataParallel net(Model(), c, {.first_bucket_cap_mb = cap_mb, .bucket_cap_mb = cap_mb}, 1);
  const auto x = ch::Tensor<float, 2>::ones({64, 512});
  const auto& model = net.module();
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0}};
  Steady::time_point backward;
  std::vector<std::vector<double>> arrived(4);
  const ch::nn::Linear<ch::Cpu>* const layers[] = {&model.fc4, &model.fc3, &model.fc2, &model.fc1};
  for (std::size_t i = 0; i < 4; ++i)
    layers[i]->weight.register_hook([&, i](const auto& gradient) {
      std::this_thread::sleep_for(pause);
      arrived[i].push_back(since(backward));
      return gradient;
    });
  std::vector<double> all, forwards, backwards;
  for (int step = 0; step < steps + 2; ++step) {
    optimizer.zero_grad();
    c.barrier();
    const auto begin = Steady::now();
    const auto loss = sum(net(x));
    forwards.push_back(since(begin));
    backward = Steady::now();
    loss.backward();
    backwards.push_back(since(backward));
    if (step >= 2) all.push_back(since(begin));  // the first ones touch memory and learn the order of gradients
  }
  if (training != nullptr) {
    training->forward = median(forwards);
    training->backward = median(backwards);
    const auto bytes = net.bucket_bytes();
    ch::check<ch::UsageError>(bytes.size() == 4, "expected 4 buckets, got ", bytes.size());
    for (std::size_t i = 0; i < 4; ++i)
      training->buckets.push_back({std::min(median(arrived[i]), training->backward), bytes[i]});
  }
  return median(all);
}

int body(ch::Run& run) {
  auto& c = run.communicator();
  bool right = true;
  const auto compare = [&](const char* what, double measured, double simulated) {
    const double error = simulated / measured - 1;
    right = right && std::abs(error) <= 0.1;
    if (run.rank() == 0)
      std::printf("%-40s measured %8.2f ms, simulated %8.2f ms: %+.1f %%\n", what, measured * 1e3, simulated * 1e3,
                  error * 100);
  };
  constexpr std::size_t small = 256 << 10, large = 4 << 20;
  reduce_time(c, large, 1);
  const double small_time = reduce_time(c, small, 9), large_time = reduce_time(c, large, 5);
  const auto links = fitted(small, small_time, large, large_time);
  if (run.rank() == 0)
    std::printf("fitted from all-reduces of 256 KiB and 4 MiB: alpha %.0f us, %.2f MB/s (%.1f Mbit/s)\n",
                links.between.alpha * 1e6, links.between.bandwidth * 1e-6, links.between.bandwidth * 8e-6);
  // What a link's token bucket has saved while nothing was sent, 32 KiB here, counts for little in these.
  for (const std::size_t bytes : {std::size_t{1} << 20, std::size_t{2} << 20})
    compare(ch::cat("all-reduce of ", bytes >> 10, " KiB").c_str(), reduce_time(c, bytes, 5),
            simulated_reduce(links, bytes));

  for (const std::chrono::milliseconds pause : {0ms, 60ms}) {
    ch::comm::AnyCommunicator alone;
    ch::simulated::Training training;
    step_time(alone, pause, 5, &training);
    const double measured = step_time(c, pause, 7);
    const double simulated = ch::simulated::simulate_training({.ranks = 2, .links = links}, training, 1).step;
    if (run.rank() == 0)
      std::printf("computing alone: forward %.1f ms, backward %.1f ms\n", training.forward * 1e3,
                  training.backward * 1e3);
    compare(ch::cat("DistributedDataParallel, layers of ", pause.count(), " ms").c_str(), measured, simulated);
  }
  std::fflush(stdout);
  return right || run.rank() != 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return ch::launch<TwoRanks>(argc, argv, [](ch::Run& run) { return body(run); });
}
