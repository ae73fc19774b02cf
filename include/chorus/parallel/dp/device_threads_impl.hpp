#pragma once
/// How each device's thread waits for work and reports its result.

#include <atomic>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::dp {

CHORUS_INLINE DeviceThreads::DeviceThreads(std::size_t devices) : DeviceThreads(Errors(devices)) {
  for (std::size_t i = 1; i < devices; ++i) {
    workers_.push_back(std::make_shared<Worker>());
    const auto body = [worker = workers_.back(), i] { serve(*worker, i); };
    threads_.push_back(chorus::detail::start_thread<std::thread, Error>(cat("device ", i), body));
  }
}

CHORUS_INLINE DeviceThreads::~DeviceThreads() {
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    const bool at_work = workers_[i]->order.exchange(Order::stop) == Order::work;
    workers_[i]->order.notify_one();
    if (at_work)
      threads_[i].detach();
    else
      threads_[i].join();
  }
}

CHORUS_INLINE const DeviceThreads::Errors& DeviceThreads::run(std::size_t count, const Task& task) {
  return run(count, std::shared_ptr<const Task>(std::shared_ptr<void>(), &task), forever);
}

CHORUS_INLINE const DeviceThreads::Errors& DeviceThreads::run(std::size_t count, std::shared_ptr<const Task> task,
                                                              std::chrono::milliseconds patience) {
  errors_.assign(errors_.size(), nullptr);
  for (const auto& worker : workers_) worker->error = nullptr;  // of a late thread
  for (std::size_t i = 1; i < count; ++i) {
    workers_[i - 1]->task = task;
    workers_[i - 1]->order.store(Order::work, std::memory_order_release);
    workers_[i - 1]->order.notify_one();
  }
  errors_[0] = attempt(*task, 0);
  await(patience);
  return collect();
}

CHORUS_INLINE const DeviceThreads::Errors& DeviceThreads::collect() {
  for (std::size_t i = 1; i < errors_.size(); ++i)
    if (!workers_[i - 1]->at_work())
      if (auto error = std::exchange(workers_[i - 1]->error, nullptr)) errors_[i] = std::move(error);
  return errors_;
}

CHORUS_INLINE void DeviceThreads::await(std::chrono::milliseconds patience) const {
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

CHORUS_INLINE std::vector<std::size_t> DeviceThreads::at_work() const {
  std::vector<std::size_t> devices;
  for (std::size_t i = 0; i < workers_.size(); ++i)
    if (workers_[i]->at_work()) devices.push_back(i + 1);
  return devices;
}

CHORUS_INLINE std::exception_ptr DeviceThreads::attempt(const Task& task, std::size_t device) noexcept {
  try {
    task(device);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

CHORUS_INLINE void DeviceThreads::serve(Worker& worker, std::size_t device) {
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

}  // namespace chorus::dp
