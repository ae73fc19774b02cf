#pragma once
/// Kernels for bf16 and half on the CPU: converts the arrays, runs the float kernel and rounds its results once.

#include <chorus/kernels/cpu/scratch.hpp>
#include <optional>

namespace chorus::kernels {

namespace detail {

template <class From, class To>
void convert_array(Index count, const From* from, To* to) {
  parallel_ranges(count, 64, thread_elements, [=](Index first, Index n) {
    for (Index i = first; i < first + n; ++i) to[i] = static_cast<To>(static_cast<compute_type<From>>(from[i]));
  });
}

template <Narrow T>
struct NarrowArray {
  T* written;
  const T* read;
  Index count;
};

/// An argument of the float kernel: unchanged, or a float copy of an array. Null stays null.
template <class T>
struct FloatArgument {
  const T& value;
  FloatArgument(Cpu, const T& argument) : value(argument) {}
  const T& get() const { return value; }
  void finish() const {}
};

template <Narrow T>
struct FloatArgument<NarrowArray<T>> {
  FloatArgument(Cpu device, const NarrowArray<T>& argument) : array(argument) {
    if (array.written == nullptr && array.read == nullptr) return;
    numbers.emplace(device, array.count);
    if (array.read != nullptr) convert_array(array.count, array.read, get());
  }
  float* get() const { return numbers ? numbers->data() : nullptr; }
  void finish() const {
    if (array.written != nullptr) convert_array(array.count, get(), array.written);
  }

  NarrowArray<T> array;
  std::optional<Scratch<float>> numbers;
};

}  // namespace detail

/// An array that a kernel reads; null stays null.
template <Narrow T>
detail::NarrowArray<T> reads(const T* data, Index count) {
  return {nullptr, data, count};
}
/// An array that a kernel overwrites, or, with `keep`, adds to; null stays null.
template <Narrow T>
detail::NarrowArray<T> writes(T* data, Index count, bool keep = false) {
  return {data, keep ? data : nullptr, count};
}

/// Float arrays are written in place.
inline float* writes(float* data, Index, bool = false) { return data; }

/// Calls `kernel(device, arguments...)` with float copies of the arrays, and stores the results.
template <class Kernel, class... Arguments>
void in_float(const Kernel& kernel, Cpu device, const Arguments&... arguments) {
  const auto run = [&](const auto&... floats) {
    kernel(device, floats.get()...);
    (floats.finish(), ...);
  };
  run(detail::FloatArgument<Arguments>(device, arguments)...);
}

}  // namespace chorus::kernels
