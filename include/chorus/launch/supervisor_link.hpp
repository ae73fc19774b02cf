#pragma once
/// A rank's end of the connection to the supervisor that started it.

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include <chorus/core/config.hpp>
#include <chorus/core/say.hpp>
#include <chorus/launch/job_file.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/world_from_environment.hpp>

namespace chorus {

/// Exit status of a rank that failed only because it lost another one (EX_PROTOCOL of sysexits.h).
inline constexpr int lost_peer_status = 76;

/// A rank's connection to the supervisor that started it: the rank ends when the supervisor does, unless the job
/// outlives its ranks (`lives`), and reports the reason when it fails itself. Without a supervisor it does nothing.
class SupervisorLink {
 public:
  /// This process's link, made in the first call. Throws UsageError for invalid variables.
  static const SupervisorLink& of_process() {
    static const SupervisorLink link;
    return link;
  }

  /// Tells the supervisor that this rank has reached `launch`.
  void arrive() const {
    if (file_ >= 0) detail::JobFile::note(file_, detail::JobFile::arrived(local_rank_));
  }

  /// Reports why this rank fails: to the supervisor, which finds the first cause, else on stderr as `chorus: prefix
  /// message`. With a nonzero `status` the rank has failed even if main returns 0.
  void report(std::string_view prefix, std::string_view message, int status) const {
    // Only the first report is kept.
    const std::string stamped =
        detail::RankReport::stamp_of_now(status).append(message.substr(0, detail::JobFile::longest_report - 100));
    const bool noted = file_ >= 0 && !reported_ &&
                       detail::JobFile::write(file_, detail::JobFile::report_at(local_rank_), stamped);
    reported_ = reported_ || noted;
    if (!noted && !message.empty()) detail::say(std::string(prefix).append(message));
  }

  /// Tells the supervisor that the job will outlive its ranks once they have met: if one is killed before, all start
  /// anew.
  void meets() const {
    if (file_ >= 0) detail::JobFile::write(file_, detail::JobFile::life_at(local_rank_), "0 0 ");
  }

  /// Tells the supervisor that the job outlives its ranks, and the supervisor itself: from here on this rank goes on if
  /// that is killed. If this rank is killed, another process is started in its place. `doors`: where living ranks let
  /// newcomers in (see elastic::Processes), HOST:PORT with spaces between them; empty: from here on the job does not
  /// outlive this rank. `rank`: its number in this epoch.
  void lives(std::int64_t epoch, int rank, std::string_view doors) const {
    if (file_ < 0) return;
    detail::JobFile::write(file_, detail::JobFile::life_at(local_rank_),
                           detail::format("%ld %d ", static_cast<long>(epoch), rank).append(doors));
    if (std::exchange(lives_, true)) {
      if (getppid() == supervisor_) kill(supervisor_, SIGCHLD);  // it may let other machines know
      return;
    }
    const auto lock = detail::JobFile::lock_of(local_rank_);
    if (fcntl(file_, F_SETLK, &lock) != 0) return;  // nobody could take it over
    prctl(PR_SET_PDEATHSIG, 0);
    kill(supervisor_, SIGCHLD);  // it reads the file, and starts a process that stands by, in a few milliseconds
    for (int i = 0; i < 200 && !detail::JobFile::noted(file_, detail::JobFile::there); ++i) usleep(1'000);
  }

 private:
  SupervisorLink() {
    const auto supervisor = detail::env_number("CHORUS_SUPERVISOR_PID", 1, INT32_MAX);
    const auto file = detail::env_number("CHORUS_REPORT_FD", 3, detail::most_ranks);
    if (!supervisor || !file) return;
    // The parent may be a script that the supervisor has started: it ends with the supervisor, and this rank with it.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (kill(*supervisor, 0) != 0 && errno == ESRCH) {  // it ended before the line above
      detail::say("the process that started this rank (CHORUS_SUPERVISOR_PID=" + std::to_string(*supervisor) +
                  ") has ended");
      _exit(128 + SIGKILL);
    }
    // Processes that this one starts are not ranks of that supervisor.
    unsetenv("CHORUS_SUPERVISOR_PID");
    unsetenv("CHORUS_REPORT_FD");
    if (!detail::JobFile::is_one(*file)) return;  // a script in between may have closed it and reused its number
    fcntl(*file, F_SETFD, FD_CLOEXEC);
    file_ = *file;
    supervisor_ = *supervisor;
    local_rank_ = detail::env_number("LOCAL_RANK", 0, detail::most_ranks).value_or(0);
  }

  int file_ = -1, supervisor_ = 0, local_rank_ = 0;
  mutable bool reported_ = false, lives_ = false;
};

}  // namespace chorus
