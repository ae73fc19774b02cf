#pragma once
/// `RankOutput`: the destinations of ranks' output: the reader, with the rank in front, and files.

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/launch/console.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/rank_process.hpp>
#include <chorus/launch/signal_pipe.hpp>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::detail {

/// A stream that is shown is a pipe; a thread passes whole lines to the console, as `[rank N] line`, and to the
/// stream's file, if there is one. A stream that goes only to a file is that file; one that is shown unchanged is the
/// launcher's own. At most one line per stream is buffered, up to 1 MiB.
class RankOutput {
 public:
  /// Creates this attempt's folder if files are requested. `pipes`: those of a supervisor whose ranks are taken over,
  /// see `pipes()`. Throws FileError.
  RankOutput(const RankGroup& group, Console& console, std::vector<Fd> pipes = {})
      : group_(group), console_(console), pipes_(std::move(pipes)) {
    if (group.log_dir.empty()) return;
    folder_ = format("%s/attempt_%d", group.log_dir.c_str(), group.attempt);
    std::error_code error;
    std::filesystem::create_directories(folder_, error);
    if (error) throw FileError(format("log folder %s: %s", folder_.c_str(), error.message().c_str()));
  }
  RankOutput(const RankOutput&) = delete;
  RankOutput& operator=(const RankOutput&) = delete;
  /// Waits until the ranks' output is passed on, but not for processes that a rank has left behind, nor for the reader.
  ~RankOutput() {
    ending_.store(true);
    if (thread_.joinable()) thread_.join();
  }

  /// A rank's standard output and standard error; empty for the launcher's own.
  struct Streams {
    Fd out, err;
  };
  /// Call it before `start`.
  Streams add(int local_rank) {
    const int redirected = at(group_.redirects, local_rank), teed = at(group_.tee, local_rank);
    const int rank = group_.node_rank * group_.ranks + local_rank;
    const bool shown = group_.shown.empty() || std::ranges::count(group_.shown, local_rank) > 0;
    const auto file = [&](const char* name) { return format("%s/rank_%d.%s", folder_.c_str(), rank, name); };
    if (group_.redirects.empty() && group_.tee.empty()) {  // both streams are one
      const bool prefix = group_.prefix || !group_.shown.empty() || !folder_.empty();
      Streams both{stream(rank, folder_.empty() ? "" : file("log"), shown, prefix, STDOUT_FILENO), {}};
      if (both.out.get() >= 0) both.err = Fd(dup(both.out.get()), "dup");
      return both;
    }
    const auto one = [&](int bit, const char* name, int shown_on) {
      const bool in_file = (redirected | teed) & bit, on_console = shown && ((teed & bit) != 0 || !in_file);
      const bool prefix = group_.prefix || !group_.shown.empty() || in_file;
      return stream(rank, in_file ? file(name) : "", on_console, prefix, shown_on);
    };
    return {one(1, "stdout.log", STDOUT_FILENO), one(2, "stderr.log", STDERR_FILENO)};
  }

  /// For a process that stands by: the ends to read from of all pipes, in the order in which `add` has made them.
  const std::vector<Fd>& pipes() const { return pipes_; }

  void start() {
    if (!sources_.empty()) thread_ = start_thread("ranks' output", [this] { pump(); });
  }

 private:
  struct Source {
    int rank, shown_on;
    Fd pipe, log;
    std::string line;  ///< an incomplete line
  };

  static int at(const std::vector<int>& list, int local_rank) {
    const auto i = static_cast<std::size_t>(local_rank);
    return i < list.size() ? list[i] : 0;
  }

  /// A rank's stream; `path` is empty if it has no file.
  Fd stream(int rank, const std::string& path, bool shown, bool prefix, int shown_on) {
    Fd log;
    if (!path.empty())  // append: the folder may hold logs of an earlier job
      log = Fd(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644), path.c_str());
    if (!shown && path.empty()) return Fd(open("/dev/null", O_WRONLY | O_CLOEXEC), "/dev/null");
    if (!shown || (path.empty() && !prefix)) return log;
    const bool inherited = sources_.size() < pipes_.size();
    if (!inherited) pipes_.emplace_back();
    Fd& kept = pipes_[sources_.size()];
    Pipe pipe = inherited ? Pipe(std::move(kept)) : Pipe();
    kept = Fd(fcntl(pipe.read_end.get(), F_DUPFD_CLOEXEC, 3), "dup");
    fcntl(pipe.write_end.get(), F_SETFL, fcntl(pipe.write_end.get(), F_GETFL) & ~O_NONBLOCK);  // the rank's end blocks
    sources_.push_back({rank, shown_on, std::move(pipe.read_end), std::move(log), {}});
    return std::move(pipe.write_end);
  }

  [[gnu::cold]] void pump() {
    std::vector<pollfd> events(sources_.size());
    for (std::size_t open = sources_.size(); open > 0 && !ending_.load();) {
      if (!console_.has_room()) {  // the pipes fill up, then the ranks block
        console_.wait_for_room(std::chrono::milliseconds(50));
        continue;
      }
      for (std::size_t i = 0; i < events.size(); ++i) events[i] = {sources_[i].pipe.get(), POLLIN, 0};
      poll(events.data(), events.size(), 50);
      for (std::size_t i = 0; i < events.size(); ++i) {
        if (events[i].fd < 0 || events[i].revents == 0 || read_some(sources_[i])) continue;
        sources_[i].pipe.reset();
        --open;
      }
    }
    for (auto& source : sources_) {
      // The ranks' output is in the pipes. A process that a rank has left behind may go on writing for ever.
      int there = 0;
      if (source.pipe.get() >= 0) ioctl(source.pipe.get(), FIONREAD, &there);
      while (there > 0 && read_some(source, &there)) {
      }
      if (!source.line.empty()) print(source, source.line + "\n");
    }
  }

  /// Returns false at the end. `left`, if given, is reduced by the bytes read.
  bool read_some(Source& source, int* left = nullptr) {
    char buffer[65536];
    const auto n = read(source.pipe.get(), buffer, sizeof buffer);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    if (left) *left -= static_cast<int>(n);
    source.line.append(buffer, static_cast<std::size_t>(n));
    const auto end = source.line.rfind('\n');
    if (end == std::string::npos && source.line.size() < longest_line) return true;
    const auto whole = end == std::string::npos ? source.line.size() : end + 1;
    print(source, std::string_view(source.line).substr(0, whole));
    source.line.erase(0, whole);
    return true;
  }

  [[gnu::cold]] void print(Source& source, std::string_view lines) {
    if (source.log.get() >= 0 && !write_all(source.log.get(), lines)) {
      console_.say(format("rank %d's log is not complete: %s", source.rank, std::strerror(errno)));
      source.log.reset();
    }
    std::string text;
    while (!lines.empty()) {
      const auto line = lines.substr(0, lines.find('\n') + 1);
      const auto whole = line.empty() ? lines : line;
      text += format("[rank %d] ", source.rank);
      text.append(whole);
      if (whole.back() != '\n') text += '\n';
      lines.remove_prefix(whole.size());
    }
    console_.write(source.shown_on, std::move(text));
  }

  static constexpr std::size_t longest_line = 1 << 20;

  const RankGroup& group_;
  Console& console_;
  std::string folder_;
  std::vector<Source> sources_;
  std::vector<Fd> pipes_;  ///< a copy for each of them
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace chorus::detail
