#pragma once
/// `HeldSignal`: for writes whose failure would kill the process by a signal.

#include <cerrno>
#include <chorus/core/config.hpp>
#include <csignal>
#include <ctime>

namespace chorus::detail {

/// While it lives, a failing write of this thread only returns an error and does not raise the signal that would kill
/// the process: SIGPIPE (EPIPE, no reader) or SIGXFSZ (EFBIG, `ulimit -f`). Threads started meanwhile inherit the mask
/// permanently. The process's handler is unchanged; the thread's mask is restored at the end.
class HeldSignal {
 public:
  explicit HeldSignal(int signal) {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, signal) == 1;
    sigemptyset(&held_);
    sigaddset(&held_, signal);
    pthread_sigmask(SIG_BLOCK, &held_, &before_);
  }
  HeldSignal(const HeldSignal&) = delete;
  HeldSignal& operator=(const HeldSignal&) = delete;
  ~HeldSignal() {
    const int error = errno;
    const timespec at_once{};
    // A signal raised meanwhile is pending for this thread and would be delivered now.
    while (!was_pending_ && sigtimedwait(&held_, nullptr, &at_once) == -1 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }

 private:
  sigset_t held_, before_;
  bool was_pending_ = false;
};

}  // namespace chorus::detail
