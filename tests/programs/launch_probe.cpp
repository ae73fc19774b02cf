// A program that launch_test starts as real processes: `--do WHAT` under a policy of processes, or `--single`.

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chorus/comm/store.hpp>
#include <chorus/core/random.hpp>
#include <chorus/launch/launch.hpp>
#include <chorus/parallel/elastic/processes.hpp>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <thread>

namespace ch = chorus;

struct Processes {
  static constexpr bool distributed = true;
  static constexpr const char* name = "processes";
};
struct OneProcess {
  static constexpr bool distributed = false;
  static constexpr const char* name = "one process";
};
struct OneDevice : OneProcess {
  static constexpr bool one_device = true;
};

// Says that this rank has come so far, and waits to be ended.
static void stay(ch::Run& run) {
  std::printf("ready %d %d\n", run.rank(), getpid());
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::seconds(30));
}

// Steps that outlive ranks, until 20 after a loss or a joining has left `--size` of them. The number of steps is all
// state: a newcomer gets it from the others.
static void outlive(ch::Run& run) {
  const int size = run.option("size", 0);
  ch::elastic::Processes members(run.world(), {.lost_after = std::chrono::seconds(2)});
  std::string why;
  for (long step = 0, last = LONG_MAX; step < last;) {
    run.regroup(members.regroup(why));
    std::printf("ready %d %d\n", run.rank(), getpid());
    try {
      std::array newest{step};
      run.communicator().all_reduce(std::span(newest), ch::comm::ReduceOp::max);
      step = newest[0];
      if (members.epoch > 1 && run.world_size() == size) last = step + 20;
      for (bool knocked = false; step < last && !knocked; ++step) {
        std::array sum{1L, members.knocked() ? 1L : 0L};
        run.communicator().all_reduce(std::span(sum));
        ch::check<ch::Error>(sum[0] == run.world_size(), "a sum is ", sum[0]);
        knocked = sum[1] > 0;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    } catch (const ch::CommError& error) {
      why = error.what();
    }
  }
  std::printf("done %d of %d\n", run.rank(), run.world_size());
}

static int body(ch::Run& run) {
  const std::string what = run.option("do");
  const bool chosen = run.rank() == run.option("rank", 1);
  const bool peers = what == "reduce" || what == "ring" || what == "quit" || what == "slow-end";
  if (peers) run.communicator().barrier();

  if (what == "check") {
    run.check_options();
    std::puts("training");
  } else if (what == "hello") {
    const auto& world = run.world();
    std::printf("rank %d of %d, local %d of %d, %s:%d, listens %d, devices %d, seed %lu %lu, timeout %ld, input %d\n",
                world.rank, world.size, world.local_rank, world.local_size, world.master_addr.c_str(),
                world.master_port, world.listen_fd >= 0, run.devices(), static_cast<unsigned long>(run.seed()),
                static_cast<unsigned long>(ch::initial_seed()), static_cast<long>(world.timeout.count()),
                std::getchar());
  } else if (what == "device") {
    std::printf("rank %d of %d computes on %d\n", run.rank(), run.devices(), ch::Cpu{}.index);
  } else if (what == "cores") {
    cpu_set_t cores;
    sched_getaffinity(0, sizeof cores, &cores);
    std::string text = "rank " + std::to_string(run.rank()) + " has";
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &cores)) text += " " + std::to_string(core);
    std::puts(text.c_str());
  } else if (what == "outlive") {
    outlive(run);
  } else if (what == "stay") {
    stay(run);
  } else if (what == "stubborn") {
    signal(SIGTERM, SIG_IGN);
    stay(run);
  } else if (what == "heed") {
    static volatile std::sig_atomic_t heard = 0;
    signal(SIGUSR1, [](int number) { heard = number; });
    std::printf("ready %d %d\n", run.rank(), getpid());
    for (int i = 0; i < 3000 && heard == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::printf("rank %d has heard %d\n", run.rank(), static_cast<int>(heard));
  } else if (what == "lines") {  // the chosen one fails, and the others have printed
    if (!chosen) std::printf("ready %d %d\n", run.rank(), getpid());
    if (!chosen) std::this_thread::sleep_for(std::chrono::seconds(30));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ch::fail<ch::FileError>("load: no such file: weights");
  } else if (what == "throw" || what == "usage" || what == "exit" || what == "status" || what == "abort") {
    if (!chosen) stay(run);
    if (what == "throw") ch::fail<ch::FileError>("load: no such file: weights");
    if (what == "usage") ch::fail<ch::UsageError>("the batch is smaller than the ranks");
    if (what == "exit") std::exit(3);
    if (what == "abort") std::abort();
    return 5;
  } else if (what == "messenger") {  // the others fail first, but only because of the chosen one
    if (!chosen) ch::fail<ch::CommError>("all_reduce: rank 1 closed the connection");
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    raise(SIGKILL);
  } else if (what == "slow-end") {  // the chosen one fails first, and takes its time to end
    if (!chosen) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      ch::fail<ch::CommError>("the others have gone");
    }
    std::atexit([] { std::this_thread::sleep_for(std::chrono::milliseconds(700)); });
    ch::comm::Store store;
    store.set_timeout(std::chrono::milliseconds(100));
    store.get("ready");
  } else if (what == "early") {  // the chosen one dies before all have met
    if (chosen) raise(SIGKILL);
    run.communicator().barrier();
  } else if (what == "reduce") {
    std::array<float, 1> value{static_cast<float>(run.rank() + 1)};
    run.communicator().all_reduce(std::span<float>(value));
    std::printf("sum %g\n", static_cast<double>(value[0]));
  } else if (what == "record") {  // which algorithm has added up a long all-reduce
    std::vector<float> values(100'000, 1);
    run.communicator().all_reduce(std::span(values));
    std::printf("%s", run.communicator().flight_record().c_str());
  } else if (what == "store") {
    auto& store = run.store();
    store.set("rank" + std::to_string(run.rank()), std::to_string(10 * run.rank()));
    const auto last = store.get("rank" + std::to_string(run.world_size() - 1));
    std::printf("the last one says %s\n", last.c_str());
    run.communicator().barrier();
  } else if (what == "ring") {
    std::printf("ready %d %d\n", run.rank(), getpid());
    std::fflush(stdout);
    std::array<float, 1000> values{};
    while (true) run.communicator().all_reduce(std::span<float>(values));
  } else if (what == "quit") {  // one rank leaves the loop before the others do
    if (!chosen) run.communicator().barrier();
  } else if (what == "child") {  // a rank that runs a program of its own: it is no rank of our supervisor
    if (run.is_main()) return std::system((run.option("self") + " --single --do hello").c_str()) == 0 ? 0 : 1;
  } else {
    ch::fail<ch::UsageError>("option --do: ", what, " is unknown");
  }
  return 0;
}

