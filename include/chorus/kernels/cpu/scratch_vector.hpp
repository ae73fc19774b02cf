#pragma once
/// Vectors in the temporary memory of kernels.

#include <chorus/tensor/allocator.hpp>
#include <cstddef>
#include <new>
#include <vector>

namespace chorus::kernels {

/// Takes a vector's memory from the device's cache, as Scratch does, so that a steady training step asks the heap for
/// none.
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
