#pragma once
/// An extension of step 3: what happens where a copy of the model does not come back.

#include <chorus/core/error.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus::dp {

/// The model's code on another device than the first may hang, and a thread can't be stopped. Such a one is left to
/// itself, with all tensors that it works with, and the calling thread throws; other arguments, which it has by
/// reference, should live on. The next pass waits for it. The first device works in the calling thread, where nothing
/// can be thrown if it hangs: others that wait for it in SyncBatchNorm end the process, five deadlines after theirs.
class Deadline {
 public:
  Deadline(std::vector<std::string> names, std::chrono::milliseconds timeout)
      : names_(std::move(names)), timeout_(timeout) {}

  /// How long the first device waits for the others once it has ended.
  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Waits for threads that were left to themselves. Throws TimeoutError for one that still has not come back.
  void await(const DeviceThreads& threads) const {
    threads.await(timeout_);
    const auto late = threads.at_work();
    if (late.empty()) return;
    fail<TimeoutError>("DataParallel: ", names_of(late), " has not come back from an earlier pass, ",
                       "which was given up; waited ", timeout_.count(), " ms more");
  }

  /// Throws TimeoutError for the devices that are late. What `culprit` has thrown may say why they are.
  [[noreturn, gnu::cold]] void fail_without(const std::vector<std::size_t>& late, std::optional<std::size_t> culprit,
                                            const std::vector<std::exception_ptr>& errors) const {
    std::string reason;
    try {
      if (culprit && errors[*culprit]) rethrow_with(errors[*culprit], cat("; ", names_[*culprit], ": "));
    } catch (const std::exception& error) {
      reason = error.what();
    } catch (...) {
      reason = cat("; ", names_[*culprit], " has thrown what is no std::exception");
    }
    fail<TimeoutError>("DataParallel: ", names_of(late), " did not come back within ", timeout_.count(),
                       " ms of the first device", reason, ". A thread can't be stopped: it is left to itself; the ",
                       "model can be saved, and the next pass waits for the thread");
  }

 private:
  std::string names_of(const std::vector<std::size_t>& devices) const {
    std::string out;
    for (const std::size_t i : devices) out += (out.empty() ? "" : ", ") + names_[i];
    return out;
  }

  std::vector<std::string> names_;
  std::chrono::milliseconds timeout_;
};

}  // namespace chorus::dp
