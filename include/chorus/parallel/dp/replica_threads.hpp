#pragma once
/// The threads in which a model's copies run, and the errors they throw.

#include <algorithm>
#include <atomic>
#include <chorus/core/error.hpp>
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

namespace chorus::detail {

/// Runs tasks on the first devices at once, and throws what one of them has thrown, with the copy's name before it.
///
/// What the library does itself comes to an end. A model's code may not, and a thread can't be stopped: such a one is
/// left to itself, with all that it works with, and the calling thread throws.
class ReplicaThreads {
 public:
  using Task = DeviceThreads::Task;

  /// `names`: one for each device's copy of the model.
  ReplicaThreads(std::vector<std::string> names, std::chrono::milliseconds timeout)
      : names_(std::move(names)), timeout_(timeout), groups_(names_, timeout), threads_(names_.size()) {}

  DeviceThreads& threads() { return threads_; }

  /// Before anything else of a pass: waits for threads that were left to themselves. Throws TimeoutError for one that
  /// still has not come back.
  void await() {
    threads_.await(timeout_);
    const auto late = threads_.at_work();
    check<TimeoutError>(late.empty(), "DataParallel: ", names_of(late), " has not come back from an earlier pass, ",
                        "which was given up; waited ", timeout_.count(), " ms more");
  }

  /// Calls `task(i)` for the first `used` devices.
  void run(std::size_t used, const Task& task) {
    const auto& errors = threads_.run(used, task);
    const auto first = std::find_if(errors.begin(), errors.end(), [](const auto& error) { return error != nullptr; });
    if (first != errors.end()) fail_for(static_cast<std::size_t>(first - errors.begin()), errors);
  }

  /// The model's own code: for the first `used` devices `prepare(i)`, and then `pass(i)`, in which SyncBatchNorm's
  /// copies meet; `recorded`: as one graph. `prepare` comes to an end; `pass` may not, and owns what it touches. Where
  /// some fail because one has, its error is thrown; TimeoutError names those who have not come back in time.
  void run_together(std::size_t used, bool recorded, const Task& prepare, Task pass) {
    groups_.begin(used, recorded);
    const auto shared = std::make_shared<Shared>();
    shared->pass = std::move(pass);
    threads_.run(used, std::make_shared<const Task>([this, used, &prepare, shared](std::size_t i) {
                   Preparing preparing{shared.get()};
                   const ThreadBatchGroups::Membership membership(groups_, used, i);
                   prepare(i);
                   preparing.end();
                   shared->pass(i);
                 }),
                 timeout_);
    auto late = threads_.at_work();
    if (!late.empty()) {
      for (auto done = shared->prepared.load(); done < used; done = shared->prepared.load())
        shared->prepared.wait(done);
      late = threads_.at_work();
    }
    const auto& errors = threads_.collect();  // of those that have ended meanwhile, too
    if (!late.empty()) fail_without(late, groups_.culprit(used), errors);
    if (const auto culprit = groups_.culprit(used)) fail_for(*culprit, errors);
    if (errors[0]) fail_for(0, errors);  // one device has no group
  }

 private:
  /// What the threads of a pass own together.
  struct Shared {
    Task pass;
    std::atomic<std::size_t> prepared{0};
  };
  /// One thread's part of `prepare`, whether it ends well or not.
  struct Preparing {
    Shared* shared;
    void end() {
      if (shared == nullptr) return;
      ++shared->prepared;
      std::exchange(shared, nullptr)->prepared.notify_all();
    }
    ~Preparing() { end(); }
  };

  [[noreturn, gnu::cold]] void fail_for(std::size_t i, const std::vector<std::exception_ptr>& errors) const {
    rethrow_with(errors[i], cat("DataParallel: ", names_[i], ": "));
  }
  /// What another device has thrown may say why they don't come.
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
  std::string names_of(const std::vector<std::size_t>& devices) const {
    std::string out;
    for (const std::size_t i : devices) out += (out.empty() ? "" : ", ") + names_[i];
    return out;
  }

  std::vector<std::string> names_;
  std::chrono::milliseconds timeout_;
  ThreadBatchGroups groups_;
  DeviceThreads threads_;
};

}  // namespace chorus::detail
