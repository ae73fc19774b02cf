#pragma once
/// The memory of one GPU stream: blocks in size classes, cached and reused in stream order; and the private pools of
/// captured graphs. `allocator.hpp` has the pools of all streams.

#include <algorithm>
#include <array>
#include <atomic>
#include <chorus/core/cuda/stream.hpp>
#include <chorus/core/environment.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/tensor/size_class.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace chorus {

template <Device D>
struct Block;
template <Device D>
struct Home;
template <Device D>
class CachingAllocator;
template <>
class CachingAllocator<Cuda>;
namespace cuda {
class MemoryPool;
}

template <>
struct Block<Cuda> {
  std::atomic<int> owners{0};
  std::atomic<std::uint32_t> writes{0};  // as on the CPU
  trace::Memory kind{};
  Cuda device{};
  std::size_t bytes = 0;
  void* data = nullptr;
  Block* next_free = nullptr;
  cuda::MemoryPool* pool = nullptr;
  bool carved = false;                      ///< part of a slab, not freed separately
  std::vector<cudaStream_t> other_streams;  ///< other streams than the pool's that use the block
  std::unique_ptr<Home<Cuda>> home;         ///< set for storage with an identity
  std::ptrdiff_t moved = 0;                 ///< offset of the data from its first address, in bytes
};

namespace cuda {

/// With CHORUS_CUDA_EXACT_MEMORY=1 in the environment each tensor has memory of its own from the driver, of its exact
/// size, and no block is used again: for compute-sanitizer, which knows the driver's allocations alone. Slow. Private
/// pools of captured graphs are as usual.
inline bool exact_memory() { return chorus::detail::env_switch("CHORUS_CUDA_EXACT_MEMORY", false); }

/// The blocks of one stream. Thread-safe.
class MemoryPool {
 public:
  static constexpr std::size_t smallest = 256;            ///< in bytes; also the alignment of every block
  static constexpr std::size_t largest_carved = 1 << 18;  ///< requests up to this size are carved from slabs
  static constexpr std::size_t slab_bytes = 1 << 21;      ///< the driver's smallest mapping

  /// `exact`: see exact_memory.
  MemoryPool(Cuda device, cudaStream_t stream, bool exact = false) : device_(device), stream_(stream), exact_(exact) {}
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// Throws Error if neither pool nor device has the memory, or if the pool is sealed and has no such block.
  Block<Cuda>* allocate(std::size_t bytes) {
    const auto [list, rounded] = size_class<smallest>(bytes);
    const std::lock_guard lock(mutex_);
    if (!sealed_) unpark();
    if (exact_) [[unlikely]]
      free_unused();
    Block<Cuda>* block = free_[list];
    if (block != nullptr)
      free_[list] = block->next_free;
    else
      block = fresh(exact_ ? std::max(bytes, std::size_t{1}) : rounded);
    ++live_;
    return block;
  }

  void release(Block<Cuda>* block) noexcept {
    bool last = false;
    {
      const std::lock_guard lock(mutex_);
      --live_;
      last = abandoned_ && live_ == 0;
      if (!block->other_streams.empty() && !last) {
        block->next_free = parked_;
        parked_ = block;
        if (!sealed_ && !abandoned_) unpark();  // an abandoned pool's stream may be gone; nobody needs its blocks
      } else {
        put_back(block);
      }
    }
    if (last) delete this;
  }

  /// Records that `stream` uses the block, too. The memory is reused only after the work that `stream` has when the
  /// block is released.
  void record_use(Block<Cuda>* block, cudaStream_t stream) {
    if (stream == stream_) return;
    const std::lock_guard lock(mutex_);
    for (const cudaStream_t known : block->other_streams)
      if (known == stream) return;
    block->other_streams.push_back(stream);
  }

  /// Returns unused memory to the device, except slabs. Waits for the device.
  void empty_cache() noexcept {
    const std::lock_guard lock(mutex_);
    free_unused();
  }

  /// A sealed pool makes no driver calls: it uses its own memory or throws. For graph capture.
  void seal(bool sealed) {
    const std::lock_guard lock(mutex_);
    sealed_ = sealed;
  }

  Cuda device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  std::uint64_t system_allocations() const { return system_allocations_.load(); }

  /// Destroys the pool and frees its memory once none of its blocks is in use.
  void abandon() noexcept {
    {
      const std::lock_guard lock(mutex_);
      abandoned_ = true;
      if (live_ != 0) return;
    }
    delete this;
  }

 private:
  friend class CachingAllocator<Cuda>;