// Several calls of launch in one main: one of one process, then two of ranks. `--main WAY` is what it gets wrong.
static int sweep(int argc, char** argv, const std::string& way) {
  const char* rank = std::getenv("RANK");
  const bool is_rank = rank != nullptr, is_second = is_rank && std::strcmp(rank, "1") == 0;
  if (is_rank && way == "quits") return 0;
  int last = 0;
  for (int number = 0; number < 3; ++number) {
    const auto train = [&](ch::Run& run) {
      run.option("main");
      run.option("devices", 2);
      std::array<float, 1> sum{1};
      const bool misses = way == "misses" && is_second && number == 1;
      if (misses || run.option("fail", -1) == number) ch::fail<ch::FileError>("setting ", number, " has no file");
      if (way == "nests" && number > 0) ch::launch<OneProcess>(argc, argv, [](ch::Run&) {});
      run.communicator().all_reduce(std::span<float>(sum));
      std::printf("setting %d: rank %d of %d, sum %g\n", number, run.rank(), run.world_size(),
                  static_cast<double>(sum[0]));
    };
    if (number == 0 || (way == "changes" && is_rank))
      last = ch::launch<OneProcess>(argc, argv, train);
    else if (way == "grows")
      last = ch::launch<Processes>(argc, argv, ch::LaunchOptions{.devices = is_rank ? 3 : 2, .timeout = {}}, train);
    else
      last = ch::launch<Processes>(argc, argv, train);
    if (!is_rank || way == "tells") std::printf("setting %d gave %d\n", number, last);
    std::fflush(stdout);
  }
  return way == "ignores" ? 0 : last;
}

int main(int argc, char** argv) {
  const auto given = [&](const char* word) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], word) == 0) return true;
    }
    return false;
  };
  const auto any = [](auto& run) {
    run.flag("single");
    run.flag("one-device");
    return body(run);
  };
  if (given("--untraced")) ch::detail::run_listener = {};  // as a program without <chorus/trace.hpp> and the library
  for (int i = 1; i + 1 < argc; ++i)
    if (std::strcmp(argv[i], "--main") == 0) return sweep(argc, argv, argv[i + 1]);
  if (given("--one-device")) return ch::launch<OneDevice>(argc, argv, any);
  if (given("--single")) return ch::launch<OneProcess>(argc, argv, any);
  if (given("--parsed")) return ch::launch<Processes>(argc, argv, {.devices = 3, .seed = 7, .timeout = {}}, any);
  return ch::launch<Processes>(argc, argv, any);
}
