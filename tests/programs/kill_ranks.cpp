// Kills ranks at random moments of collectives, over shared memory and TCP with 2 to 4 ranks, and stops some; checks
// that all survivors get an error that names the victim, and that nothing stays behind; prints how soon they knew.
//   kill_ranks [KILLS] [MEDIAN_MS SLOWEST_MS]     fails, too, if survivors took longer
#include <dirent.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "../unit/comm/processes.hpp"

using namespace chorus;
using namespace std::chrono_literals;

namespace {

constexpr comm::Op ops[] = {comm::Op::all_reduce, comm::Op::broadcast, comm::Op::reduce_scatter, comm::Op::all_gather,
                            comm::Op::barrier};

struct Plan {
  comm::Backend backend;
  comm::Op op;
  int ranks, victim;
  std::size_t count;
  bool async;
};

std::string describe(const Plan& plan) {
  return cat(plan.ranks, " ranks over ", plan.backend, ", ", plan.async ? "asynchronous " : "", name(plan.op), " of ",
             plan.count, ", victim ", plan.victim);
}

/// Repeats one collective until it fails: when that was, and what the error said.
std::string survive(const comm::World& world, const Plan& plan) {
  auto c = comm::connect(world, {.backend = plan.backend});
  std::vector<float> mine(plan.count), all(plan.count * static_cast<std::size_t>(world.size));
  c.barrier();
  test::Ranks::give_sign();
  try {
    while (true) {
      switch (plan.op) {
        case comm::Op::all_reduce:
          plan.async ? c.all_reduce_async(std::span(mine)).wait() : c.all_reduce(std::span(mine));
          break;
        case comm::Op::broadcast:
          plan.async ? c.broadcast_async(std::span(mine), 0).wait() : c.broadcast(std::span(mine), 0);
          break;
        case comm::Op::reduce_scatter:
          plan.async ? c.reduce_scatter_async(all, std::span(mine)).wait() : c.reduce_scatter(all, std::span(mine));
          break;
        case comm::Op::all_gather:
          plan.async ? c.all_gather_async(mine, std::span(all)).wait() : c.all_gather(mine, std::span(all));
          break;
        default:
          plan.async ? c.barrier_async().wait() : c.barrier();
      }
    }
  } catch (const CommError& error) {
    return cat(comm::Clock::now().time_since_epoch().count(), " ", error.what());
  }
}

std::set<std::string> shared_memory() {
  std::set<std::string> names;
  DIR* const folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) names.insert(entry->d_name);
  closedir(folder);
  return names;
}

/// Milliseconds until each survivor knew. Throws what is wrong.
std::vector<double> end_one(const Plan& plan, int signal, std::chrono::microseconds delay,
                            std::chrono::milliseconds timeout, std::string_view expected) {
  test::Ranks ranks(plan.ranks, [plan](const comm::World& world) { return survive(world, plan); }, timeout);
  for (int rank = 0; rank < plan.ranks; ++rank) ranks.await_sign(rank);
  std::this_thread::sleep_for(delay);
  const auto ended = comm::Clock::now();
  kill(ranks.pid(plan.victim), signal);
  std::vector<double> times;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    if (rank == plan.victim) continue;
    const auto outcome = ranks.outcome(rank);
    char* what = nullptr;
    const comm::Clock::time_point knew{comm::Clock::duration(std::strtoll(outcome.text.c_str(), &what, 10))};
    check(outcome.status == 0 && std::string_view(what).find(expected) != std::string_view::npos, "rank ", rank,
          " says: ", outcome.text);
    times.push_back(std::chrono::duration<double, std::milli>(knew - ended).count());
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  const int kills = argc > 1 ? std::atoi(argv[1]) : 100;
  const double median_limit = argc > 3 ? std::atof(argv[2]) : 1e9, slowest_limit = argc > 3 ? std::atof(argv[3]) : 1e9;
  const auto before = shared_memory();
  std::mt19937 chance(5);
  const auto pick = [&](int n) { return std::uniform_int_distribution(0, n - 1)(chance); };
  const auto plan = [&] {
    const int ranks = 2 + pick(3);
    return Plan{pick(2) ? comm::Backend::shm : comm::Backend::tcp, ops[pick(5)], ranks, pick(ranks),
                std::size_t{1} << pick(20), pick(2) == 1};
  };
  int wrong = 0;
  const auto attempt = [&](const Plan& what, auto f) {
    try {
      f();
    } catch (const std::exception& error) {
      ++wrong;
      std::printf("%s: %s\n", describe(what).c_str(), error.what());
    }
  };

  std::vector<double> times;
  for (int i = 0; i < kills; ++i) {
    const auto what = plan();
    attempt(what, [&] {
      const auto mine =
          end_one(what, SIGKILL, std::chrono::microseconds(pick(20'000)), 20s, cat("rank ", what.victim, " is lost"));
      times.insert(times.end(), mine.begin(), mine.end());
    });
  }
  const int stops = std::max(2, kills / 50);
  for (int i = 0; i < stops; ++i) {
    auto what = plan();
    if (what.op == comm::Op::broadcast) what.op = comm::Op::barrier;  // who only sends waits when all buffers are full
    attempt(what, [&] {
      for (const double time : end_one(what, SIGSTOP, std::chrono::microseconds(pick(20'000)), 500ms,
                                       cat("rank ", what.victim, ", which is stopped or busy")))
        check(time > 300 && time < 3000, "a stopped rank was noticed after ", time, " ms");
    });
  }

  std::sort(times.begin(), times.end());
  const double median = times.empty() ? 0 : times[times.size() / 2], slowest = times.empty() ? 0 : times.back();
  std::printf("%d kills, %zu survivors: median %.1f ms, 99 %% within %.1f ms, slowest %.1f ms; %d stops; %d wrong\n",
              kills, times.size(), median, times.empty() ? 0 : times[times.size() * 99 / 100], slowest, stops, wrong);
  for (const auto& name : shared_memory()) {
    if (before.contains(name) || name.find("chorus") == std::string::npos) continue;  // others come and go
    ++wrong;
    std::printf("left in /dev/shm: %s\n", name.c_str());
  }
  return wrong == 0 && median <= median_limit && slowest <= slowest_limit ? 0 : 1;
}
