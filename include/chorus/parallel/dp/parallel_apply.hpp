#pragma once
/// Step 3, parallel apply: all devices work at once, each in its own thread.

#include <algorithm>
#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chorus/parallel/dp/thread_batch_group.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus::dp {

/// Runs tasks on the first devices at once. Rethrows the exception of one of them, with its copy's name in front.
///
/// The model's code on a device other than the first may hang, and a thread can't be stopped. The calling thread then
/// throws and leaves that thread running with its tensors; arguments passed by reference must stay alive. The next pass
/// waits for it. The first device works in the calling thread, which can't throw while it hangs: if another device
/// waits for it in SyncBatchNorm, the process ends, five timeouts after that device's own timeout.
class ParallelApply {
 public:
  using Task = DeviceThreads::Task;

  /// `names`: the devices' copies of the model, in errors; `device_ids`: the same in traces. `first_slot`: of this kind
  /// of device. `timeout`: how long the first device waits for the others after it has ended.
  ParallelApply(std::vector<std::string> names, std::vector<int> device_ids, int first_slot,
                std::chrono::milliseconds timeout)
      : names_(std::move(names)),
        device_ids_(std::move(device_ids)),
        first_slot_(first_slot),
        timeout_(timeout),
        groups_(names_, timeout),
        threads_(names_.size()) {}

  DeviceThreads& threads() { return threads_; }

  /// Called at the start of a pass: waits for threads that an earlier pass left running. Throws TimeoutError if one
  /// still has not ended.
  void await() {
    threads_.await(timeout_);
    const auto late = threads_.at_work();
    if (late.empty()) return;
    fail<TimeoutError>("DataParallel: ", names_of(late), " has not returned from an earlier pass; waited ",
                       timeout_.count(), " ms more");
  }

  /// Calls `task(i)` for the first `used` devices. For the library's own code, which always ends.
  void run(std::size_t used, const Task& task) {
    const auto& errors = threads_.run(used, [&](std::size_t i) {
      const trace::PlaceScope place(device_ids_[i]);
      task(i);
    });
    const auto first = std::find_if(errors.begin(), errors.end(), [](const auto& error) { return error != nullptr; });
    if (first != errors.end()) fail_for(static_cast<std::size_t>(first - errors.begin()), errors);
  }

  /// The same for the model's code, in which the copies of a SyncBatchNorm meet; `recorded`: as one graph. If a failure
  /// makes other devices throw, the first error is thrown. The code may never end, so the task must own what it uses.
  void operator()(std::size_t used, Task task, bool recorded = false) {
    groups_.begin(used, recorded);
    threads_.run(used, std::make_shared<const Task>([this, used, task = std::move(task)](std::size_t i) {
                   const trace::PlaceScope place(device_ids_[i]);
                   const detail::Replaced<int> slot(detail::pass_slot, first_slot_ + device_ids_[i]);
                   const ThreadBatchGroups::Membership membership(groups_, used, i);
                   task(i);
                 }),
                 timeout_);
    const auto late = threads_.at_work();
    const auto& errors = threads_.collect();
    const auto culprit = groups_.culprit(used);
    if (!late.empty()) fail_without(late, culprit, errors);
    if (culprit) fail_for(*culprit, errors);
    if (errors[0]) fail_for(0, errors);  // a single device has no group
  }

 private:
  [[noreturn, gnu::cold]] void fail_for(std::size_t i, const DeviceThreads::Errors& errors) const {
    rethrow_with(errors[i], cat("DataParallel: ", names_[i], ": "));
  }

  /// Throws TimeoutError for the devices that are late, with the exception of `culprit` as a possible reason.
  [[noreturn, gnu::cold]] void fail_without(const std::vector<std::size_t>& late, std::optional<std::size_t> culprit,
                                            const DeviceThreads::Errors& errors) const {
    std::string reason;
    try {
      if (culprit && errors[*culprit]) rethrow_with(errors[*culprit], cat("; ", names_[*culprit], ": "));
    } catch (const std::exception& error) {
      reason = error.what();
    } catch (...) {
      reason = cat("; ", names_[*culprit], " threw an exception of another type than std::exception");
    }
    fail<TimeoutError>("DataParallel: ", names_of(late), " did not return within ", timeout_.count(),
                       " ms of the first device", reason,
                       "; its thread can't be stopped: the model can be saved, and the next pass waits for the thread");
  }

  std::string names_of(const std::vector<std::size_t>& devices) const {
    std::string out;
    for (const std::size_t i : devices) out += (out.empty() ? "" : ", ") + names_[i];
    return out;
  }

  std::vector<std::string> names_;
  std::vector<int> device_ids_;
  int first_slot_;
  std::chrono::milliseconds timeout_;
  ThreadBatchGroups groups_;
  DeviceThreads threads_;
};

}  // namespace chorus::dp
