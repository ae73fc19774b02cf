#pragma once
/// `StandBy`: a process that takes the supervisor's place if that is killed, in a job that outlives its ranks.

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chorus/core/environment.hpp>
#include <chorus/core/say.hpp>
#include <chorus/launch/job_file.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/rank_process.hpp>
#include <chorus/launch/signal_pipe.hpp>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

/// The path of this program; not /proc/self/exe, for which `ps` would show "exe".
inline std::string own_program() {
  char path[PATH_MAX];
  const auto size = readlink("/proc/self/exe", path, sizeof path);
  if (size > 0 && size < PATH_MAX) {
    std::string program(path, static_cast<std::size_t>(size));
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "/proc/self/exe";
}

/// The signals that a supervisor handles.
inline sigset_t signals_of(const RankGroup& group) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : group.signals) sigaddset(&signals, signal);
  for (const int signal : {SIGUSR1, SIGUSR2}) sigaddset(&signals, signal);
  return signals;
}

/// What a killed supervisor leaves: its ranks' words, and their output.
struct Estate {
  JobFile file;
  std::vector<Fd> pipes;  ///< see RankOutput::pipes
};

/// The supervisor's: a child that runs the same command line up to the same call of run_job, and waits there (see
/// `stand_by`). It gets the supervisor's descriptors, and in CHORUS_STAND_BY what the supervisor has found out.
class StandBy {
 public:
  StandBy() = default;
  StandBy(const StandBy&) = delete;
  StandBy& operator=(const StandBy&) = delete;
  ~StandBy() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  /// Starts one if none is there. One that was killed is replaced, but not one that could not do its task. Throws Error
  /// if it can't be started.
  [[gnu::cold]] void keep(const RankGroup& group, int port, const std::string& token, const JobFile& file,
                          const std::vector<Fd>& pipes) {
    if (pid_ >= 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      able_ = JobFile::noted(file.fd(), JobFile::waits);
      if (!able_) say("the process that stands by has ended: if this one is killed, lost ranks are not replaced");
    }
    if (pid_ >= 0 || !std::exchange(able_, false)) return;
    file.note(JobFile::waits, false);
    std::string order = format("%d %d %d %d %d %d %d %d", getpid(), file.fd(), port, group.nodes, group.node_rank,
                               group.restart, group.attempt, static_cast<int>(pipes.size()));
    for (const Fd& pipe : pipes) order += format(" %d", pipe.get());
    std::vector<std::string> ours{"CHORUS_STAND_BY=" + order + " " + group.master_addr,
                                  "CHORUS_LAUNCH=" + group.launch};
    if (!token.empty()) ours.push_back("CHORUS_TOKEN=" + token);
    if (!group.log_dir.empty()) ours.push_back("PET_LOG_DIR=" + group.log_dir);  // chorus-run would make another one
    const Fd line(open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC), "/proc/self/cmdline");
    std::string words;
    char some[4096];
    for (ssize_t size = 0; (size = read(line.get(), some, sizeof some)) > 0;)
      words.append(some, static_cast<std::size_t>(size));
    if (!words.ends_with('\0')) words += '\0';
    std::vector<char*> argv;
    for (std::size_t at = 0; at < words.size(); at = words.find('\0', at) + 1) argv.push_back(words.data() + at);
    argv.push_back(nullptr);
    const sigset_t held = signals_of(group);
    pid_ = start_process("a process that stands by", own_program(), argv.data(), ours, [&] {
      const int nothing = open("/dev/null", O_RDONLY);
      if (nothing > 0) dup2(nothing, STDIN_FILENO), close(nothing);
      fcntl(file.fd(), F_SETFD, 0);
      for (const Fd& pipe : pipes) fcntl(pipe.get(), F_SETFD, 0);
      drop_signal_handlers();
      pthread_sigmask(SIG_SETMASK, &held, nullptr);
    });
    able_ = true;
    file.note(JobFile::there);
  }

 private:
  pid_t pid_ = -1;
  bool able_ = true;
};

/// In a process that was started to stand by: waits until its supervisor is killed, and returns what that leaves;
/// `group` is then the supervisor's. In other processes: nothing, at once. Signals that end the job are blocked until
/// the returned object is used: one that has come meanwhile reaches the ranks then.
[[gnu::cold]] inline std::optional<Estate> stand_by(RankGroup& group) {
  const char* text = env("CHORUS_STAND_BY");
  if (text == nullptr) return std::nullopt;
  const std::string order = text;
  unsetenv("CHORUS_STAND_BY");
  char* rest = const_cast<char*>(order.c_str());
  const auto next = [&] { return static_cast<int>(std::strtol(rest, &rest, 10)); };
  const pid_t supervisor = next();
  Estate estate{JobFile(Fd(next(), "CHORUS_STAND_BY")), {}};
  check<UsageError>(JobFile::is_one(estate.file.fd()),
                    "environment variable CHORUS_STAND_BY, which only chorus' launcher sets, names no file of ranks: ",
                    printable(order));
  group.master_port = next();
  group.nodes = next();
  group.node_rank = next();
  group.restart = next();
  group.attempt = next();
  for (int left = next(); left > 0; --left) estate.pipes.emplace_back(next(), "CHORUS_STAND_BY");
  group.master_addr = *rest == ' ' ? rest + 1 : rest;
  group.listen_fd = -1;

  prctl(PR_SET_NAME, "stand-by");
  if (const int lives = static_cast<int>(syscall(SYS_pidfd_open, supervisor, 0)); lives >= 0) {
    estate.file.note(JobFile::waits);
    pollfd end{lives, POLLIN, 0};
    while (getppid() == supervisor && poll(&end, 1, -1) < 0) {
    }
    close(lives);
  } else if (errno != ESRCH) {
    system_error("a process that stands by cannot watch its supervisor");
  }
  prctl(PR_SET_NAME, program_invocation_short_name);
  say(format("the process that supervised the ranks (pid %d) was killed; process %d takes its place", supervisor,
             getpid()));
  return estate;
}

/// After the returned object was used: the process is one like any other.
inline void release_signals(const RankGroup& group) {
  const sigset_t held = signals_of(group);
  pthread_sigmask(SIG_UNBLOCK, &held, nullptr);
}

}  // namespace chorus::detail
