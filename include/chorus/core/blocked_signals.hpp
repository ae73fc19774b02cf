#pragma once
/// `start_thread`: starts the library's threads.

#include <chorus/core/error.hpp>
#include <csignal>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

namespace chorus::detail {

/// Blocks all signals in this thread while it lives, and permanently in threads started meanwhile. Signals then go to
/// the user's threads and to a launcher's supervising thread.
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

/// Starts a thread (std::thread or std::jthread) that takes no signals. Throws `Kind`, in the name of `who`, if the
/// system allows no more threads.
template <class Thread = std::thread, class Kind = CommError, class Body>
Thread start_thread(std::string_view who, Body body) {
  const BlockedSignals blocked;
  try {
    return Thread(std::move(body));
  } catch (const std::system_error& error) {
    fail<Kind>(who, ": a thread cannot be started: ", error.what());
  }
}

}  // namespace chorus::detail
