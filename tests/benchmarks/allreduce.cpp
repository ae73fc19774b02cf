// Times all-reduce over float sums between ranks of this machine, bound to cores, in the form of the usual MPI program:
//   allreduce [--ranks N] [--transport shm|tcp|thread|mpi|gloo] [--memory own|communicator]
//             [--all-reduce auto|ring|direct|in_place|hierarchical]
// The data lies in memory of the program's own, or in such as the communicator gives, which ranks read where it lies.
// One line a size: bytes, ranks, median ms, busbw in GB/s (bytes * 2(n-1)/n / time, as nccl-tests defines it), and the
// algorithm that served the last one.
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <chorus/comm/connect.hpp>
#include <chorus/comm/thread_group.hpp>
#include <csignal>
#include <cstdio>
#include <functional>
#include <thread>
#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif
#if CHORUS_USE_MPI
#include <chorus/comm/mpi.hpp>
#endif

namespace {

using namespace chorus;

struct Options {
  int ranks = 2;
  std::string transport = "shm", memory = "own";
  comm::Algorithm all_reduce = comm::Algorithm::automatic;
};

constexpr const char* usage =
    "usage: allreduce [--ranks N] [--transport shm|tcp|thread|mpi|gloo] [--memory own|communicator]\n"
    "                 [--all-reduce auto|ring|direct|in_place|hierarchical]\n";

Options parse(std::span<char*> arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string_view option = arguments[i];
    check<UsageError>(
        option == "--ranks" || option == "--transport" || option == "--memory" || option == "--all-reduce",
        "unknown option '", option, "'");
    check<UsageError>(i + 1 < arguments.size(), option, " needs a value");
    const std::string_view value = arguments[i + 1];
    if (option == "--ranks") {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), options.ranks);
      check<UsageError>(error == std::errc() && end == value.data() + value.size() && options.ranks >= 1 &&
                            options.ranks <= comm::max_ranks,
                        "--ranks ", value, ": expected a number from 1 to ", comm::max_ranks);
    } else if (option == "--all-reduce") {
      options.all_reduce = comm::all_reduce_of(value);
    } else if (option == "--memory") {
      check<UsageError>(value == "own" || value == "communicator", "--memory ", value,
                        ": expected own or communicator");
      options.memory = value;
    } else {
      const std::string_view known[] = {"shm", "tcp", "thread", "mpi", "gloo"};
      check<UsageError>(std::find(std::begin(known), std::end(known), value) != std::end(known), "--transport ", value,
                        ": expected shm, tcp, thread, mpi or gloo");
      options.transport = value;
    }
  }
  return options;
}

/// By which algorithm the newest all-reduce went, as the flight recorder has it.
std::string served_by(const comm::AnyCommunicator& c) {
  const auto record = c.flight_record();
  const auto call = record.rfind("all_reduce"), by = record.find(", by ", call);
  if (call == std::string::npos || by == std::string::npos) return "library";
  return record.substr(by + 5, record.find(',', by + 1) - by - 5);
}

void benchmark(comm::AnyCommunicator& c, const Options& options) {
  const auto& backend = options.transport;
  const int n = c.size();
  for (const std::size_t count : {1u << 10, 1u << 14, 1u << 18, 1u << 20, 1u << 22, 1u << 24}) {
    const std::size_t repeats = count > 1'000'000 ? 15 : 200;
    std::vector<float> own(count);
    const auto lent = options.memory == "own" ? nullptr : c.allocate(count * sizeof(float));
    const std::span data(lent ? reinterpret_cast<float*>(lent.get()) : own.data(), count);
    std::vector<double> seconds;
    for (std::size_t r = 0; r < repeats + 3; ++r) {
      std::fill(data.begin(), data.end(), 1.0f);
      c.barrier();
      const auto start = std::chrono::steady_clock::now();
      c.all_reduce(data);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      if (r >= 3) seconds.push_back(time.count());
      check(std::all_of(data.begin(), data.end(), [n](float x) { return x == static_cast<float>(n); }), "wrong sum");
    }
    std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(repeats / 2), seconds.end());
    const double median = seconds[repeats / 2];
    if (c.rank() != 0) continue;
    const auto bytes = static_cast<double>(count * sizeof(float));
    std::printf("allreduce backend=%s bytes=%zu ranks=%d median_ms=%.4f busbw_gb_s=%.3f by=%s\n", backend.c_str(),
                count * sizeof(float), n, median * 1e3, bytes * 2 * (n - 1) / n / median / 1e9, served_by(c).c_str());
    std::fflush(stdout);
  }
}

