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
  explicit DeviceThreads(std::size_t devices) : DeviceThreads(Errors(devices)) {
    for (std::size_t i = 1; i < devices; ++i) {
      workers_.push_back(std::make_shared<Worker>());
      threads_.emplace_back([worker = workers_.back(), i] { serve(*worker, i); });
    }
  }
  /// A thread that is still at work goes on by itself.
  ~DeviceThreads() {
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      const bool at_work = workers_[i]->order.exchange(Order::stop) == Order::work;
      workers_[i]->order.notify_one();
      if (at_work)
        threads_[i].detach();
      else
        threads_[i].join();
    }
  }
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls `task(i)` for devices 0 to `count` - 1, each on its own thread, and returns when all have ended. No thread
  /// may be at work.
  const Errors& run(std::size_t count, const Task& task) {
    return run(count, std::shared_ptr<const Task>(std::shared_ptr<void>(), &task), forever);
  }
  /// The same for a task that may never end: once device 0 has, waits no longer than until `patience` has passed.
  /// Threads that are `at_work` then have no error; they keep the task, which owns what it touches.
  const Errors& run(std::size_t count, std::shared_ptr<const Task> task, std::chrono::milliseconds patience) {
    errors_.assign(errors_.size(), nullptr);
    for (const auto& worker : workers_) worker->error = nullptr;  // of one that was late
    for (std::size_t i = 1; i < count; ++i) {
      workers_[i - 1]->task = task;
      workers_[i - 1]->order.store(Order::work, std::memory_order_release);
      workers_[i - 1]->order.notify_one();
    }
    errors_[0] = attempt(*task, 0);
    await(patience);
    return collect();
  }
  /// What has been thrown in the last run by now.
  const Errors& collect() {
    for (std::size_t i = 1; i < errors_.size(); ++i)
      if (!workers_[i - 1]->at_work())
        if (auto error = std::exchange(workers_[i - 1]->error, nullptr)) errors_[i] = std::move(error);
    return errors_;
  }

  /// Waits until no thread is at work, or until `patience` has passed.
  void await(std::chrono::milliseconds patience) const {
    const auto begin = std::chrono::steady_clock::now();
    for (const auto& worker : workers_) {
      if (!worker->at_work()) continue;
      std::unique_lock lock(worker->mutex);
      const auto ended = [&] { return !worker->at_work(); };
      if (patience == forever)
        worker->ended.wait(lock, ended);
      else
        worker->ended.wait_until(lock, begin + patience, ended);
    }
  }
  /// The devices whose threads are.
  std::vector<std::size_t> at_work() const {
    std::vector<std::size_t> devices;
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (workers_[i]->at_work()) devices.push_back(i + 1);
    return devices;
  }

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

  static std::exception_ptr attempt(const Task& task, std::size_t device) noexcept {
    try {
      task(device);
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }

  static void serve(Worker& worker, std::size_t device) {
    for (;;) {
      worker.order.wait(Order::none, std::memory_order_acquire);
      if (!worker.at_work()) return;
      worker.error = attempt(*worker.task, device);
      worker.task.reset();
      {
        const std::lock_guard lock(worker.mutex);
        if (worker.order.exchange(Order::none, std::memory_order_acq_rel) == Order::stop) return;
      }
      worker.ended.notify_one();
    }
  }

  Errors errors_;
  std::vector<std::shared_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
};

}  // namespace chorus::dp
