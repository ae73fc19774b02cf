#pragma once
/// What stands behind `launch`.

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include <chorus/core/random.hpp>
#include <chorus/parallel/job.hpp>
#include <chorus/parallel/launch.hpp>
#include <chorus/parallel/tether.hpp>
#include <chorus/parallel/world_from_environment.hpp>

namespace chorus::inline CHORUS_ABI::detail {

struct Failure {
  int status;
  std::string message;
};

/// What the exception that is being handled means for the user. Call it inside a catch block.
inline Failure current_failure() {
  try {
    throw;
  } catch (const UsageError& error) {
    return {2, error.what()};
  } catch (const CommError& error) {
    return {lost_peer_status, error.what()};
  } catch (const std::bad_alloc&) {
    return {1, "out of memory"};
  } catch (const std::exception& error) {
    return {1, error.what()};
  } catch (...) {
    return {1, "an exception that is no std::exception"};
  }
}

/// The path of this program; /proc/self/exe itself would do, but `ps` would call every rank "exe".
inline std::string own_program() {
  char path[PATH_MAX];
  const auto size = readlink("/proc/self/exe", path, sizeof path);
  if (size > 0 && size < PATH_MAX) {
    std::string program(path, static_cast<std::size_t>(size));
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "/proc/self/exe";
}

inline void print_launch_help(const char* program) {
  std::printf(
      "usage: %s [options]\n"
      "  --devices N        devices that share the work, 1 to %d (default: 2, or 1 on a single core). Under\n"
      "                     DistributedDataParallel this many processes are started; where torchrun, mpirun or srun\n"
      "                     has started them, their number counts instead.\n"
      "  --seed S           of everything random: initial parameters, order of samples, dropout (default: 0)\n"
      "  --timeout SECONDS  for every wait for another process (default: CHORUS_TIMEOUT, else 60)\n"
      "  --backend NAME     what carries bytes between processes: auto, shm, tcp, hierarchical, mpi, gloo, nccl "
      "(default:\n"
      "                     CHORUS_BACKEND, else auto: shared memory on one machine, TCP on several)\n"
      "Where a machine's cores can be shared out evenly, each of its ranks keeps to its share, unless CHORUS_BIND=0.\n"
      "Other options are the program's own.\n",
      program, LaunchOptions::most_devices);
}

/// Joins the world of a launcher, or returns nothing. `devices` is what the user asked for, if anything.
inline std::optional<comm::World> join(std::optional<int> devices) {
  auto world = world_from_environment();
  if (!world) return world;
  unsetenv("CHORUS_RENDEZVOUS_FD");
  if (world->listen_fd >= 0) fcntl(world->listen_fd, F_SETFD, FD_CLOEXEC);
  if (devices && *devices != world->size && world->rank == 0) {
    say(format("--devices %d is ignored: the launcher has started %d %s", *devices, world->size,
               world->size == 1 ? "process" : "processes"));
  }
  return world;
}

/// A rank among several of this machine keeps to its own share of the cores, as mpirun's do: the scheduler would at
/// times wake two ranks that wait for each other on one core, and leave them there. Of ranks that outnumber the cores,
/// neighbours share one, where that is as many on each. Not where someone has chosen cores before, nor with
/// CHORUS_BIND=0. Threads that start later keep to the same cores.
inline void keep_to_own_cores(const comm::World& world) {
  cpu_set_t all, own;
  if (!env_switch("CHORUS_BIND", true) || world.local_size < 2) return;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  const int cores = CPU_COUNT(&all);
  if (cores != sysconf(_SC_NPROCESSORS_ONLN) || (cores < world.local_size && world.local_size % cores != 0)) return;
  const int first = cores * world.local_rank / world.local_size,
            last = std::max(first + 1, cores * (world.local_rank + 1) / world.local_size);
  CPU_ZERO(&own);
  for (int core = 0, number = 0; number < last; ++core)
    if (CPU_ISSET(core, &all)) {
      if (number >= first) CPU_SET(core, &own);
      ++number;
    }
  sched_setaffinity(0, sizeof own, &own);
}

/// Calls the body; what it throws becomes a message and a status. The Run, and with it the connection to other ranks,
/// lives on until the message is out: ranks that are told of the loss come second.
inline int call(Run& run, const Tether& tether, LaunchBody body) {
  try {
    return body.call(body.body, run);
  } catch (...) {
    const Failure failure = current_failure();
    const bool named = run.world_size() == 1 || failure.message.starts_with("rank ");  // as a communicator's errors are
    tether.report(named ? std::string() : format("rank %d: ", run.rank()), failure.message);
    run.abort(failure.message);
    return failure.status;
  }
}

inline int launch_here(bool distributed, char** argv, Arguments arguments, LaunchOptions options, bool names_unused,
                       LaunchBody body) {
  options.complete();
  const Tether tether;
  comm::World world;
  if (distributed) {
    auto joined = join(options.devices);
    if (!joined) {
      RankGroup group;
      group.ranks = options.devices.value_or(default_devices());
      group.program = own_program();
      group.argv = argv;
      return run_job(std::move(group));
    }
    world = std::move(*joined);
    keep_to_own_cores(world);
  }
  manual_seed(options.seed);
  Run run(std::move(arguments), options, std::move(world));
  const int status = call(run, tether, body);
  if (names_unused && status == 0 && run.is_main()) {
    const std::string unused = run.unused_options();
    if (!unused.empty()) say("warning: the program has no use for" + unused);
  }
  return status;
}

CHORUS_INLINE int launch(bool distributed, int argc, char** argv, const LaunchOptions* options, LaunchBody body) {
  try {
    Arguments arguments(argc, argv);
    if (options != nullptr) return launch_here(distributed, argv, std::move(arguments), *options, false, body);
    if (arguments.has("help")) {
      print_launch_help(argc > 0 ? argv[0] : "program");
      return 0;
    }
    const auto from_line = LaunchOptions::from(arguments);
    return launch_here(distributed, argv, std::move(arguments), from_line, true, body);
  } catch (...) {
    const auto failure = current_failure();
    say(failure.message);
    return failure.status;
  }
}

}  // namespace chorus::inline CHORUS_ABI::detail
