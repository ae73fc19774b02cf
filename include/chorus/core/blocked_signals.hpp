#pragma once
/// `BlockedSignals`: what a thread of the library starts under.

#include <chorus/core/config.hpp>
#include <csignal>

namespace chorus::inline CHORUS_ABI::detail {

/// Blocks all signals in this thread while it lives, and so for ever in a thread that is started meanwhile: signals are
/// for the threads that the user knows of, and for a launcher's one that supervises.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace chorus::inline CHORUS_ABI::detail
