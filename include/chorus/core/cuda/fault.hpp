#pragma once
/// Bad input that only a kernel detects, such as a label out of range. The kernel records the first fault and continues
/// without it; the next call that synchronises with the device throws.

#include <array>
#include <atomic>
#include <chorus/core/cuda/stream.hpp>
#include <cstdint>
#include <mutex>
#include <new>

namespace chorus::cuda {

/// A kernel's record, in host memory that the device can write. `operation` and `noun` are string literals.
struct Fault {
  static constexpr unsigned none = 0, claimed = 1, written = 2;
  unsigned set;
  const char *operation, *noun;
  std::int64_t place, value, limit;
};

/// The device's record. Throws DeviceError.
inline Fault* fault_of(Cuda device) {
  static std::array<std::once_flag, Cuda::max_devices> once;
  static std::array<Fault*, Cuda::max_devices> faults{};
  require(device);
  const auto i = static_cast<std::size_t>(device.index);
  std::call_once(once[i], [&] {
    const DeviceGuard guard(device);
    void* memory = nullptr;
    CHORUS_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(Fault), cudaHostAllocMapped | cudaHostAllocPortable));
    faults[i] = new (memory) Fault{};
  });
  return faults[i];
}

/// Throws UsageError if a finished kernel recorded a fault, and clears it.
inline void check_faults(Cuda device) {
  Fault* fault = fault_of(device);
  const std::atomic_ref<unsigned> set(fault->set);
  if (set.load(std::memory_order_acquire) != Fault::written) [[likely]]
    return;
  static std::mutex mutex;  // if several threads see the fault, only one throws
  std::unique_lock lock(mutex);
  if (set.load(std::memory_order_acquire) != Fault::written) return;
  const Fault seen = *fault;
  set.store(Fault::none, std::memory_order_release);
  lock.unlock();
  fail<UsageError>(seen.operation, ": ", seen.noun, " ", seen.value, " at position ", seen.place, " is not in [0, ",
                   seen.limit, ")");
}

/// Waits until this thread's stream of `device` is idle. Throws the errors of its work: DeviceError, TimeoutError, and
/// UsageError for bad input that a kernel detected.
inline void synchronize(Cuda device) {
  synchronize(current_stream(device));
  check_faults(device);
}

}  // namespace chorus::cuda
