#pragma once
/// How `launch` works.

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chorus/core/check_output.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/standard_streams.hpp>
#include <chorus/launch/job.hpp>
#include <chorus/launch/launch.hpp>
#include <chorus/launch/stand_by.hpp>
#include <chorus/launch/supervisor_link.hpp>
#include <chorus/launch/variables.hpp>
#include <chorus/launch/world_from_environment.hpp>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

struct Failure {
  int status;
  std::string message;
};

/// The status and message for the exception being handled. Call it inside a catch block.
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
    return {1, "an exception of another type than std::exception"};
  }
}

/// For programs that can record runs.
inline constexpr const char* trace_help =
    "  --trace FILE       writes a trace of a few steps, for Perfetto and chorus-page (default: CHORUS_TRACE, "
    "else\n"
    "                     no trace)\n"
    "  --trace-steps F:N  traces N steps from step F on (default: CHORUS_TRACE_STEPS, else 5:3)\n"
    "  --trace-ring       traces each step of each collective (or CHORUS_TRACE_RING=1)\n";

inline void print_launch_help(const char* program) {
  std::printf(
      "usage: %s [options]\n"
      "  --devices N        number of devices, 1 to %d (default: 2, or 1 on a single core). A policy with a process\n"
      "                     per device starts N processes; if torchrun, mpirun or srun has started them, their\n"
      "                     number counts instead.\n"
      "  --device LIST      names of the devices: 0,1 or cpu:0,1 or cuda:0,1. If each process has one, process r of a\n"
      "                     machine computes on the r-th of them; CPU devices are virtual\n"
      "  --seed S           seed of all random numbers: initial parameters, order of samples, dropout (default: 0)\n"
      "  --timeout SECONDS  limit of every wait for another process (default: CHORUS_TIMEOUT, else 60)\n"
      "  --grace SECONDS    time to save: from a signal that ends the job, or from a process' failure, to SIGKILL\n"
      "                     (default: CHORUS_GRACE, else 3)\n"
      "  --backend NAME     carrier of bytes between processes: auto, shm, tcp, hierarchical, mpi, gloo, nccl "
      "(default:\n"
      "                     CHORUS_BACKEND, else auto: shared memory on one machine, TCP on several)\n"
      "  --all-reduce NAME  algorithm that sums gradients: auto, ring, direct, in_place, hierarchical "
      "(default:\n"
      "                     CHORUS_ALL_REDUCE, else auto: the fastest for processes and data)\n"
      "%s%s"
      "SIGUSR1 and SIGUSR2 are passed on to the processes; SIGTERM, SIGINT, SIGHUP and SIGQUIT end them, too.\n"
      "Other options are the program's own.\n",
      printable(program, PATH_MAX).c_str(), LaunchOptions::most_devices,
      run_listener.rank_begins == nullptr ? "" : trace_help, launch_variables);
}

/// The contents of CHORUS_LAUNCH, which `launch` sets for a process that it starts: `CALL DEVICES STATUSES POLICY`.
struct LaunchOrder {
  int call = 0;               ///< index of the call of `launch` in main, from 0
  int devices = 1;            ///< the requested number
  std::vector<int> statuses;  ///< of the earlier calls
  std::string policy;

  std::string text() const {
    std::string list;
    for (const int status : statuses) list += format(list.empty() ? "%d" : ",%d", status);
    return format("%d %d %s %s", call, devices, list.empty() ? "-" : list.c_str(), policy.c_str());
  }

  /// Reads it and removes it from the environment, so that processes started here don't inherit it. Empty if not set.
  [[gnu::cold]] static std::optional<LaunchOrder> take() {
    const char* found = env("CHORUS_LAUNCH");
    if (found == nullptr) return std::nullopt;
    const std::string text = found;
    unsetenv("CHORUS_LAUNCH");
    LaunchOrder order;
    std::string_view rest = text;
    const auto cut = [](std::string_view& from, char at) {
      const auto end = std::min(from.find(at), from.size());
      const auto word = from.substr(0, end);
      from.remove_prefix(std::min(end + 1, from.size()));
      return word;
    };
    const char* what = "environment variable CHORUS_LAUNCH, which only chorus' launcher sets,";
    order.call = to_number<int>(what, cut(rest, ' '));
    order.devices = to_number<int>(what, cut(rest, ' '));
    for (auto list = cut(rest, ' '); !list.empty() && list != "-";)
      order.statuses.push_back(to_number<int>(what, cut(list, ',')));
    order.policy = rest;
    if (order.call < 0 || order.statuses.size() != static_cast<std::size_t>(order.call))
      usage_error("%s must be an order of the launcher, got '%s'", what, printable(text).c_str());
    return order;
  }
};

