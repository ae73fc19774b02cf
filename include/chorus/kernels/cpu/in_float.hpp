#pragma once
/// Kernels for bf16 and half: the arrays are converted, the kernel for floats runs, and its results are rounded once.

#include <optional>

#include <chorus/kernels/cpu/scratch.hpp>

namespace chorus::kernels {

namespace detail {

template <Narrow T>
class FloatArray {
 public:
  FloatArray(Cpu device, T* written, const T* read, Index count) : written_(written), count_(count) {
    if (written == nullptr && read == nullptr) return;
    numbers_.emplace(device, count);
    if (read != nullptr)
      for (Index i = 0; i < count; ++i) data()[i] = read[i];
  }
  float* data() const { return numbers_ ? numbers_->data() : nullptr; }
  void finish() const {
    if (written_ != nullptr)
      for (Index i = 0; i < count_; ++i) written_[i] = data()[i];
  }

 private:
  T* written_;
  Index count_;
  std::optional<Scratch<float>> numbers_;
};

template <class T>
struct ArrayArgument {
  T* written;
  const T* read;
  Index count;
};

}  // namespace detail

/// An array that a kernel reads; null stays null.
template <class T>
detail::ArrayArgument<T> reads(const T* data, Index count) {
  return {nullptr, data, count};
}
/// An array that a kernel overwrites, or, where `keep`, adds to; null stays null.
template <class T>
detail::ArrayArgument<T> writes(T* data, Index count, bool keep = false) {
  return {data, keep ? data : nullptr, count};
}

/// Calls `kernel(float*...)` with float copies of the arrays, and stores what it has written.
template <class Kernel, Narrow... T>
void in_float(Cpu device, const Kernel& kernel, detail::ArrayArgument<T>... arrays) {
  const auto run = [&](const auto&... floats) {
    kernel(floats.data()...);
    (floats.finish(), ...);
  };
  run(detail::FloatArray<T>(device, arrays.written, arrays.read, arrays.count)...);
}

}  // namespace chorus::kernels
