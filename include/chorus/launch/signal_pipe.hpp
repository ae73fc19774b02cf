#pragma once
/// Owned file descriptors, and signals as bytes in a pipe, for a process that waits for others.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/launch/message.hpp>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus::detail {

inline std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? format("SIG%s", name) : format("signal %d", signal);
}

[[noreturn]] inline void system_error(const char* what, int error = errno) {
  throw Error(format("launch: %s: %s", what, std::strerror(error)));
}

/// An owned file descriptor. It is closed on exec, and never 0, 1 or 2, even if one of these was closed.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd, const char* what) {
    if (fd < 0) system_error(what);
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    const int error = errno;
    close(fd);
    if (fd_ < 0) system_error(what, error);
  }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  void reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

struct Pipe {
  Fd read_end, write_end;
  Pipe() {
    int ends[2] = {-1, -1};
    const bool ok = pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0;
    read_end = Fd(ok ? ends[0] : -1, "pipe");
    write_end = Fd(ends[1], "pipe");
  }
  /// The same pipe again, by an end to read from.
  explicit Pipe(Fd reader) : read_end(std::move(reader)) {
    const auto path = format("/proc/self/fd/%d", read_end.get());
    write_end = Fd(open(path.c_str(), O_WRONLY | O_CLOEXEC), path.c_str());
  }
};

/// Delivers signals as numbers in a pipe while it lives: SIGCHLD and the given ones. An ignored SIGHUP (nohup) stays
/// ignored.
class SignalPipe {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit SignalPipe(std::vector<int> signals) : watched_(std::move(signals)) {
    watched_.push_back(SIGCHLD);
    before_.resize(watched_.size());
    write_end() = pipe_.write_end.get();
    struct sigaction action {};
    action.sa_handler = [](int signal) {
      const int error = errno;
      const auto byte = static_cast<unsigned char>(signal);
      [[maybe_unused]] const auto written = write(write_end(), &byte, 1);
      errno = error;
    };
    action.sa_flags = SA_RESTART;
    sigset_t ours;
    sigemptyset(&ours);
    for (std::size_t i = 0; i < watched_.size(); ++i) {
      sigaction(watched_[i], nullptr, &before_[i]);
      if (watched_[i] == SIGHUP && before_[i].sa_handler == SIG_IGN) continue;
      sigaction(watched_[i], &action, nullptr);
      sigaddset(&ours, watched_[i]);
    }
    pthread_sigmask(SIG_UNBLOCK, &ours, &mask_before_);
  }
  ~SignalPipe() {
    for (std::size_t i = 0; i < watched_.size(); ++i) sigaction(watched_[i], &before_[i], nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
    while (const int signal = wait(std::chrono::steady_clock::now())) {  // it came after the last read
      if (signal != SIGCHLD && signal != woken) raise(signal);
    }
  }
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  /// Makes `wait` return `woken`; any thread may call it.
  void wake() const { [[maybe_unused]] const auto written = write(pipe_.write_end.get(), &woken, 1); }
  static constexpr unsigned char woken = 255;

  /// The next signal, or 0 at the deadline. `processes`: pidfds; the end of one of them counts as SIGCHLD.
  int wait(std::optional<Time> deadline, const std::vector<int>& processes = {}) {
    std::vector<pollfd> events{{pipe_.read_end.get(), POLLIN, 0}};
    for (const int process : processes) events.push_back({process, POLLIN, 0});
    while (true) {
      unsigned char signal = 0;
      if (read(pipe_.read_end.get(), &signal, 1) == 1) return signal;
      int milliseconds = -1;
      if (deadline) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - std::chrono::steady_clock::now());
        if (left.count() <= 0) return 0;
        milliseconds = static_cast<int>(std::min<std::chrono::milliseconds::rep>(left.count(), 1'000'000));
      }
      if (poll(events.data(), events.size(), milliseconds) > 0 && events[0].revents == 0) return SIGCHLD;
    }
  }

 private:
  static int& write_end() {
    static int fd = -1;
    return fd;
  }

  Pipe pipe_;
  std::vector<int> watched_;
  std::vector<struct sigaction> before_;
  sigset_t mask_before_{};
};

}  // namespace chorus::detail
