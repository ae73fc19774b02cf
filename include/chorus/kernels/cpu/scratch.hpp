#pragma once
/// Working memory of a kernel.

#include <chorus/core/dtype.hpp>
#include <chorus/tensor/allocator.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

/// `count` numbers, uninitialised, from the device's cache; given back at the end of the scope.
template <class T>
class Scratch {
 public:
  Scratch(Cpu device, Index count) : storage_(device, static_cast<std::size_t>(count) * sizeof(T)) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage<Cpu> storage_;
};

}  // namespace chorus::inline CHORUS_ABI::kernels
