#pragma once
/// One thread per device of a process, kept from step to step.

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
  /// What is done for the device of a number.
  using Task = std::function<void(std::size_t)>;
  /// What was thrown, by device.
  using Errors = std::vector<std::exception_ptr>;

  /// Throws std::system_error where a thread can't be started; those that were are ended.
  explicit DeviceThreads(std::size_t devices);
  /// A thread that is still at work goes on by itself.
  ~DeviceThreads();
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls `task(i)` for devices 0 to `count` - 1, each on its own thread, and returns when all have ended. No thread
  /// may be at work.
  const Errors& run(std::size_t count, const Task& task);
  /// The same for a task that may never end: once device 0 has, waits no longer than until `patience` has passed.
  /// Threads that are `at_work` then have no error; they keep the task, which owns what it touches.
  const Errors& run(std::size_t count, std::shared_ptr<const Task> task, std::chrono::milliseconds patience);
  /// What has been thrown in the last run by now.
  const Errors& collect();

  /// Waits until no thread is at work, or until `patience` has passed.
  void await(std::chrono::milliseconds patience) const;
  /// The devices whose threads are.
  std::vector<std::size_t> at_work() const;

 private:
  // With it this is an object whose destructor will run, whatever the other constructor meets.
  explicit DeviceThreads(Errors errors) : errors_(std::move(errors)) {}

  static constexpr auto forever = std::chrono::milliseconds::max();

  enum class Order : int { none, work, stop };
  /// What a thread shares with the object, which it may outlive.
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
