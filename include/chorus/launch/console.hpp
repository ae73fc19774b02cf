#pragma once
/// `Console`: writes a launcher's output. A reader that stops (Ctrl-S on a terminal, a pipe that nobody reads) does not
/// block the launcher's work for its ranks.

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/core/standard_streams.hpp>
#include <chorus/launch/message.hpp>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace chorus::detail {

/// Returns false, with errno, on failure: a reader that is gone, or a full disk, must not end the ranks.
inline bool write_all(int fd, std::string_view text) {
  const HeldSignal too_long(SIGXFSZ);
  while (!text.empty()) {
    const auto n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EAGAIN) {  // a descriptor shared with others may be non-blocking
      pollfd entry{fd, POLLOUT, 0};
      poll(&entry, 1, -1);
    } else if (n < 0 && errno != EINTR) {
      return false;
    }
    if (n > 0) text.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

/// A thread writes the texts that it is given to standard output and standard error, in order.
///
/// If the reader stops, ranks' output is neither dropped nor kept in memory without limit: `has_room` is false once 1
/// MiB is waiting. RankOutput then stops reading, and a rank that goes on printing blocks, as it would without a
/// launcher. The launcher's own messages, and the output that ended ranks have left in their pipes, are kept up to 64
/// MiB; beyond that they are dropped, and their number of bytes is reported.
class Console {
 public:
  Console() : state_(std::make_shared<State>()) {
    open_standard_streams();
    thread_ = start_thread("console", [state = state_] { state->write_on(); });
  }
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  /// Waits for the reader, as any program that writes.
  ~Console() { finish(std::nullopt); }

  /// Queues `text` for STDOUT_FILENO or STDERR_FILENO; does not wait.
  void write(int fd, std::string text) {
    const std::lock_guard lock(state_->mutex);
    if (state_->bytes + text.size() > most_bytes) {
      state_->dropped += text.size();
      return;
    }
    state_->bytes += text.size();
    state_->queue.push_back({fd, std::move(text)});
    state_->changed.notify_all();
  }
  /// Queues a line of the launcher itself for standard error.
  void say(std::string_view message) { write(STDERR_FILENO, "chorus: " + printable_lines(message) + "\n"); }

  bool has_room() const {
    const std::lock_guard lock(state_->mutex);
    return state_->bytes < enough_bytes;
  }
  /// Waits until there is room, for at most `patience`.
  void wait_for_room(std::chrono::milliseconds patience) const {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, patience, [this] { return state_->bytes < enough_bytes; });
  }

  /// Waits until all is written, for at most `patience` if it is given; the rest is lost. Must be the last call.
  void finish(std::optional<std::chrono::milliseconds> patience) {
    if (!thread_.joinable()) return;
    std::unique_lock lock(state_->mutex);
    state_->ending = true;
    state_->changed.notify_all();
    const auto done = [this] { return state_->done; };
    if (patience) state_->changed.wait_for(lock, *patience, done);
    if (!patience) state_->changed.wait(lock, done);
    const bool written = done();
    lock.unlock();
    if (written) thread_.join();
    if (!written) thread_.detach();  // nothing ends a write to a stopped terminal
  }
  /// The launcher's exit status, after all is written: the job's, or 1 if a successful job has lost some of its output,
  /// except to a reader that closed the pipe.
  int status_after(int status) {
    finish(std::nullopt);
    const std::lock_guard lock(state_->mutex);
    if (status != 0 || state_->error == 0) return status;
    detail::say(format("standard output: not all of it could be written: %s", std::strerror(state_->error)));
    return 1;
  }

 private:
  static constexpr std::size_t enough_bytes = 1 << 20, most_bytes = 64 << 20;

  /// The thread's state, which may outlive the Console.
  struct State {
    struct Text {
      int fd;
      std::string text;
    };
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Text> queue;
    std::size_t bytes = 0, dropped = 0;  ///< queued, including the text being written; dropped
    bool ending = false, done = false;
    int error = 0;  ///< errno if standard output is incomplete

    [[gnu::cold]] void write_on() {
      std::unique_lock lock(mutex);
      while (true) {
        changed.wait(lock, [this] { return !queue.empty() || ending; });
        if (queue.empty()) break;
        const Text next = std::move(queue.front());
        queue.pop_front();
        std::string notice;
        if (queue.empty() && dropped > 0)
          notice = format("chorus: %zu bytes of output were dropped: nobody read them\n", std::exchange(dropped, 0));
        lock.unlock();
        const int failure = write_all(next.fd, next.text) ? 0 : errno;
        write_all(STDERR_FILENO, notice);
        lock.lock();
        if (next.fd == STDOUT_FILENO && failure != EPIPE && error == 0) error = failure;
        bytes -= next.text.size();
        changed.notify_all();
      }
      done = true;
      changed.notify_all();
    }
  };

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace chorus::detail
