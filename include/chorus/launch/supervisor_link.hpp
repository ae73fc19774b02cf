#pragma once
/// A rank's end of the connection to the supervisor that started it.

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
#include <chorus/launch/message.hpp>
#include <chorus/launch/world_from_environment.hpp>

namespace chorus {

/// Exit status of a rank that failed only because it lost another one (EX_PROTOCOL of sysexits.h).
inline constexpr int lost_peer_status = 76;

namespace detail {

/// What each rank has of the supervisor's file for SupervisorLink::lives.
inline constexpr int doors_bytes = 4096;

/// A rank's report. The pipe holds a `+` if the rank has reached `launch`, then, when it fails, a time stamp before the
/// reason: it identifies the first of several ranks that lost others, independent of the order in which processes end.
struct RankReport {
  bool arrived = false;           ///< whether it has reached its call of `launch`
  std::int64_t when = INT64_MAX;  ///< in ticks of the machine's common clock
  int status = 0;                 ///< of `launch`, which main may have ignored; or 0
  std::string message;

  static std::string stamp_of_now(int status) {
    return format("%lld %d ", static_cast<long long>(std::chrono::steady_clock::now().time_since_epoch().count()),
                  status);
  }
  /// A rank without a report gets the latest possible `when`.
  static RankReport from(const std::string& text) {
    RankReport report;
    report.arrived = text.starts_with('+');
    const char *begin = text.c_str() + report.arrived, *rest = begin;
    char* end = nullptr;
    const auto when = std::strtoll(begin, &end, 10);
    bool stamped = end != begin && *end == ' ';
    if (stamped) rest = end + 1;
    const auto status = std::strtol(rest, &end, 10);
    stamped = stamped && end != rest && *end == ' ';
    // An exit status keeps only the lowest byte, which may be 0.
    const int known = status >= 0 && status <= 255 ? static_cast<int>(status) : 1;
    if (stamped) report.when = when, report.status = known, begin = end + 1;
    report.message.assign(begin, text.c_str() + text.size());
    return report;
  }
};

}  // namespace detail

/// A rank's connection to the supervisor that started it: the rank ends when the supervisor does, and reports the
/// reason when it fails itself. Without a supervisor it does nothing.
class SupervisorLink {
 public:
  /// This process's link, made in the first call. Throws UsageError for invalid variables.
  static const SupervisorLink& of_process() {
    static const SupervisorLink link;
    return link;
  }

  /// Tells the supervisor that this rank has reached `launch`.
  void arrive() const {
    if (report_fd_ >= 0) [[maybe_unused]]
      const auto written = write(report_fd_, "+", 1);
  }

  /// Reports why this rank fails: to the supervisor, which finds the first cause, else on stderr as `chorus: prefix
  /// message`. With a nonzero `status` the rank has failed even if main returns 0.
  void report(std::string_view prefix, std::string_view message, int status) const {
    // A pipe holds 64 KiB and is read only after this process has ended: only the first report is written.
    const std::string stamped = detail::RankReport::stamp_of_now(status).append(message.substr(0, 60'000));
    const bool piped = report_fd_ >= 0 && !reported_ && write(report_fd_, stamped.data(), stamped.size()) >= 0;
    reported_ = reported_ || piped;
    if (!piped && !message.empty()) detail::say(std::string(prefix).append(message));
  }

  /// Tells the supervisor that the job outlives its ranks. If this one is killed, another process is started in its
  /// place. `doors`: where living ranks let newcomers in (see elastic::Processes), HOST:PORT with spaces between them;
  /// empty: from here on the job does not outlive this rank. `rank`: its number in this epoch.
  void lives(std::int64_t epoch, int rank, std::string_view doors) const {
    if (doors_fd_ < 0) return;
    const std::string text = detail::format("%ld %d ", static_cast<long>(epoch), rank).append(doors).append(1, '\0');
    [[maybe_unused]] const auto written = pwrite(doors_fd_, text.data(), text.size(), doors_at_);
  }

 private:
  SupervisorLink() {
    const auto supervisor = detail::env_number("CHORUS_SUPERVISOR_PID", 1, INT32_MAX);
    const auto report_fd = detail::env_number("CHORUS_REPORT_FD", 3, detail::most_ranks);
    const auto doors_fd = detail::env_number("CHORUS_DOORS_FD", 3, detail::most_ranks);
    if (!supervisor || !report_fd) return;
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
    unsetenv("CHORUS_DOORS_FD");
    struct stat facts {};  // a script in between may have closed it and reused its number
    if (fstat(*report_fd, &facts) != 0 || !S_ISFIFO(facts.st_mode)) return;
    fcntl(*report_fd, F_SETFD, FD_CLOEXEC);
    report_fd_ = *report_fd;
    if (!doors_fd || fcntl(*doors_fd, F_GET_SEALS) < 0) return;  // not the supervisor's file
    fcntl(*doors_fd, F_SETFD, FD_CLOEXEC);
    doors_fd_ = *doors_fd;
    doors_at_ = detail::doors_bytes * detail::env_number("LOCAL_RANK", 0, detail::most_ranks).value_or(0);
  }

  int report_fd_ = -1, doors_fd_ = -1;
  off_t doors_at_ = 0;
  mutable bool reported_ = false;
};

}  // namespace chorus
