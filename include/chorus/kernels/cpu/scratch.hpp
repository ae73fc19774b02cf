#pragma once
/// Temporary memory of kernels.

#include <chorus/core/dtype.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/tensor/allocator.hpp>

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

}  // namespace chorus::kernels
