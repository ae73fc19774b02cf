#pragma once
/// One thread per device of a process, which lives from step to step.

#include <atomic>
#include <chorus/core/config.hpp>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::dp {

/// Runs a task for several devices at once. The calling thread serves device 0.
class DeviceThreads {
 public:
  /// The task, given the device's number.
  using Task = std::function<void(std::size_t)>;
  /// The exceptions, by device.
  using Errors = std::vector<std::exception_ptr>;

  /// Throws std::system_error if a thread can't be started; the others are ended.
  explicit DeviceThreads(std::size_t devices);
  /// A thread that is still working is detached.
  ~DeviceThreads();
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls `task(i)` for devices 0 to `count` - 1, each in its own thread, and returns when all have ended. No thread
  /// may be working.
  const Errors& run(std::size_t count, const Task& task);
  /// The same for a task that may never end: after device 0 has ended, waits for the others for at most `patience`.
  /// Threads that are still `at_work` then have no error; they keep the task, which must own what it uses.
  const Errors& run(std::size_t count, std::shared_ptr<const Task> task, std::chrono::milliseconds patience);
  /// The exceptions of the last run so far.
  const Errors& collect();

  /// Waits until no thread is working, but at most for `patience`.
  void await(std::chrono::milliseconds patience) const;
  /// The devices whose threads are working.
  std::vector<std::size_t> at_work() const;

 private:
  // A delegate: once it has run, the destructor ends the started threads if the other constructor throws.
  explicit DeviceThreads(Errors errors) : errors_(std::move(errors)) {}

  static constexpr auto forever = std::chrono::milliseconds::max();

  enum class Order : int { none, work, stop };
  /// Shared between a thread and the object, which the thread may outlive.
  struct Worker {
    std::atomic<Order> order{Order::none};
    std::shared_ptr<const Task> task;
    std::exception_ptr error;
    std::mutex mutex;
    std::condition_variable ended;

    bool at_work() const { return order.load(std::memory_order_acquire) == Order::work; }
  };

  static std::exception_ptr attempt(const Task& task, std::size_t device) noexcept;

  static void serve(Worker& worker, std::size_t device);

  Errors errors_;
  std::vector<std::shared_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
};

}  // namespace chorus::dp

#if !CHORUS_COMPILED
#include <chorus/parallel/dp/device_threads_impl.hpp>
#endif
