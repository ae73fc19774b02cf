#pragma once
/// GPU memory: blocks in size classes, cached and reused in stream order. A block belongs to the stream that allocated
/// it, whose later work may reuse it at once, without waiting.

#include <array>
#include <chorus/tensor/allocator.hpp>
#include <chorus/tensor/cuda/memory_pool.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace chorus {

/// One pool per stream of a device, plus one for permanent memory. Never destroyed, since tensors in static storage may
/// outlive it. Thread-safe.
template <>
class CachingAllocator<Cuda> {
 public:
  static CachingAllocator& of(Cuda device) {
    cuda::require(device);
    static auto& all = *new std::array<CachingAllocator, Cuda::max_devices>;
    return all[static_cast<std::size_t>(device.index)];
  }

  /// A block of at least `bytes`, aligned to 256 bytes, uninitialised, for the thread's current stream. Throws Error if
  /// the device is out of memory.
  Block<Cuda>* allocate(Cuda device, std::size_t bytes) {
    cuda::MemoryPool* pool = cuda::detail::private_pool(device);
    const trace::Memory kind = MemoryScope::current();
    if (pool == nullptr) pool = &pool_of(device, cuda::current_stream(device), stays(kind));
    Block<Cuda>* block = pool->allocate(bytes);
    block->kind = kind;
    trace::allocated(trace_slot(device), block->kind, static_cast<std::int64_t>(block->bytes));
    return block;
  }

  void release(Block<Cuda>* block) noexcept {
    trace::allocated(trace_slot(block->device), block->kind, -static_cast<std::int64_t>(block->bytes));
    block->pool->release(block);
  }

  /// Returns all unused blocks of all streams to the device, except those of private pools.
  void empty_cache() noexcept {
    for (cuda::MemoryPool* pool : pools()) pool->empty_cache();
  }

  /// Number of allocations from the driver; constant in a steady training loop.
  std::uint64_t system_allocations() {
    std::uint64_t sum = 0;
    for (const cuda::MemoryPool* pool : pools()) sum += pool->system_allocations();
    return sum;
  }

 private:
  friend class cuda::MemoryPool;

  cuda::MemoryPool& pool_of(Cuda device, cudaStream_t stream, bool stay) {
    const std::lock_guard lock(mutex_);
    cuda::MemoryPool*& pool = pools_[{stream, stay}];
    if (pool == nullptr) pool = new cuda::MemoryPool(device, stream, cuda::exact_memory());
    return *pool;
  }

  // A copy: no pool may be locked together with the list, since a pool without memory comes here locked.
  std::vector<cuda::MemoryPool*> pools() {
    const std::lock_guard lock(mutex_);
    std::vector<cuda::MemoryPool*> all;
    for (const auto& [key, pool] : pools_) all.push_back(pool);
    return all;
  }

  // Called by a pool that holds its own lock. Pools in use are skipped, so that two pools that empty each other do not
  // deadlock.
  void empty_cache_beside(const cuda::MemoryPool* asking) {
    for (cuda::MemoryPool* pool : pools()) {
      if (pool == asking || !pool->mutex_.try_lock()) continue;
      pool->free_unused();
      pool->mutex_.unlock();
    }
  }

  std::mutex mutex_;
  std::map<std::pair<cudaStream_t, bool>, cuda::MemoryPool*> pools_;
};

namespace cuda {

inline void* MemoryPool::from_driver(std::size_t bytes) {
  check<Error>(!sealed_, "captured step: the private memory pool of ", device_, " has no block of ", bytes,
               " bytes, and can't grow during a capture: the captured step needs more memory than the steps before it");
  const DeviceGuard guard(device_);
  void* data = nullptr;
  cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    unpark();
    free_unused();
    CachingAllocator<Cuda>::of(device_).empty_cache_beside(this);
    status = cudaMalloc(&data, bytes);
  }
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free = 0, total = 0;
    static_cast<void>(cudaMemGetInfo(&free, &total));
    chorus::detail::out_of_memory(device_, bytes,
                                  cat("; the device has ", free >> 20, " of ", total >> 20, " MiB free"));
  }
  CHORUS_CUDA_CHECK(status);
  system_allocations_.fetch_add(1, std::memory_order_relaxed);
  return data;
}

}  // namespace cuda

}  // namespace chorus
