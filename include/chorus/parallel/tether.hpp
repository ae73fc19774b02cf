#pragma once
/// The rank's end of the line between a rank and the supervisor that started it.

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include <chorus/core/config.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/message.hpp>
#include <chorus/parallel/world_from_environment.hpp>

namespace chorus::inline CHORUS_ABI {

/// Exit status of a rank that failed only because it lost another one (EX_PROTOCOL of sysexits.h).
inline constexpr int lost_peer_status = 76;

/// A rank's tie to the supervisor that started it: the rank ends when the supervisor does, and hands it the reason when
/// it fails itself. In a process that no supervisor started it is tied to nothing.
class Tether {
 public:
  Tether() {
    const auto supervisor = detail::env_number("CHORUS_SUPERVISOR_PID", 1, INT32_MAX);
    const auto report_fd = detail::env_number("CHORUS_REPORT_FD", 3, detail::most_ranks);
    if (!supervisor || !report_fd) return;
    // The parent may be a script that the supervisor has started: it ends with the supervisor, and this rank with it.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (kill(*supervisor, 0) != 0 && errno == ESRCH) {  // it ended before the line above
      detail::say("the process that started this rank (CHORUS_SUPERVISOR_PID=" + std::to_string(*supervisor) +
                  ") has ended");
      _exit(128 + SIGKILL);
    }
    // What this process starts in turn is no rank of that supervisor.
    unsetenv("CHORUS_SUPERVISOR_PID");
    unsetenv("CHORUS_REPORT_FD");
    struct stat facts {};  // a script in between may have closed it, and its number may mean another file by now
    if (fstat(*report_fd, &facts) != 0 || !S_ISFIFO(facts.st_mode)) return;
    fcntl(*report_fd, F_SETFD, FD_CLOEXEC);
    report_fd_ = *report_fd;
  }

  /// Says why this rank fails: to the supervisor, which tells the first cause from those that follow from it, else on
  /// stderr as `chorus: prefix message`.
  void report(std::string_view prefix, std::string_view message) const {
    // A pipe holds 64 KiB, and nobody reads it before this process has ended.
    message = message.substr(0, 60'000);
    if (report_fd_ < 0 || write(report_fd_, message.data(), message.size()) < 0) {
      detail::say(std::string(prefix).append(message));
    }
  }

 private:
  int report_fd_ = -1;
};

}  // namespace chorus
