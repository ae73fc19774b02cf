#pragma once
/// The threads in which a model's copies run, and the errors they throw.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/parallel/device_threads.hpp>
#include <chorus/parallel/thread_batch_group.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

/// Runs tasks on the first devices at once, and throws what one of them has thrown, with the copy's name before it.
class ReplicaThreads {
 public:
  /// `names`: one for each device's copy of the model.
  ReplicaThreads(std::vector<std::string> names, std::chrono::milliseconds timeout)
      : names_(std::move(names)), groups_(names_, timeout), threads_(names_.size()) {}

  DeviceThreads& threads() { return threads_; }

  /// Calls `task(i)` for the first `used` devices.
  template <class Task>
  void run(std::size_t used, const Task& task) {
    const auto& errors = threads_.run(used, task);
    const auto first = std::find_if(errors.begin(), errors.end(), [](const auto& error) { return error != nullptr; });
    if (first != errors.end()) fail_for(static_cast<std::size_t>(first - errors.begin()), errors);
  }
  /// The same for tasks in which SyncBatchNorm's copies meet; `recorded`: as one graph. Where some fail because one
  /// has, its error is thrown.
  template <class Task>
  void run_together(std::size_t used, bool recorded, const Task& task) {
    groups_.begin(used, recorded);
    const auto& errors = threads_.run(used, [&](std::size_t i) {
      const ThreadBatchGroups::Membership membership(groups_, used, i);
      task(i);
    });
    if (const auto culprit = groups_.culprit(used)) fail_for(*culprit, errors);
    if (errors[0]) fail_for(0, errors);  // one device has no group
  }

 private:
  [[noreturn, gnu::cold]] void fail_for(std::size_t i, const std::vector<std::exception_ptr>& errors) const {
    rethrow_with(errors[i], cat("DataParallel: ", names_[i], ": "));
  }

  std::vector<std::string> names_;
  ThreadBatchGroups groups_;
  DeviceThreads threads_;
};

}  // namespace chorus::inline CHORUS_ABI::detail
