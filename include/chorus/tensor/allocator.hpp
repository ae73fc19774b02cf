#pragma once
/// Device memory: freed blocks are cached, so that from its second step on a training loop needs no memory from the
/// system.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <sys/mman.h>

#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/tensor/residence.hpp>
#include <chorus/tensor/size_class.hpp>
#include <chorus/tensor/writes.hpp>

namespace chorus {

/// The kind under which this thread's allocations are counted while the scope lives.
struct MemoryScope : detail::Replaced<trace::Memory> {
  explicit MemoryScope(trace::Memory kind) : Replaced(current(), kind) {}
  static trace::Memory& current() {
    thread_local trace::Memory kind = trace::Memory::activations;
    return kind;
  }
};

/// The system's allocation function, the only part of the allocator that depends on the kind of device. A null pointer
/// means that no memory is left.
inline void* system_allocate(Cpu, std::size_t bytes) {
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  const bool large = bytes >= huge_page;
  void* data =
      std::aligned_alloc(large ? huge_page : 64, large ? (bytes + huge_page - 1) / huge_page * huge_page : bytes);
  if (large && data != nullptr) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}
inline void system_free(Cpu, void* data) { std::free(data); }

template <Device D>
struct Home;

/// A reference-counted block of device memory. Without references it returns to its allocator's free list.
template <Device D>
struct Block {
  std::atomic<int> owners{0};
  std::atomic<std::uint32_t> writes{0};  // number of in-place writes, for storage without a home
  trace::Memory kind{};
  D device{};
  std::size_t bytes = 0;
  void* data = nullptr;
  Block* next_free = nullptr;
  std::shared_ptr<void> lent;    // owner of `data`, if not the allocator
  std::unique_ptr<Home<D>> home;  // set for storage with an identity
  std::ptrdiff_t moved = 0;       // offset of the data from its first address, in bytes
};

namespace detail {
template <Device D>
[[noreturn, gnu::cold, gnu::noinline]] void out_of_memory(D device, std::size_t bytes, std::string_view more = {}) {
  std::string held;
  for (std::size_t kind = 0; kind < trace::memory_kinds; ++kind) {
    const auto memory = static_cast<trace::Memory>(kind);
    held +=
        cat(kind == 0 ? "" : ", ", trace::name(memory), " ", trace::memory(trace_slot(device), memory) >> 20, " MiB");
  }
  fail<Error>("out of memory on ", device, ": asked for ", bytes, " bytes; in use: ", held, more);
}
}  // namespace detail

/// Whether memory of this kind is permanent. An optimizer's state is allocated in the middle of the first step and must
/// not take an activation's block, which the second step needs again. Permanent blocks have separate free lists.
constexpr bool stays(trace::Memory kind) { return kind == trace::Memory::optimizer || kind == trace::Memory::buckets; }

/// Caches freed blocks in size classes, four per octave, so that at most a quarter of a block is unused. One per
/// device; never destroyed, since tensors in static storage may outlive it. Thread-safe.
template <Device D>
class CachingAllocator {
 public:
  static CachingAllocator& of(D device) {
    static auto& all = *new std::array<CachingAllocator, D::max_devices>;
    check<DeviceError>(device.index >= 0 && device.index < D::max_devices, "device ", device,
                       " does not exist: ", D::kind, " devices are numbered 0 to ", D::max_devices - 1);
    return all[static_cast<std::size_t>(device.index)];
  }

  /// A block of at least `bytes`, aligned to 64 bytes, uninitialised. Throws Error if the device is out of memory.
  Block<D>* allocate(D device, std::size_t bytes) {
    const auto [list, rounded] = size_class<smallest>(bytes);
    const trace::Memory kind = MemoryScope::current();
    if (const auto most = limit_.load(std::memory_order_relaxed); most != no_limit) [[unlikely]]
      check_limit(device, rounded, most);
    Block<D>* block = nullptr;
    {
      std::lock_guard lock(mutex_);
      Block<D>*& first = free_[stays(kind)][list];
      block = first;
      if (block != nullptr) first = block->next_free;
    }
    if (block == nullptr) block = fresh(device, rounded);
    block->kind = kind;
    trace::allocated(trace_slot(device), block->kind, static_cast<std::int64_t>(block->bytes));
    return block;
  }