/// The calls of `launch` in this process.
struct LaunchCalls {
  std::mutex mutex;
  std::optional<LaunchOrder> order;  ///< set if a call in another process has started this one
  std::vector<int> statuses;         ///< of the calls so far
  bool ordered = false;              ///< whether `order` has been read
  int meetings = 0;                  ///< of ranks, so far
  int listen_fd = -1;                ///< rank 0's: the socket at which ranks meet repeatedly

  static LaunchCalls& of_process() {
    static LaunchCalls calls;
    return calls;
  }

  /// The number of a call that begins; `passed` is its status if it must not run.
  [[gnu::cold]] int begin(std::optional<int>& passed) {
    const std::lock_guard lock(mutex);
    if (!std::exchange(ordered, true)) order = LaunchOrder::take();
    const auto number = static_cast<int>(statuses.size());
    statuses.push_back(0);
    if (order && number != order->call)
      passed = number < order->call ? order->statuses[static_cast<std::size_t>(number)]
                                    : statuses[static_cast<std::size_t>(order->call)];
    return number;
  }
  int end(int number, int status) {
    const std::lock_guard lock(mutex);
    return statuses[static_cast<std::size_t>(number)] = status;
  }
};

/// Sets `flag` while it lives. Throws UsageError if it is set already.
class FlagScope {
 public:
  FlagScope(std::atomic<bool>& flag, const char* why_not) : flag_(flag) {
    check<UsageError>(!flag.exchange(true), why_not);
  }
  FlagScope(const FlagScope&) = delete;
  FlagScope& operator=(const FlagScope&) = delete;
  ~FlagScope() { flag_ = false; }

 private:
  std::atomic<bool>& flag_;
};

/// Throws UsageError if main has reached another call than the process that started this one.
inline void check_order(const LaunchOrder& order, LaunchedPolicy policy, const LaunchOptions& options) {
  const char* advice =
      "; main must take the same path in all processes, also where it depends on files, environment or time";
  if (order.policy != policy.name)
    usage_error("launch: this process was started as a rank of policy '%s', but its main launches '%s'%s",
                printable(order.policy).c_str(), policy.name, advice);
  if (const auto asked = options.asked_devices(); asked && *asked != order.devices)
    usage_error("launch: this process was started as one of %d devices, but its main launches %d%s", order.devices,
                *asked, advice);
}

/// Throws UsageError if the policy's model can't use the named devices.
inline void check_device_list(LaunchedPolicy policy, const LaunchOptions& options) {
  if (!options.device_ids) return;
  const auto& list = *options.device_ids;
  const std::string text = list.text();
  if (!list.kind.empty() && list.kind != policy.device_kind)
    usage_error("--device %s: expected %s, the device of this program, got %s; %s", text.c_str(), policy.device_kind,
                list.kind.c_str(),
                list.kind == "cpu" ? "to use the CPU, give the model the device type chorus::Cpu"
                                   : "to use GPUs, give the model the device type chorus::Cuda, and compile it by nvcc "
                                     "with CHORUS_USE_CUDA=1 (CMake: chorus::cuda)");
  if (policy.one_device && list.size() > 1)
    usage_error("--device %s: expected one device for policy '%s', got %d: dp and ddp take several", text.c_str(),
                policy.name, list.size());
  try {
    for (const int id : list.ids) policy.require(id);
  } catch (const DeviceError& error) {
    usage_error("--device %s: %s", text.c_str(), error.what());
  }
}

/// Throws UsageError unless the list has one device for each process that a launcher has started on this machine.
inline void check_one_each(const comm::World& world, const LaunchOptions& options) {
  if (!options.device_ids || options.device_ids->ids.empty() || options.device_ids->size() == world.local_size) return;
  usage_error(
      "--device %s: expected one device for each of the %d processes that the launcher started on this machine, got %d",
      options.device_ids->text().c_str(), world.local_size, options.device_ids->size());
}

