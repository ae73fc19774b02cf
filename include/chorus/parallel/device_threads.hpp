#pragma once
/// One thread per device of a process, kept from step to step.

#include <atomic>
#include <chorus/core/config.hpp>
#include <exception>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI {

/// Runs a task for several devices at once. The calling thread serves device 0.
class DeviceThreads {
 public:
  explicit DeviceThreads(std::size_t devices) : errors_(devices), workers_(devices > 0 ? devices - 1 : 0) {
    for (std::size_t i = 0; i < workers_.size(); ++i)
      workers_[i].thread = std::thread([this, i] { serve(workers_[i], i + 1); });
  }
  ~DeviceThreads() {
    for (auto& worker : workers_) give(worker, Order::stop);
    for (auto& worker : workers_) worker.thread.join();
  }
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls `task(i)` for devices 0 to `count` - 1, each on its own thread, and returns when all have ended. What they
  /// threw is in the result, by device.
  const std::vector<std::exception_ptr>& run(std::size_t count, const std::function<void(std::size_t)>& task) {
    errors_.assign(errors_.size(), nullptr);
    task_ = &task;
    for (std::size_t i = 1; i < count; ++i) give(workers_[i - 1], Order::work);
    attempt(0);
    for (std::size_t i = 1; i < count; ++i) {
      auto& worker = workers_[i - 1];
      while (worker.order.load(std::memory_order_acquire) != Order::none) worker.order.wait(Order::work);
    }
    return errors_;
  }

 private:
  enum class Order : int { none, work, stop };
  struct Worker {
    std::thread thread;
    std::atomic<Order> order{Order::none};
  };

  static void give(Worker& worker, Order order) {
    worker.order.store(order, std::memory_order_release);
    worker.order.notify_one();
  }

  void attempt(std::size_t device) noexcept {
    try {
      (*task_)(device);
    } catch (...) {
      errors_[device] = std::current_exception();
    }
  }

  void serve(Worker& worker, std::size_t device) {
    for (;;) {
      worker.order.wait(Order::none, std::memory_order_acquire);
      if (worker.order.load(std::memory_order_acquire) == Order::stop) return;
      attempt(device);
      worker.order.store(Order::none, std::memory_order_release);
      worker.order.notify_one();
    }
  }

  const std::function<void(std::size_t)>* task_ = nullptr;
  std::vector<std::exception_ptr> errors_;
  std::vector<Worker> workers_;
};

}  // namespace chorus::inline CHORUS_ABI
