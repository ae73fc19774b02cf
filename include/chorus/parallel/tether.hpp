#pragma once
/// The rank's end of the line between a rank and the supervisor that started it.

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
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

namespace detail {

/// What a rank has to say when it fails. In the pipe a stamp stands in front: of several ranks that could not
/// go on without others, the first to fail is known by it, not by the order in which processes end.
struct RankReport {
  std::int64_t when = INT64_MAX;  ///< in ticks of the clock that all processes of a machine share
  std::string message;

  static std::string stamp_of_now() {
    return std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()) + ' ';
  }
  /// Of one that says nothing `when` is the latest time there is.
  static RankReport from(const std::string& text) {
    char* end = nullptr;
    const auto when = std::strtoll(text.c_str(), &end, 10);
    const auto length = static_cast<std::size_t>(end - text.c_str());
    if (length == 0 || *end != ' ') return {INT64_MAX, text};
    return {when, text.substr(length + 1)};
  }
};

}  // namespace detail

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
    const std::string stamped = detail::RankReport::stamp_of_now().append(message);
    if (report_fd_ < 0 || write(report_fd_, stamped.data(), stamped.size()) < 0) {
      detail::say(std::string(prefix).append(message));
    }
  }

 private:
  int report_fd_ = -1;
};

}  // namespace chorus