/// Warns of several processes that each run a policy of one process: they are independent. (Invalid variables are
/// ignored here, as this policy doesn't use them.)
inline void warn_of_strangers(LaunchedPolicy policy) {
  std::optional<Seat> seat;
  try {
    seat = env("RANK") || env("WORLD_SIZE") ? read_seat("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
                                            : seat_of_mpi_or_slurm();
  } catch (const UsageError&) {
  }
  static std::atomic<bool> said{false};
  if (seat && seat->size > 1 && seat->rank == 0 && !said.exchange(true))
    say(format(
        "warning: launch: policy '%s' is of one process, but a launcher has started %d: each does all of the work",
        policy.name, seat->size));
}

/// Warns if there is no token: other users' processes could pose as ranks.
inline void warn_of_users(const comm::World& world) {
  static std::atomic<bool> said{false};
  if (world.token.empty() && world.size > 1 && world.rank == 0 && !said.exchange(true))
    say(format("warning: launch: no CHORUS_TOKEN is set: any user of this machine can take a rank's place at %s:%d",
               world.master_addr.c_str(), world.master_port));
}

/// Joins the world of a launcher, or returns nothing. `devices` is the number that the user asked for, if any.
inline std::optional<comm::World> join(LaunchedPolicy policy, std::optional<int> devices) {
  auto& calls = LaunchCalls::of_process();
  auto world = world_from_environment();
  if (!world) return world;
  unsetenv("CHORUS_RENDEZVOUS_FD");
  if (world->listen_fd >= 0) {
    fcntl(world->listen_fd, F_SETFD, FD_CLOEXEC);
    if (!calls.order) calls.listen_fd = fcntl(world->listen_fd, F_DUPFD_CLOEXEC, 3);
  } else if (calls.listen_fd >= 0) {
    world->listen_fd = fcntl(calls.listen_fd, F_DUPFD_CLOEXEC, 3);
  }
  world->purpose = format("launch %d, policy '%s'", ++calls.meetings, policy.name);
  if (devices && *devices != world->size && world->rank == 0) {
    say(format("--devices %d is ignored: the launcher has started %d %s", *devices, world->size,
               world->size == 1 ? "process" : "processes"));
  }
  return world;
}

/// Binds a rank to its share of its machine's cores, as mpirun does: otherwise the scheduler may wake two ranks that
/// wait for each other on one core and leave them there. If ranks outnumber cores, neighbours share a core, if all
/// cores get equally many. Not done if the affinity is set already, or with CHORUS_BIND=0. Later threads inherit the
/// binding.
inline void pin_to_own_cores(const comm::World& world) {
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

/// Calls the body; its exception becomes a message and a status. The Run, with the connection to other ranks, lives
/// until the message is printed, so that messages of ranks that lose this one come later.
inline int call(Run& run, LaunchBody body) {
  // A rank that `launch` has started has failed if its call has, even if main ignores the status.
  const bool ordered = LaunchCalls::of_process().order.has_value();
  const auto& link = SupervisorLink::of_process();
  try {
    const int status = body.call(body.body, run);
    if (status == 0) check_output();
    if (ordered && status != 0) link.report("", "", status);
    return status;
  } catch (...) {
    const Failure failure = current_failure();
    const bool named = run.world_size() == 1 || failure.message.starts_with("rank ");  // as a communicator's errors are
    link.report(named ? std::string() : format("rank %d: ", run.rank()), failure.message, ordered ? failure.status : 0);
    run.abort(failure.message);
    return failure.status;
  }
}

/// The recorder of this call of `launch`; empty if no trace is requested. Throws UsageError if one is requested and
/// nothing in the program writes it.
inline RunListener listener_to(const LaunchOptions& options) {
  if (options.trace.path.empty()) return {};
  check<UsageError>(run_listener.rank_begins != nullptr,
                    "launch: a trace is requested (--trace, CHORUS_TRACE or LaunchOptions::trace), but this program "
                    "has no code to write it to '",
                    printable(options.trace.path, PATH_MAX), "': include <chorus/trace.hpp>");
  return run_listener;
}

[[gnu::cold]] inline int launch_here(int number, LaunchedPolicy policy, char** argv, Arguments arguments,
                                     LaunchOptions options, bool names_unused, LaunchBody body) {
  auto& calls = LaunchCalls::of_process();
  const auto& order = calls.order;
  if (order) check_order(*order, policy, options);
  options.complete();
  check_device_list(policy, options);
  if (number > 0 && !options.trace.path.empty())  // later calls in one main have files of their own
    options.trace.path += cat(".", number + 1);
  const RunListener listener = listener_to(options);
  SupervisorLink::of_process();
  comm::World world;
  if (policy.distributed) {
    auto joined = join(policy, options.devices);
    if (!joined) {
      const bool stands_by = env("CHORUS_STAND_BY") != nullptr;
      check<UsageError>(!order || stands_by,
                        "launch: this process was started as a rank, but RANK and WORLD_SIZE are no longer set");
      static std::atomic<bool> under_way{false};
      const FlagScope starting(under_way, "launch: another thread of this process is already in a launch of ranks");
      LaunchOrder next{number, options.asked_devices().value_or(default_devices()), calls.statuses, policy.name};
      next.statuses.resize(static_cast<std::size_t>(number));
      RankGroup group;
      group.ranks = next.devices;
      group.program = own_program();
      group.argv = argv;
      group.grace = *options.grace;
      group.launch = next.text();
      group.replacements = INT_MAX;
      calls.order.reset();  // of one that stands by: from here on it is the one whose place it takes
      const int status = run_job(std::move(group));
      if (listener.ranks_have_ended != nullptr) listener.ranks_have_ended(options.trace, next.devices);
      if (status == 0) check_output();
      return status;
    }
    world = std::move(*joined);
    check_one_each(world, options);
    if (options.backend != comm::Backend::mpi) warn_of_users(world);
    pin_to_own_cores(world);
  } else {
    warn_of_strangers(policy);
  }
  // Line buffering: a rank's output is there when another rank fails.
  if (world.size > 1) std::setvbuf(stdout, nullptr, _IOLBF, 0);
  manual_seed(options.seed);
  std::shared_ptr<void> recorded;
  if (listener.rank_begins != nullptr)
    recorded = listener.rank_begins(options.trace, {.policy = policy.name,
                                                    .distributed = world.size > 1,
                                                    .rank = world.rank,
                                                    .ranks = world.size,
                                                    .device_kind = policy.device_kind,
                                                    .first_slot = policy.first_slot});
  Run run(std::move(arguments), options, std::move(world));
  const int status = call(run, body);
  if (names_unused && status == 0 && run.is_main()) {
    const std::string unused = run.unused_options();
    if (!unused.empty()) say("warning: the program does not use" + printable(unused, 1000));
  }
  return status;
}

CHORUS_INLINE int launch(LaunchedPolicy policy, int argc, char** argv, const LaunchOptions* options, LaunchBody body) {
  open_standard_streams();
  thread_local std::atomic<bool> inside{false};
  const FlagScope scope(inside, "launch: called in the body of another launch; call them one after the other, in main");
  auto& calls = LaunchCalls::of_process();
  int number = -1;
  const SupervisorLink* link = nullptr;  // of a rank that launch has started
  try {
    std::optional<int> passed;
    number = calls.begin(passed);
    if (passed) return calls.end(number, *passed);
    if (calls.order) (link = &SupervisorLink::of_process())->arrive();
    Arguments arguments(argc, argv);
    if (options != nullptr)
      return calls.end(number, launch_here(number, policy, argv, std::move(arguments), *options, false, body));
    if (arguments.has("help")) {
      print_launch_help(argc > 0 ? argv[0] : "program");
      check_output();
      return 0;
    }
    const auto from_line = LaunchOptions::from(arguments);
    return calls.end(number, launch_here(number, policy, argv, std::move(arguments), from_line, true, body));
  } catch (...) {
    const auto failure = current_failure();
    if (link != nullptr)
      link->report("", failure.message, failure.status);
    else
      say(failure.message);
    return number < 0 ? failure.status : calls.end(number, failure.status);
  }
}

}  // namespace chorus::detail
