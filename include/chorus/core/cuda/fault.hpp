#pragma once
/// Bad input that only a kernel sees, such as a label outside of its classes. The kernel records the first one and
/// continues without it. The next call that waits for the device throws.

#include <array>
#include <atomic>
#include <chorus/core/cuda/stream.hpp>
#include <cstdint>
#include <mutex>
#include <new>

namespace chorus::cuda {

/// A kernel's record, in host memory that the device writes to. `operation` and `noun` are texts that live forever.
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

/// Throws UsageError if a finished kernel has recorded a fault, and forgets it.
inline void check_faults(Cuda device) {
  Fault* fault = fault_of(device);
  const std::atomic_ref<unsigned> set(fault->set);
  if (set.load(std::memory_order_acquire) != Fault::written) [[likely]]
    return;
  static std::mutex mutex;  // if several threads see it, one throws it
  std::unique_lock lock(mutex);
  if (set.load(std::memory_order_acquire) != Fault::written) return;
  const Fault seen = *fault;
  set.store(Fault::none, std::memory_order_release);
  lock.unlock();
  fail<UsageError>(seen.operation, ": ", seen.noun, " ", seen.value, " at position ", seen.place, " is not in [0, ",
                   seen.limit, ")");
}

/// Waits until this thread's stream of `device` has done all its work. Throws the errors of that work: DeviceError,
/// UsageError for bad input that only a kernel saw, TimeoutError.
inline void synchronize(Cuda device) {
  synchronize(current_stream(device));
  check_faults(device);
}

}  // namespace chorus::cuda
