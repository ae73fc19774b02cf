#pragma once
/// `SigpipeBlock`: around libraries that write to sockets without MSG_NOSIGNAL.

#include <pthread.h>

#include <cerrno>
#include <chorus/core/config.hpp>
#include <csignal>
#include <ctime>

namespace chorus::inline CHORUS_ABI::comm {

/// While it lives, a write of this thread to a connection whose other end is gone fails with EPIPE and raises no
/// SIGPIPE, which would end the process. Threads that are started meanwhile inherit that for good. The process's
/// handler of the signal is left alone, and this thread's mask is as before afterwards.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;
  ~SigpipeBlock() {
    const int error = errno;
    const timespec at_once{};
    // What was raised meanwhile waits for this thread, and would be delivered to it now.
    while (!was_pending_ && sigtimedwait(&sigpipe_, nullptr, &at_once) == -1 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_ = false;
};

}  // namespace chorus::inline CHORUS_ABI::comm