  /// A block for memory with another owner.
  Block<D>* adopt(D device, std::shared_ptr<void> memory, std::size_t bytes) {
    auto* block = new Block<D>;
    block->device = device;
    block->kind = MemoryScope::current();
    block->bytes = bytes;
    block->data = memory.get();
    block->lent = std::move(memory);
    trace::allocated(trace_slot(device), block->kind, static_cast<std::int64_t>(bytes));
    return block;
  }

  void release(Block<D>* block) noexcept {
    trace::allocated(trace_slot(block->device), block->kind, -static_cast<std::int64_t>(block->bytes));
    if (block->lent) {
      delete block;
      return;
    }
    Block<D>*& first = free_[stays(block->kind)][size_class<smallest>(block->bytes).list];
    std::lock_guard lock(mutex_);
    block->next_free = first;
    first = block;
  }

  /// See set_memory_limit.
  void set_limit(std::size_t bytes) { limit_.store(bytes, std::memory_order_relaxed); }

  /// Returns all unused blocks to the system.
  void empty_cache() noexcept {
    std::lock_guard lock(mutex_);
    for (auto& lists : free_)
      for (auto& list : lists)
        while (list != nullptr) {
          Block<D>* block = std::exchange(list, list->next_free);
          system_free(block->device, block->data);
          delete block;
        }
  }

  /// Number of allocations from the system; constant in a steady training loop.
  std::uint64_t system_allocations() const { return system_allocations_.load(); }

 private:
  static constexpr std::size_t smallest = 64, no_limit = static_cast<std::size_t>(-1);

  [[gnu::cold, gnu::noinline]] static void check_limit(D device, std::size_t bytes, std::size_t most) {
    if (trace::memory(trace_slot(device)).current + bytes > most)
      detail::out_of_memory(device, bytes, cat("; set_memory_limit allows ", most, " bytes"));
  }
  Block<D>* fresh(D device, std::size_t bytes) {
    void* data = system_allocate(device, bytes);
    if (data == nullptr) {
      empty_cache();
      data = system_allocate(device, bytes);
    }
    if (data == nullptr) detail::out_of_memory(device, bytes);
    system_allocations_.fetch_add(1, std::memory_order_relaxed);
    auto* block = new Block<D>;
    block->device = device;
    block->bytes = bytes;
    block->data = data;
    return block;
  }

