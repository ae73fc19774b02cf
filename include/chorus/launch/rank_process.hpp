#pragma once
/// One rank of a machine as a process: torchrun's variables, and the inherited descriptors.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chorus/launch/message.hpp>
#include <chorus/launch/signal_pipe.hpp>
#include <chorus/launch/world_from_environment.hpp>
#include <chrono>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace chorus {

/// The processes to start: `ranks` copies of the program with the same arguments and torchrun's variables.
struct RankGroup {
  int ranks = 1;                           ///< on this machine
  std::string program;                     ///< the executable: a path, or a name to be found in PATH
  char* const* argv = nullptr;             ///< its arguments, ended by a null pointer
  std::chrono::milliseconds grace{3'000};  ///< between SIGTERM and SIGKILL

  int nodes = 1, node_rank = 0;           ///< number of machines with as many ranks each, and this machine's number
  std::string master_addr = "127.0.0.1";  ///< of machine 0
  int master_port = 0;                    ///< 0: a free one, for a single machine
  int listen_fd = -1;                     ///< a socket that listens there already, for rank 0; or -1
  int restart = 0, max_restarts = 0;      ///< for the ranks' environment
  std::string launch;                     ///< for ranks that `launch` starts: the value of CHORUS_LAUNCH
  int replacements = 0;                   ///< of killed ranks a minute, in a job that outlives them
  int attempt = 0;                        ///< how often all ranks have been started before
  std::string doors;                      ///< of ranks that live already: these join them, see SupervisorLink::lives
  std::string run_id = "none", role = "default";

  bool prefix = false;     ///< puts `[rank N] ` in front of ranks' lines
  std::string log_dir;     ///< if not empty, output also goes to log_dir/attempt_A/rank_N.log
  std::vector<int> shown;  ///< if not empty, only these local ranks are shown, with the rank in front
  /// For each local rank the sum of 1 (stdout) and 2 (stderr). `redirects`: streams that go to rank_N.stdout.log and
  /// rank_N.stderr.log instead of the reader; `tee`: streams that go to both. If one of them is not empty, `log_dir`
  /// must be set, and there is no rank_N.log.
  std::vector<int> redirects, tee;
  std::vector<int> signals{SIGTERM, SIGINT, SIGHUP, SIGQUIT};  ///< end the job in order: passed on to ranks
};

namespace detail {

/// The descriptors that a rank inherits from its supervisor.
struct RankDescriptors {
  int report;       ///< the JobFile
  int listener;     ///< rank 0's: the ranks meet at this socket
  int input;        ///< stdin of all other ranks
  int output, err;  ///< stdout and stderr; -1: the supervisor's
};

/// The variables of local rank `local_rank` that differ from the supervisor's.
[[gnu::cold]] inline std::vector<std::string> rank_environment(const RankGroup& group, int local_rank, int port,
                                                               const std::string& token, const RankDescriptors& given,
                                                               const std::string& doors) {
  const int rank = group.node_rank * group.ranks + local_rank, size = group.nodes * group.ranks;
  std::vector<std::string> ours = {
      format("RANK=%d", rank),
      format("LOCAL_RANK=%d", local_rank),
      format("ROLE_RANK=%d", rank),
      format("GROUP_RANK=%d", group.node_rank),
      format("WORLD_SIZE=%d", size),
      format("LOCAL_WORLD_SIZE=%d", group.ranks),
      format("ROLE_WORLD_SIZE=%d", size),
      format("GROUP_WORLD_SIZE=%d", group.nodes),
      "ROLE_NAME=" + group.role,
      "MASTER_ADDR=" + group.master_addr,
      format("MASTER_PORT=%d", port),
      format("TORCHELASTIC_RESTART_COUNT=%d", group.restart),
      format("TORCHELASTIC_MAX_RESTARTS=%d", group.max_restarts),
      "TORCHELASTIC_RUN_ID=" + group.run_id,
      "TORCHELASTIC_USE_AGENT_STORE=False",
      format("CHORUS_SUPERVISOR_PID=%d", getpid()),
      format("CHORUS_REPORT_FD=%d", given.report),
      "CHORUS_ELASTIC_DOORS=" + doors,
      "CHORUS_LAUNCH=" + group.launch,
      rank == 0 && given.listener >= 0 ? format("CHORUS_RENDEZVOUS_FD=%d", given.listener) : "CHORUS_RENDEZVOUS_FD=",
  };
  if (!token.empty()) ours.push_back("CHORUS_TOKEN=" + token);
  if (group.ranks > 1 && env("OMP_NUM_THREADS") == nullptr) ours.push_back("OMP_NUM_THREADS=1");
  return ours;
}

/// The program must not inherit the supervisor's signal handlers.
inline void drop_signal_handlers() {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    sigaction(signal, &action, nullptr);
  }
}

/// In the child, from `fork` to `exec`.
inline void become_rank(bool is_main, const RankDescriptors& given, pid_t supervisor) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // any program ends with its supervisor
  if (getppid() != supervisor) _exit(128 + SIGKILL);
  fcntl(given.report, F_SETFD, 0);
  if (is_main) fcntl(given.listener, F_SETFD, 0);
  if (!is_main) dup2(given.input, STDIN_FILENO);
  if (given.output >= 0) dup2(given.output, STDOUT_FILENO);
  if (given.err >= 0) dup2(given.err, STDERR_FILENO);
  drop_signal_handlers();
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
}

/// Starts a program, with `ours` replacing variables of this process. `prepare` runs in the child, from `fork` to
/// `exec`; it must not allocate: another thread may have held a lock during the fork. Throws Error, which names `what`,
/// if it can't be started.
template <class Prepare>
[[gnu::cold]] pid_t start_process(const std::string& what, const std::string& program, char* const* argv,
                                  const std::vector<std::string>& ours, const Prepare& prepare) {
  std::vector<const char*> environment;
  for (const std::string& entry : ours) environment.push_back(entry.c_str());
  for (char** old = environ; *old != nullptr; ++old) {
    const std::size_t name = std::string_view(*old).find('=') + 1;
    bool replaced = false;
    for (const std::string& entry : ours) replaced |= std::strncmp(*old, entry.c_str(), name) == 0;
    if (!replaced) environment.push_back(*old);
  }
  environment.push_back(nullptr);

  Pipe trouble;  // closed without data when the program has started
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = fork();
  if (pid == 0) {
    prepare();
    execvpe(program.c_str(), argv, const_cast<char* const*>(environment.data()));
    const int error = errno;
    [[maybe_unused]] const auto written = write(trouble.write_end.get(), &error, sizeof error);
    _exit(127);
  }
  int error = pid < 0 ? errno : 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  trouble.write_end.reset();
  pollfd ended{trouble.read_end.get(), POLLIN, 0};
  while (pid > 0 && poll(&ended, 1, -1) < 0) {
  }
  if (pid > 0 && read(trouble.read_end.get(), &error, sizeof error) > 0) waitpid(pid, nullptr, 0);
  if (error != 0) system_error(format("cannot start %s: %s", what.c_str(), program.c_str()).c_str(), error);
  return pid;
}

/// Starts that rank. Throws Error if it can't be started.
[[gnu::cold]] inline pid_t start_rank(const RankGroup& group, int local_rank, const std::vector<std::string>& ours,
                                      const RankDescriptors& given) {
  const int rank = group.node_rank * group.ranks + local_rank, size = group.nodes * group.ranks;
  return start_process(format("rank %d of %d", rank, size), group.program, group.argv, ours,
                       [&, supervisor = getpid()] { become_rank(rank == 0, given, supervisor); });
}

}  // namespace detail

}  // namespace chorus
