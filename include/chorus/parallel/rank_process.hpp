#pragma once
/// One rank of a machine as a process: torchrun's variables, and the descriptors that it inherits.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/parallel/message.hpp>
#include <chorus/parallel/signal_pipe.hpp>
#include <chorus/parallel/world_from_environment.hpp>

namespace chorus::inline CHORUS_ABI {

/// The processes to start: `ranks` times the same program with the same arguments and torchrun's variables.
struct RankGroup {
  int ranks = 1;                           ///< on this machine
  std::string program;                     ///< the executable: a path, or a name to be found in PATH
  char* const* argv = nullptr;             ///< its arguments, ended by a null pointer
  std::chrono::milliseconds grace{3'000};  ///< between SIGTERM and SIGKILL

  int nodes = 1, node_rank = 0;           ///< machines with as many ranks each, and which of them this is
  std::string master_addr = "127.0.0.1";  ///< of machine 0
  int master_port = 0;                    ///< 0: a free one, for a single machine
  int restart = 0, max_restarts = 0;      ///< for the ranks to know
  std::string run_id = "none";

  bool prefix = false;  ///< ranks' lines get `[rank N] ` in front
  std::string log_dir;  ///< if not empty, they go to log_dir/attempt_R/rank_N.log, too
};

namespace detail {

/// What a rank inherits of its supervisor.
struct RankDescriptors {
  int report;    ///< it writes there why it fails
  int listener;  ///< rank 0's: the ranks meet at this socket
  int input;     ///< stdin of all other ranks
  int output;    ///< stdout and stderr; -1: the supervisor's
};

/// The variables of rank `local_rank` of this machine that are not those of the supervisor.
inline std::vector<std::string> rank_environment(const RankGroup& group, int local_rank, int port,
                                                 const std::string& token, const RankDescriptors& given) {
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
      "ROLE_NAME=default",
      "MASTER_ADDR=" + group.master_addr,
      format("MASTER_PORT=%d", port),
      format("TORCHELASTIC_RESTART_COUNT=%d", group.restart),
      format("TORCHELASTIC_MAX_RESTARTS=%d", group.max_restarts),
      "TORCHELASTIC_RUN_ID=" + group.run_id,
      "TORCHELASTIC_USE_AGENT_STORE=False",
      format("CHORUS_SUPERVISOR_PID=%d", getpid()),
      format("CHORUS_REPORT_FD=%d", given.report),
      rank == 0 ? format("CHORUS_RENDEZVOUS_FD=%d", given.listener) : "CHORUS_RENDEZVOUS_FD=",
  };
  if (!token.empty()) ours.push_back("CHORUS_TOKEN=" + token);
  if (group.ranks > 1 && env("OMP_NUM_THREADS") == nullptr) ours.push_back("OMP_NUM_THREADS=1");
  return ours;
}

/// Starts that rank, with the supervisor's variables and `ours` in place of those of the same name. Throws Error where
/// it can't be started.
inline pid_t start_rank(const RankGroup& group, int local_rank, const std::vector<std::string>& ours,
                        const RankDescriptors& given) {
  std::vector<const char*> environment;
  for (const std::string& entry : ours) environment.push_back(entry.c_str());
  for (char** old = environ; *old != nullptr; ++old) {
    const std::size_t name = std::string_view(*old).find('=') + 1;
    bool replaced = false;
    for (const std::string& entry : ours) replaced |= std::strncmp(*old, entry.c_str(), name) == 0;
    if (!replaced) environment.push_back(*old);
  }
  environment.push_back(nullptr);

  const int rank = group.node_rank * group.ranks + local_rank, size = group.nodes * group.ranks;
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  const auto hand_over = [&](int fd, int as) { posix_spawn_file_actions_adddup2(&files, fd, as); };
  hand_over(given.report, given.report);  // what is copied onto itself stays open in the new program
  if (rank == 0)
    hand_over(given.listener, given.listener);
  else
    hand_over(given.input, STDIN_FILENO);
  if (given.output >= 0) {
    hand_over(given.output, STDOUT_FILENO);
    hand_over(given.output, STDERR_FILENO);
  }
  // Signals that we handle here are back at their default in a new program; nor may it inherit that we block any.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);

  pid_t pid = -1;
  const int error = posix_spawnp(&pid, group.program.c_str(), &files, &attributes, group.argv,
                                 const_cast<char* const*>(environment.data()));
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  if (error != 0)
    system_error(format("cannot start rank %d of %d: %s", rank, size, group.program.c_str()).c_str(), error);
  return pid;
}

}  // namespace detail

}  // namespace chorus
