/// Lesson 14: a tree beside the ring. The ring of lesson 6 sends as few bytes as possible, but in 2(N-1) rounds, and
/// each costs a latency. In a tree half of the ranks send their numbers to a neighbour, which adds them; then half of
/// the rest, until rank 0 has the sum. It comes back the same way: 2 log2 N rounds, but each carries all numbers. If a
/// message of b bytes takes alpha + b beta seconds, K bytes take 2 (N-1) (alpha + K/N beta) in a ring, and in a tree
/// 2 ceil(log2 N) (alpha + K beta). The tree is for short messages and many ranks, the ring for long ones.
///
/// The lesson fits alpha and beta to the shortest and the longest message and computes the times of others: for 16
/// simulated ranks, where both algorithms find the same network, and for these, which share cores and memory.

#include <chorus/simulate.hpp>

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Model>;
using Ranks = ch::comm::AnyCommunicator;

/// data := the sum of all ranks' `data`.
void tree_all_reduce(Ranks& ranks, std::span<float> data) {
  const int n = ranks.size(), me = ranks.rank();
  std::vector<float> other(data.size());
  int far = 1;  // ranks that are this far apart talk
  for (; far < n && me % (2 * far) == 0; far *= 2)
    if (me + far < n) {
      ranks.recv(std::span(other), me + far);
      for (std::size_t i = 0; i < data.size(); ++i) data[i] += other[i];
    }
  if (me > 0) ranks.send(data, me - far), ranks.recv(data, me - far);
  while ((far /= 2) > 0)
    if (me + far < n) ranks.send(data, me + far);
}

/// As in lesson 6, in one loop: after N-1 rounds chunks are complete. All ranks send first; a link has room for 1 MB.
void ring_all_reduce(Ranks& ranks, std::span<float> data) {
  const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  const auto chunk = [&](std::size_t i) {  // chunk i modulo n
    const std::size_t begin = data.size() * (i % n) / n, end = data.size() * (i % n + 1) / n;
    return data.subspan(begin, end - begin);
  };
  std::vector<float> received(data.size() / n + 1);
  for (std::size_t round = 0; round < 2 * (n - 1); ++round) {
    const auto mine = chunk(me + 2 * n - 2 - round), in = std::span(received).first(mine.size());
    ranks.send(chunk(me + 2 * n - 1 - round), static_cast<int>((me + 1) % n));
    ranks.recv(in, static_cast<int>((me + n - 1) % n));
    for (std::size_t i = 0; i < in.size(); ++i) mine[i] = in[i] + (round < n - 1 ? mine[i] : 0);
  }
}

/// How long `f` takes on the slowest rank, in us: the mean of 5.
double time_of(Ranks& ranks, const auto& f) {
  ranks.barrier();
  const auto begin = ranks.time();  // in a simulation, virtual
  for (int i = 0; i < 5; ++i) f();
  double us = std::chrono::duration<double, std::micro>(ranks.time() - begin).count() / 5;
  ranks.all_reduce(std::span(&us, 1), ch::comm::ReduceOp::max);
  return us;
}

void report(Ranks& ranks, const char* which) {
  constexpr double bytes[] = {4, 4096, 65536, 1048576};
  const double n = ranks.size(), rounds[] = {2 * (n - 1), 2 * std::ceil(std::log2(n))}, parts[] = {n, 1};
  double times[3][4], alpha[2], beta[2];  // of ring and tree; times also of the library
  for (std::size_t c = 4; c-- > 0;) {
    std::vector<float> data(static_cast<std::size_t>(bytes[c] / 4));
    times[0][c] = time_of(ranks, [&] { ring_all_reduce(ranks, data); });
    times[1][c] = time_of(ranks, [&] { tree_all_reduce(ranks, data); });
    times[2][c] = time_of(ranks, [&] { ranks.all_reduce(std::span(data)); });
  }
  if (ranks.rank() != 0) return;
  for (std::size_t a = 0; a < 2; ++a) {
    alpha[a] = times[a][0] / rounds[a];
    beta[a] = (times[a][3] - times[a][0]) / rounds[a] / (bytes[3] / parts[a]);
    std::printf("%g %s, %s: alpha %.1f us, 1 / beta %.0f MB/s\n", n, which, a == 0 ? "ring" : "tree", alpha[a],
                1 / beta[a]);
  }
  std::printf("   bytes   ring us  formula   tree us  formula  library us\n");
  for (std::size_t c = 0; c < 4; ++c) {
    const auto formula = [&](int a) { return rounds[a] * (alpha[a] + bytes[c] / parts[a] * beta[a]); };
    std::printf("%8.0f %9.1f %8.1f %9.1f %8.1f %11.1f\n", bytes[c], times[0][c], formula(0), times[1][c], formula(1),
                times[2][c]);
  }
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    const ch::comm::simulated::SimulationOptions network{.ranks = 16,
                                                         .links = ch::comm::simulated::links_named("10gbit")};
    if (run.is_main()) simulate(network, [](auto& rank) { report(rank.communicator(), "simulated ranks"); });
    if (ranks.size() > 1) report(ranks, "ranks of this machine");

    Data data{run.seed(), ranks.rank(), ranks.size()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end
    train_by_hand(run, data, model, [&](std::span<float> numbers) { tree_all_reduce(ranks, numbers); });
    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, policy_optimizer, 10 * tolerance(ranks.size()));  // see lesson 6
  });
}
