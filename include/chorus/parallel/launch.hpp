#pragma once
/// `launch`: the one call in main. It builds the Run and calls the program's body: in this process or, under a policy
/// of processes, in each rank that it starts or that a launcher has started.

#include <fcntl.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <chorus/comm/world.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/random.hpp>
#include <chorus/parallel/message.hpp>
#include <chorus/parallel/run.hpp>
#include <chorus/parallel/supervisor.hpp>
#include <chorus/parallel/tether.hpp>
#include <chorus/parallel/world_from_environment.hpp>

namespace chorus::inline CHORUS_ABI {

namespace detail {

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

/// Calls the body; what it throws becomes a message and a status. The Run, and with it the connection to other ranks,
/// lives on until the message is out: ranks that notice the loss come second.
template <class Body>
int call(Run& run, const Tether& tether, Body& body) {
  try {
    if constexpr (std::is_void_v<decltype(body(run))>) {
      body(run);
      return 0;
    } else {
      return body(run);
    }
  } catch (...) {
    const Failure failure = current_failure();
    tether.report(run.world_size() > 1 ? format("rank %d: ", run.rank()) : std::string(), failure.message);
    return failure.status;
  }
}

template <class Net, class Body>
int launch(char** argv, Arguments arguments, LaunchOptions options, Body& body) {
  options.complete();
  const Tether tether;
  comm::World world;
  if constexpr (Net::distributed) {
    auto joined = join(options.devices);
    if (!joined) return supervise({options.devices.value_or(default_devices()), own_program(), argv}).status;
    world = std::move(*joined);
  }
  manual_seed(options.seed);
  Run run(std::move(arguments), options, std::move(world));
  return call(run, tether, body);
}

}  // namespace detail

/// Runs `body(run)` under the policy `Net` with options that the program has read by itself; returns main's status.
/// `Net::distributed` says whether its devices are processes. If not, the body is called here. If so and torchrun,
/// mpirun or srun has started this process (see world_from_environment), it is called here as that rank; else
/// `options.devices` processes of this same program with the same arguments are started and watched. Call it once,
/// early in main: what stands before it happens in every process. It calls manual_seed(options.seed).
/// `body` takes a Run& and returns nothing or a status. What it throws is printed: UsageError gives status 2, CommError
/// 76, others 1; a rank killed by a signal gives 128 + its number, as does a signal to the program itself.
template <class Net, class Body>
int launch(int argc, char** argv, const LaunchOptions& options, Body&& body) {
  try {
    return detail::launch<Net>(argv, Arguments(argc, argv), options, body);
  } catch (...) {
    const auto failure = detail::current_failure();
    detail::say(failure.message);
    return failure.status;
  }
}

/// The same, with `--devices N`, `--seed S`, `--timeout SECONDS` and `--help` read from the command line. Other options
/// belong to the program, which asks for them with `run.option(name)`; one that it never asked for is named at the end.
template <class Net, class Body>
int launch(int argc, char** argv, Body&& body) {
  try {
    Arguments arguments(argc, argv);
    if (arguments.has("help")) {
      detail::print_launch_help(argc > 0 ? argv[0] : "program");
      return 0;
    }
    const auto options = LaunchOptions::from(arguments);
    auto checked = [&](Run& run) {
      if constexpr (std::is_void_v<decltype(body(run))>) {
        body(run);
      } else if (const int status = body(run); status != 0) {
        return status;
      }
      const std::string unused = run.unused_options();
      if (run.is_main() && !unused.empty()) detail::say("warning: the program has no use for" + unused);
      return 0;
    };
    return detail::launch<Net>(argv, arguments, options, checked);
  } catch (...) {
    const auto failure = detail::current_failure();
    detail::say(failure.message);
    return failure.status;
  }
}

}  // namespace chorus