  std::mutex mutex_;
  std::array<Block<D>*, size_classes> free_[2]{};
  std::atomic<std::uint64_t> system_allocations_{0};
  std::atomic<std::size_t> limit_{no_limit};
};

/// Limits this process's memory on `device`: operations throw Error if more than `bytes` would be in use. It shows
/// whether a program fits on a smaller device, or into a rank's part of the machine.
template <Device D>
void set_memory_limit(D device, std::size_t bytes) {
  CachingAllocator<D>::of(device).set_limit(bytes);
}

/// A reference-counted handle to a block.
template <Device D>
class Storage {
 public:
  Storage() = default;
  Storage(D device, std::size_t bytes) : block_(CachingAllocator<D>::of(device).allocate(device, bytes)) {
    block_->owners.store(1, std::memory_order_relaxed);
  }
  /// Wraps `memory` of that many bytes, aligned to 64, and keeps it alive.
  Storage(D device, std::shared_ptr<void> memory, std::size_t bytes)
      : block_(CachingAllocator<D>::of(device).adopt(device, std::move(memory), bytes)) {
    block_->owners.store(1, std::memory_order_relaxed);
  }
  Storage(const Storage& other) noexcept : block_(other.block_) {
    if (block_ != nullptr) block_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  Storage(Storage&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Storage& operator=(Storage other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Storage() {
    if (block_ != nullptr && block_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) release(block_);
  }

  /// A home for the `bytes` at `data` in `memory`: see Home.
  static Storage home_in(Storage memory, void* data, std::size_t bytes) {
    Storage out;
    out.block_ = new Block<D>;
    out.block_->owners.store(1, std::memory_order_relaxed);
    out.block_->device = memory.device();
    out.block_->bytes = bytes;
    out.block_->data = data;
    out.block_->home.reset(new Home<D>{std::move(memory), {}});
    return out;
  }
  /// Moves the home: all handles to it now refer to `data` in `memory`. Copies no bytes.
  void move_home(Storage memory, void* data) const { move_home(*block_, std::move(memory), data); }
  static void move_home(Block<D>& home, Storage memory, void* data) {
    home.moved += static_cast<std::byte*>(data) - static_cast<std::byte*>(home.data);
    home.data = data;
    home.device = memory.device();
    home.home->memory = std::move(memory);
  }
  /// The distance in bytes that the data has moved since the home was created.
  std::ptrdiff_t moved() const { return block_ == nullptr ? 0 : block_->moved; }
  /// The memory of a home; for other storage itself.
  const Storage& memory() const { return block_ != nullptr && block_->home ? block_->home->memory : *this; }

  /// The write counter of a home; otherwise null.
  Writes* writes() const { return block_ != nullptr && block_->home ? &block_->home->writes : nullptr; }
  /// Grows with each change of a home's data; for other storage only with `wrote`.
  std::uint64_t version() const {
    auto* const known = writes();
    if (known == nullptr) return block_ == nullptr ? 0 : block_->writes.load(std::memory_order_relaxed);
    return present() ? known->version(block_->data, block_->bytes) : known->counted();
  }
  /// Records an in-place write.
  void wrote() const {
    if (auto* const known = writes())
      known->add();
    else if (block_ != nullptr)
      block_->writes.fetch_add(1, std::memory_order_relaxed);
  }
  /// Called when the program gets a pointer to a home's data, through which it may write. Only host memory is watched.
  void watch() const {
    if constexpr (std::is_same_v<D, Cpu>)
      if (auto* const known = writes()) known->watch(block_->data, block_->bytes);
  }

  /// Called before library code writes: detects earlier writes of the program through a pointer. `settle` is called
  /// after the library's write.
  void look() const {
    if (auto* const known = writes(); known != nullptr && known->watched()) [[unlikely]]
      version();
  }
  void settle() const {
    if (auto* const known = writes(); known != nullptr && known->watched() && present()) [[unlikely]]
      known->settle(block_->data, block_->bytes);
  }

  /// Called before an operation reads the data. If a Residence manages the home and the data is absent, it is fetched.
  void touch() const {
    if (block_ != nullptr && block_->home && block_->home->residence) [[unlikely]]
      block_->home->residence->touch(block_->home->unit);
  }
  /// Whether the data is present. It can only be absent if the home has a Residence.
  bool present() const {
    return block_ == nullptr || !block_->home || !block_->home->residence ||
           block_->home->residence->present(block_->home->unit);
  }
  /// Whether this process may hold only a part of the data.
  bool in_parts() const { return block_ != nullptr && block_->home && block_->home->residence; }
  /// For a home: the residence that fetches its data, and the index of its unit.
  void set_residence(std::shared_ptr<Residence> residence, std::size_t unit) const {
    block_->home->residence = std::move(residence);
    block_->home->unit = unit;
  }

  explicit operator bool() const { return block_ != nullptr; }
  void* data() const { return block_ == nullptr ? nullptr : block_->data; }
  std::size_t bytes() const { return block_ == nullptr ? 0 : block_->bytes; }
  D device() const { return block_ == nullptr ? D{} : block_->device; }
  /// The block, for library code.
  Block<D>* block() const { return block_; }
  int owners() const { return block_ == nullptr ? 0 : block_->owners.load(std::memory_order_relaxed); }

 private:
  static void release(Block<D>* block) noexcept;

  Block<D>* block_ = nullptr;
};

/// Storage with an identity: that of a parameter, its gradient or a buffer. The data is in `memory`, or in a part of
/// it, and may move within it or to other memory. Existing tensors follow.
template <Device D>
struct Home {
  Storage<D> memory;
  Writes writes;
  std::shared_ptr<Residence> residence = nullptr;  // set if the process may hold only a part of the data
  std::size_t unit = 0;                            // the index of the unit
};

template <Device D>
void Storage<D>::release(Block<D>* block) noexcept {
  if (block->home)
    delete block;
  else
    CachingAllocator<D>::of(block->device).release(block);
}

}  // namespace chorus

#if CHORUS_USE_CUDA
#include <chorus/tensor/cuda/allocator.hpp>
#endif
