#pragma once
/// `RankOutput`: what ranks print, line by line, with the rank in front, and into a file per rank.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <chorus/parallel/message.hpp>
#include <chorus/parallel/signal_pipe.hpp>

namespace chorus::inline CHORUS_ABI::detail {

/// A thread passes lines on to standard output, as `[rank N] line`, where the rank is to be shown, and as they are to
/// `folder`/rank_N.log where there is a folder. Whole lines go out in one write, so that those of several ranks don't
/// mix.
class RankOutput {
 public:
  explicit RankOutput(std::string folder) : folder_(std::move(folder)) {
    std::error_code error;
    if (!folder_.empty()) std::filesystem::create_directories(folder_, error);
    if (error) throw FileError(format("log folder %s: %s", folder_.c_str(), error.message().c_str()));
  }
  RankOutput(const RankOutput&) = delete;
  RankOutput& operator=(const RankOutput&) = delete;
  /// Waits for the rest of the output, but not for a process that a rank has left behind.
  ~RankOutput() {
    ending_.store(true);
    if (thread_.joinable()) thread_.join();
  }

  /// Where a rank's output has to go. Before `start`.
  Fd add(int rank, bool shown) {
    Pipe pipe;
    fcntl(pipe.write_end.get(), F_SETFL, fcntl(pipe.write_end.get(), F_GETFL) & ~O_NONBLOCK);  // the rank's end waits
    Source source{rank, shown, std::move(pipe.read_end), {}, {}};
    if (!folder_.empty()) {
      const auto path = format("%s/rank_%d.log", folder_.c_str(), rank);
      source.log = Fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644), path.c_str());
    }
    sources_.push_back(std::move(source));
    return std::move(pipe.write_end);
  }

  void start() {
    sigset_t all, before;  // signals are for the supervisor's thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { pump(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

 private:
  struct Source {
    int rank;
    bool shown;
    Fd pipe, log;
    std::string line;  ///< without its end so far
  };

  void pump() {
    std::vector<pollfd> events(sources_.size());
    for (std::size_t open = sources_.size(); open > 0 && !ending_.load();) {
      for (std::size_t i = 0; i < events.size(); ++i) events[i] = {sources_[i].pipe.get(), POLLIN, 0};
      poll(events.data(), events.size(), 50);
      for (std::size_t i = 0; i < events.size(); ++i) {
        if (events[i].fd < 0 || events[i].revents == 0 || read_some(sources_[i])) continue;
        sources_[i].pipe.reset();
        --open;
      }
    }
    for (auto& source : sources_) {
      // What the ranks wrote is in the pipes. A process that one of them has left behind may go on writing for ever.
      int there = 0;
      if (source.pipe.get() >= 0) ioctl(source.pipe.get(), FIONREAD, &there);
      while (there > 0 && read_some(source, &there)) {
      }
      if (!source.line.empty()) print(source, source.line + "\n");
    }
  }

  /// False at the end. `left`, if given, is reduced by what was read.
  bool read_some(Source& source, int* left = nullptr) {
    char part[65536];
    const auto n = read(source.pipe.get(), part, sizeof part);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    if (left) *left -= static_cast<int>(n);
    source.line.append(part, static_cast<std::size_t>(n));
    const auto end = source.line.rfind('\n');
    if (end == std::string::npos && source.line.size() < longest_line) return true;
    const auto whole = end == std::string::npos ? source.line.size() : end + 1;
    print(source, std::string_view(source.line).substr(0, whole));
    source.line.erase(0, whole);
    return true;
  }

  static void print(Source& source, std::string_view lines) {
    if (source.log.get() >= 0 && !write_all(source.log.get(), lines)) {
      say(format("rank %d's log is not complete: %s", source.rank, std::strerror(errno)));
      source.log.reset();
    }
    if (!source.shown) return;
    std::string text;
    while (!lines.empty()) {
      const auto line = lines.substr(0, lines.find('\n') + 1);
      const auto whole = line.empty() ? lines : line;
      text += format("[rank %d] ", source.rank);
      text.append(whole);
      if (whole.back() != '\n') text += '\n';
      lines.remove_prefix(whole.size());
    }
    write_all(STDOUT_FILENO, text);
  }

  /// False where it failed: a reader that has gone, or a full disk, does not end the ranks.
  static bool write_all(int fd, std::string_view text) {
    while (!text.empty()) {
      const auto n = write(fd, text.data(), text.size());
      if (n < 0 && errno == EAGAIN) {  // what we share with others may be non-blocking
        pollfd entry{fd, POLLOUT, 0};
        poll(&entry, 1, -1);
      } else if (n < 0 && errno != EINTR) {
        return false;
      }
      if (n > 0) text.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }

  static constexpr std::size_t longest_line = 1 << 20;

  std::string folder_;
  std::vector<Source> sources_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace chorus::inline CHORUS_ABI::detail
