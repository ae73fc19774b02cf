#pragma once
/// `NcclAbort`: aborts a failed communicator of NCCL.

#include <chorus/core/blocked_signals.hpp>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

namespace chorus::comm {

/// Aborts a communicator in its own thread. NCCL's abort ends the device's kernels at once, but returns only when no
/// graph that was captured with the communicator exists. The thread that must destroy those graphs may be the one that
/// found the failure, or one that waits for a lock of that thread.
template <class Api>
class NcclAbort {
 public:
  void begin(Api api, typename Api::Comm comm) noexcept {
    try {
      std::promise<void> promise;
      auto future = promise.get_future();
      thread_ = chorus::detail::start_thread("nccl", [api, comm, promise = std::move(promise)]() mutable {
        api.abort(comm);
        promise.set_value();
      });
      ended_ = std::move(future);
    } catch (...) {
      api.abort(comm);  // without a thread: block
    }
  }

  /// Waits for the end of the abort, if one was begun. After `limit` it returns false and leaves the thread running.
  bool finish(std::chrono::milliseconds limit) noexcept {
    if (!thread_.joinable()) return true;
    const bool ended = ended_.wait_for(limit) == std::future_status::ready;
    if (ended)
      thread_.join();
    else
      thread_.detach();
    return ended;
  }

 private:
  std::thread thread_;
  std::future<void> ended_;
};

}  // namespace chorus::comm
