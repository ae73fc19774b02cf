#pragma once
/// `JobFile`: what the ranks of one machine have said to their supervisor. A file in memory: another supervisor can
/// read it after the first one has been killed.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chorus/core/held_signal.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/signal_pipe.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

namespace chorus::detail {

/// A rank's report when it fails: a time stamp before the reason. It identifies the first of several ranks that lost
/// others, independent of the order in which processes end.
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
    const char *begin = text.c_str(), *rest = begin;
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

/// What a rank has last said to SupervisorLink::lives, or ::meets.
struct RankLife {
  bool meets = false;        ///< it has said something
  long epoch = 0, rank = 0;  ///< epoch 0: the ranks have not met so far
  std::string doors;         ///< empty: the job does not outlive it, or no more
};

/// A page of notes, then for each rank a page with its life, and its report. These are texts that a null ends. A limit
/// for files (`ulimit -f`) applies to it, too: a low one costs the reports.
class JobFile {
 public:
  explicit JobFile(Fd file) : file_(std::move(file)) {}
  static JobFile create() { return JobFile(Fd(memfd_create("ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING), "ranks")); }
  /// Whether an inherited descriptor is such a file.
  static bool is_one(int fd) { return fcntl(fd, F_GET_SEALS) == 0; }

  static constexpr off_t page = 4096;
  static constexpr std::size_t longest_report = 60'000;
  static off_t life_at(int local_rank) { return page + (off_t{1} << 16) * local_rank; }
  static off_t report_at(int local_rank) { return life_at(local_rank) + page; }
  /// Rank's and supervisor's: the text and a null.
  static bool write(int fd, off_t at, const std::string& text) {
    const HeldSignal too_long(SIGXFSZ);
    return pwrite(fd, text.c_str(), text.size() + 1, at) >= 0;
  }

  int fd() const { return file_.get(); }
  /// Before a process takes this rank's place.
  void clear(int local_rank) const {
    write(fd(), life_at(local_rank), "");
    write(fd(), report_at(local_rank), "");
    note(arrived(local_rank), false);
  }
  RankReport report_of(int local_rank) const {
    auto report = RankReport::from(read(report_at(local_rank), longest_report));
    report.arrived = noted(fd(), arrived(local_rank));
    return report;
  }
  RankLife life_of(int local_rank) const {
    const auto text = read(life_at(local_rank), page);
    char* rest = const_cast<char*>(text.c_str());
    const long epoch = std::strtol(rest, &rest, 10), rank = std::strtol(rest, &rest, 10);
    return {!text.empty(), epoch, rank, *rest == ' ' ? rest + 1 : ""};
  }

  /// A living rank that has called SupervisorLink::lives holds a lock. Unlike a number that was noted, a lock can't be
  /// another process's.
  static struct flock lock_of(int local_rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = life_at(local_rank);
    lock.l_len = 1;
    return lock;
  }
  /// The process that holds it, or -1.
  pid_t holder(int local_rank) const {
    auto lock = lock_of(local_rank);
    return fcntl(fd(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK ? lock.l_pid : -1;
  }

  /// A process that stands by is there, and waits; the supervisor ends the job; a rank has reached `launch`.
  enum Note : off_t { there, waits, ends, first_arrived = 64 };
  static Note arrived(int local_rank) { return static_cast<Note>(first_arrived + local_rank); }
  void note(Note what, bool set = true) const { note(fd(), what, set); }
  static void note(int fd, Note what, bool set = true) {
    const HeldSignal too_long(SIGXFSZ);
    const char byte = set ? 1 : 0;
    [[maybe_unused]] const auto written = pwrite(fd, &byte, 1, what);
  }
  static bool noted(int fd, Note what) {
    char byte = 0;
    return pread(fd, &byte, 1, what) == 1 && byte != 0;
  }

 private:
  std::string read(off_t at, std::size_t most) const {
    std::string text(most, '\0');
    const auto size = pread(fd(), text.data(), most, at);
    text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    text.resize(std::min(text.find('\0'), text.size()));
    return text;
  }

  Fd file_;
};

}  // namespace chorus::detail
