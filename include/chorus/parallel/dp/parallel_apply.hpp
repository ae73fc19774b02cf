#pragma once
/// Step 3, parallel apply: all devices work at once, each in a thread of its own.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/parallel/dp/deadline.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chorus/parallel/dp/thread_batch_group.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace chorus::dp {

/// Runs tasks on the first devices at once, and throws what one of them has thrown, with its copy's name in front.
class ParallelApply {
 public:
  using Task = DeviceThreads::Task;

  /// `names`: what errors call each device's copy of the model.
  ParallelApply(std::vector<std::string> names, std::chrono::milliseconds timeout)
      : names_(std::move(names)), deadline_(names_, timeout), groups_(names_, timeout), threads_(names_.size()) {}

  DeviceThreads& threads() { return threads_; }

  /// Before anything else of a pass: no thread is at work any more. Throws TimeoutError where one is.
  void await() { deadline_.await(threads_); }

  /// Calls `task(i)` for the first `used` devices. It is the library's own code, and comes to an end.
  void run(std::size_t used, const Task& task) {
    const auto& errors = threads_.run(used, task);
    const auto first = std::find_if(errors.begin(), errors.end(), [](const auto& error) { return error != nullptr; });
    if (first != errors.end()) fail_for(static_cast<std::size_t>(first - errors.begin()), errors);
  }

  /// The same for the model's code, in which the copies of a SyncBatchNorm meet; `recorded`: as one graph. Where some
  /// throw because one has, its error is thrown. The code may not come to an end: so the task owns what it works with
  /// (see Deadline).
  void operator()(std::size_t used, Task task, bool recorded = false) {
    groups_.begin(used, recorded);
    threads_.run(used, std::make_shared<const Task>([this, used, task = std::move(task)](std::size_t i) {
                   const ThreadBatchGroups::Membership membership(groups_, used, i);
                   task(i);
                 }),
                 deadline_.timeout());
    const auto late = threads_.at_work();
    const auto& errors = threads_.collect();
    const auto culprit = groups_.culprit(used);
    if (!late.empty()) deadline_.fail_without(late, culprit, errors);
    if (culprit) fail_for(*culprit, errors);
    if (errors[0]) fail_for(0, errors);  // one device has no group
  }

 private:
  [[noreturn, gnu::cold]] void fail_for(std::size_t i, const std::vector<std::exception_ptr>& errors) const {
    rethrow_with(errors[i], cat("DataParallel: ", names_[i], ": "));
  }

  std::vector<std::string> names_;
  Deadline deadline_;
  ThreadBatchGroups groups_;
  DeviceThreads threads_;
};

}  // namespace chorus::dp
