#pragma once
/// Temporary memory of kernels.

#include <chorus/core/dtype.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/tensor/allocator.hpp>
#include <cstddef>
#include <new>
#include <vector>

namespace chorus::kernels {

/// `count` uninitialised numbers from the device's cache, released at the end of the scope. On a GPU the release is
/// stream-ordered: the next kernel may reuse the memory at once.
template <class T, Device D = Cpu>
class Scratch {
 public:
  Scratch(D device, Index count) : storage_(device, static_cast<std::size_t>(count) * sizeof(T)) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage<D> storage_;
};

/// The same for each thread of a team. The caller allocates all of it at once, so that the amount does not depend on
/// how many threads take part. Without `one_each` all share one.
template <class T>
class ThreadScratch {
 public:
  ThreadScratch(Cpu device, Index count, bool one_each = true)
      : one_each_(one_each && num_threads() > 1),
        count_((count + line - 1) / line * line),
        all_(device, one_each_ ? num_threads() * count_ : count_) {}
  T* data() const { return all_.data() + (one_each_ ? thread_number() * count_ : 0); }

 private:
  static constexpr Index line = 64;
  bool one_each_;
  Index count_;
  Scratch<T> all_;
};

/// Takes a vector's memory from the device's cache, too, so that a steady training step asks the heap for none.
template <class T>
class ScratchAllocator {
 public:
  using value_type = T;
  ScratchAllocator(Cpu device) : device_(device) {}  // NOLINT: vectors are made with a device
  template <class U>
  ScratchAllocator(const ScratchAllocator<U>& other) : device_(other.device()) {}
  T* allocate(std::size_t count) {
    auto* const block = CachingAllocator<Cpu>::of(device_).allocate(device_, before + count * sizeof(T));
    auto* const begin = static_cast<std::byte*>(block->data);
    new (begin) Block<Cpu>*(block);
    return reinterpret_cast<T*>(begin + before);
  }
  void deallocate(T* data, std::size_t) noexcept {
    auto* const block = *reinterpret_cast<Block<Cpu>**>(reinterpret_cast<std::byte*>(data) - before);
    CachingAllocator<Cpu>::of(device_).release(block);
  }
  Cpu device() const { return device_; }
  friend bool operator==(const ScratchAllocator& a, const ScratchAllocator& b) { return a.device_ == b.device_; }

 private:
  static constexpr std::size_t before = 64;  // of the numbers: the block's address
  Cpu device_;
};
template <class T>
using ScratchVector = std::vector<T, ScratchAllocator<T>>;

}  // namespace chorus::kernels
