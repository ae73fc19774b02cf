#pragma once
/// `HeldSignal`: around writes that would end the process where they fail.

#include <cerrno>
#include <chorus/core/config.hpp>
#include <csignal>
#include <ctime>

namespace chorus::detail {

/// While it lives, a write of this thread that fails does so with an error alone, and without the signal that would end
/// the process: SIGPIPE (EPIPE, the other end has gone) or SIGXFSZ (EFBIG, `ulimit -f`). Threads that are started
/// meanwhile inherit that for good. The process's handler is left alone, and this thread's mask is as before
/// afterwards.
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
    // What was raised meanwhile waits for this thread, and would be delivered to it now.
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