  ~MemoryPool() {
    while (parked_ != nullptr) put_back(std::exchange(parked_, parked_->next_free));
    free_unused();
    for (Block<Cuda>*& list : free_)
      while (list != nullptr) delete std::exchange(list, list->next_free);
    for (void* slab : slabs_) static_cast<void>(cudaFree(slab));
  }

  void put_back(Block<Cuda>* block) noexcept {
    const auto list = size_class<smallest>(block->bytes).list;
    block->next_free = free_[list];
    free_[list] = block;
  }

  // Frees released blocks that other streams use, after ordering this pool's stream behind those streams. A block in a
  // graph capture waits for the end of the capture; otherwise the pool's stream would join the capture.
  void unpark() noexcept {
    Block<Cuda>** place = &parked_;
    while (*place != nullptr) {
      Block<Cuda>* block = *place;
      try {
        bool captured = is_capturing(stream_);
        for (const cudaStream_t stream : block->other_streams) captured = captured || is_capturing(stream);
        if (captured) {
          place = &block->next_free;
          continue;
        }
        for (const cudaStream_t stream : block->other_streams) order(device_, stream, stream_);
      } catch (const Error&) {
        place = &block->next_free;  // its order is unknown, so it must not be reused yet
        continue;
      }
      *place = block->next_free;
      block->other_streams.clear();
      put_back(block);
    }
  }

  void free_unused() noexcept {
    for (Block<Cuda>*& list : free_) {
      Block<Cuda>** place = &list;
      while (*place != nullptr) {
        Block<Cuda>* block = *place;
        if (block->carved) {
          place = &block->next_free;
          continue;
        }
        *place = block->next_free;
        static_cast<void>(cudaFree(block->data));
        delete block;
      }
    }
    static_cast<void>(cudaGetLastError());
  }

  Block<Cuda>* fresh(std::size_t bytes) {
    auto block = std::make_unique<Block<Cuda>>();
    block->device = device_;
    block->bytes = bytes;
    block->pool = this;
    block->carved = bytes <= largest_carved && !exact_;
    if (block->carved) {
      if (slab_left_ < bytes) {
        slabs_.push_back(nullptr);  // so that a failure in the next lines does not leak the slab
        slabs_.back() = from_driver(slab_bytes);
        slab_at_ = static_cast<std::byte*>(slabs_.back());
        slab_left_ = slab_bytes;
      }
      block->data = slab_at_;
      slab_at_ += bytes;
      slab_left_ -= bytes;
    } else {
      block->data = from_driver(bytes);
    }
    return block.release();
  }

  void* from_driver(std::size_t bytes);  // in allocator.hpp, since it asks other pools of the device to free memory

  const Cuda device_;
  const cudaStream_t stream_;
  const bool exact_;
  std::mutex mutex_;
  std::array<Block<Cuda>*, size_classes> free_{};
  Block<Cuda>* parked_ = nullptr;
  std::vector<void*> slabs_;
  std::byte* slab_at_ = nullptr;
  std::size_t slab_left_ = 0;
  std::size_t live_ = 0;
  bool sealed_ = false, abandoned_ = false;
  std::atomic<std::uint64_t> system_allocations_{0};
};

/// Records that `stream` uses this memory, which was allocated on another stream.
inline void record_use(Block<Cuda>* block, cudaStream_t stream) {
  if (block != nullptr) block->pool->record_use(block, stream);
}

namespace detail {
inline MemoryPool*& private_pool(Cuda device) {
  thread_local std::array<MemoryPool*, Cuda::max_devices> pools{};
  return pools[static_cast<std::size_t>(device.index)];
}
}  // namespace detail

/// The private pool of a captured graph. Its memory is not used otherwise while the pool, or a tensor from it, lives.
class PrivatePool {
 public:
  PrivatePool(Cuda device, cudaStream_t stream) {
    require(device);
    pool_.reset(new MemoryPool(device, stream));
  }
  MemoryPool& operator*() const { return *pool_; }
  MemoryPool* operator->() const { return pool_.get(); }

 private:
  struct Abandon {
    void operator()(MemoryPool* pool) const { pool->abandon(); }
  };
  std::unique_ptr<MemoryPool, Abandon> pool_;
};

/// While it lives, this thread allocates on the pool's device from the pool.
struct PoolScope : chorus::detail::Replaced<MemoryPool*> {
  explicit PoolScope(const PrivatePool& pool) : Replaced(detail::private_pool(pool->device()), &*pool) {}
};

}  // namespace cuda

}  // namespace chorus
