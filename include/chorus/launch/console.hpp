#pragma once
/// `Console`: what a launcher writes for its reader, who may stand still (Ctrl-S on a terminal, a pipe that nobody
/// reads) without keeping the launcher from its ranks.

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

/// False, with errno, where it failed: a reader that has gone, or a full disk, does not end the ranks.
inline bool write_all(int fd, std::string_view text) {
  const HeldSignal too_long(SIGXFSZ);
  while (!text.empty()) {
    const auto n = ::write(fd, text.data(), text.size());
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

/// A thread writes to standard output and standard error what others hand it, in their order.
///
/// Where the reader stands still, ranks' output is not dropped, nor does it fill the memory: `has_room` is false once
/// 1 MiB waits, RankOutput stops reading, and a rank that goes on printing waits, as it would without a launcher. What
/// has to be said nevertheless (the launcher's own messages, and what ended ranks have left in their pipes) is kept up
/// to 64 MiB; beyond these it is dropped, and the number of bytes told.
class Console {
 public:
  Console() : state_(std::make_shared<State>()) {
    open_standard_streams();
    thread_ = start_thread("console", [state = state_] { state->write_on(); });
  }
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  /// Waits for the reader, as any program does that writes.
  ~Console() { finish(std::nullopt); }

  /// Hands over `text` for STDOUT_FILENO or STDERR_FILENO; does not wait.
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
  /// A line of the launcher's own on standard error.
  void say(std::string_view message) { write(STDERR_FILENO, "chorus: " + printable_lines(message) + "\n"); }

  bool has_room() const {
    const std::lock_guard lock(state_->mutex);
    return state_->bytes < enough_bytes;
  }
  /// Waits until there is room, or that long.
  void wait_for_room(std::chrono::milliseconds patience) const {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, patience, [this] { return state_->bytes < enough_bytes; });
  }

  /// Waits until all is written, at most as long as `patience` says; what is left then is lost. The last call.
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
    if (!written) thread_.detach();  // nothing ends a write to a terminal that stands still
  }
  /// The launcher's exit status, once all is written: that of the job, but 1 where a job that went well has lost some
  /// of its output, and not to a reader that wanted no more.
  int status_after(int status) {
    finish(std::nullopt);
    const std::lock_guard lock(state_->mutex);
    if (status != 0 || state_->error == 0) return status;
    detail::say(format("standard output: not all of it could be written: %s", std::strerror(state_->error)));
    return 1;
  }

 private:
  static constexpr std::size_t enough_bytes = 1 << 20, most_bytes = 64 << 20;

  /// The thread's: it may outlive the Console.
  struct State {
    struct Text {
      int fd;
      std::string text;
    };
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Text> queue;
    std::size_t bytes = 0, dropped = 0;  ///< in the queue, the text that is being written included; not taken
    bool ending = false, done = false;
    int error = 0;  ///< why standard output is not complete

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