/// Runs f and returns a process's exit code.
int guarded(const std::function<void()>& f) {
  try {
    f();
    return 0;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "allreduce: %s\n%s", error.what(), usage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "allreduce: %s\n", error.what());
    return 1;
  }
}

void run_threads(const Options& options) {
  auto group = comm::thread_group(options.ranks, std::chrono::seconds(60), options.all_reduce);
  std::vector<std::thread> threads;
  for (std::size_t rank = 1; rank < group.size(); ++rank)
    threads.emplace_back([&, rank] { guarded([&] { benchmark(group[rank], options); }); });
  benchmark(group[0], options);
  for (auto& thread : threads) thread.join();
}

/// Each rank on a core of its own, as mpirun binds its ranks, or, where there are too few, neighbours on one, as
/// `launch` does.
void bind_to_core(int rank, int ranks) {
  cpu_set_t all, own;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  const int cores = CPU_COUNT(&all);
  if (cores < ranks && ranks % cores != 0) return;
  int core = 0;
  for (int skipped = -1; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &all) && ++skipped == (cores < ranks ? rank * cores / ranks : rank)) break;
  CPU_ZERO(&own);
  CPU_SET(core, &own);
  sched_setaffinity(0, sizeof own, &own);
}

void run_processes(const Options& options) {
  comm::World world{.size = options.ranks, .local_size = options.ranks};
  world.all_reduce = options.all_reduce;
  if (comm::can_authenticate) world.token = "a token of this benchmark";  // of which CHORUS_TLS=1 makes a key
  auto listener = comm::Socket::listen(comm::Address::resolve(world.master_addr, 0));
  world.master_port = listener.local().port();
  for (int rank = 1; rank < options.ranks; ++rank) {
    const int pid = fork();
    check(pid >= 0, "cannot start rank ", rank, ": ", std::strerror(errno));
    if (pid != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    world.rank = world.local_rank = rank;
    listener = comm::Socket();
    break;
  }
  bind_to_core(world.rank, world.size);
  if (world.rank == 0) world.listen_fd = dup(listener.fd());
  listener = comm::Socket();
  const int code = guarded([&] {
    auto c = comm::connect(world, {.backend = comm::backend_of(options.transport)});
    benchmark(c, options);
  });
  if (world.rank != 0) _exit(code);
  int status = 0, bad = code;
  while (wait(&status) > 0) bad |= status;
  check(bad == 0, "a rank failed");
}

/// A rank where mpirun has started this program; else starts mpirun.
void run_mpi([[maybe_unused]] const Options& options, [[maybe_unused]] char** argv) {
#if CHORUS_USE_MPI
  if (std::getenv("OMPI_COMM_WORLD_RANK") || std::getenv("PMI_RANK")) {
    comm::MpiCommunicator c;
    return benchmark(c, options);
  }
  check<UsageError>(options.all_reduce == comm::Algorithm::automatic, "--all-reduce ", options.all_reduce,
                    " is unknown to mpi, expected auto");
  const auto ranks = cat(options.ranks);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
  execlp("mpirun", "mpirun", "--oversubscribe", "-np", ranks.c_str(), argv[0], "--transport", "mpi", nullptr);
  fail("mpirun: ", std::strerror(errno));
#else
  fail<UsageError>("--transport mpi: this program was built without MPI");
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const std::span arguments(argv + 1, static_cast<std::size_t>(argc - 1));
  if (std::any_of(arguments.begin(), arguments.end(), [](std::string_view a) { return a == "-h" || a == "--help"; }))
    return std::fputs(usage, stdout), 0;
  return guarded([&] {
    const auto options = parse(arguments);
    if (options.transport == "mpi") return run_mpi(options, argv);
    options.transport == "thread" ? run_threads(options) : run_processes(options);
  });
}
