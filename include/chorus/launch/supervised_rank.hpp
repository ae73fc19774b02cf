#pragma once
/// `SupervisedRank`: one rank, as its supervisor knows it.

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chorus/launch/job_file.hpp>
#include <chorus/launch/rank_output.hpp>
#include <chorus/launch/signal_pipe.hpp>
#include <chorus/launch/supervisor_link.hpp>
#include <chrono>
#include <optional>
#include <string>

namespace chorus::detail {

/// A child of this process, or one that it has taken over: that is not its child, so only its words say how it ended.
struct SupervisedRank {
  pid_t pid = -1;
  bool running = false, adopted = false;
  Fd end;  ///< an adopted one's pidfd, or none if it has ended
  int wait_status = 0;
  RankReport report;  ///< after it has ended
  RankOutput::Streams streams;
  bool replaces = false;                                        ///< whether it has taken a lost one's place
  bool told = false;                                            ///< whether its loss has been reported
  long led = 0;                                                 ///< the epoch whose rank 0 was lost here
  std::optional<std::chrono::steady_clock::time_point> vacant;  ///< when another process may take its place

  void adopt(const JobFile& file, int local_rank) {
    running = adopted = true;
    pid = file.holder(local_rank);
    const int fd = pid < 0 ? -1 : static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (fd >= 0) end = Fd(fd, "pidfd_open");
    if (file.holder(local_rank) != pid) end.reset();  // it has ended meanwhile: the number may be another's
    replaces = file.life_of(local_rank).epoch == 0;   // it was about to join, and has ended with its supervisor
  }

  /// Then `wait_status` and `report` are known.
  bool has_ended(const JobFile& file, int local_rank) {
    if (adopted) {
      pollfd event{end.get(), POLLIN, 0};
      if (event.fd >= 0 && poll(&event, 1, 0) <= 0) return false;
    } else if (waitpid(pid, &wait_status, WNOHANG) != pid) {
      return false;
    }
    report = file.report_of(local_rank);
    if (!adopted) return true;
    const auto life = file.life_of(local_rank);
    const bool has_left = life.epoch > 0 && life.doors.empty();
    if (report.status != 0 || !report.message.empty())
      wait_status = (report.status != 0 ? report.status : lost_peer_status) << 8;  // as if it had exited with it
    else
      wait_status = has_left ? 0 : SIGKILL;
    return true;
  }

  void send(int signal) const {
    if (!adopted) kill(pid, signal);
    if (end.get() >= 0) syscall(SYS_pidfd_send_signal, end.get(), signal, nullptr, 0);
  }

  bool lost_peers() const { return WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == lost_peer_status; }
  std::string killed() const { return adopted ? "was killed" : "was killed by " + signal_name(WTERMSIG(wait_status)); }
  /// How long to wait for a better explanation. A rank that lost another one may end before that one does; and Ctrl-C
  /// reaches the ranks as soon as the supervisor.
  std::chrono::milliseconds patience() const {
    using Milliseconds = std::chrono::milliseconds;
    if (WIFEXITED(wait_status)) return Milliseconds(lost_peers() ? 1'000 : 0);
    const int signal = WTERMSIG(wait_status);
    return Milliseconds(signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT ? 50 : 0);
  }
};

}  // namespace chorus::detail
