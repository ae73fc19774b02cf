#pragma once
/// Devices: the kind is a type, the index is a value.

#include <compare>
#include <concepts>
#include <cstddef>
#include <string>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

// nvcc loses defaulted comparisons, so devices define their own.

/// A processor of this machine. `Cpu{1}`, `Cpu{2}`, ... are virtual devices, with their own memory counters and, under
/// `DataParallel`, their own threads. One machine can thus run and test multi-device programs.
struct Cpu {
  int index = default_index();
  static constexpr const char* kind = "cpu";
  static constexpr int max_devices = 64;
  static constexpr int first_slot = 0;
  static constexpr std::size_t parameter_alignment = 1, large_parameter_alignment = 64;
  /// The index of `Cpu{}`: 0, or the one that `launch` chose for this process. Change it before tensors are created.
  static int& default_index() {
    static constinit int index = 0;
    return index;
  }
  friend constexpr bool operator==(const Cpu& a, const Cpu& b) { return a.index == b.index; }
  friend constexpr auto operator<=>(const Cpu& a, const Cpu& b) { return a.index <=> b.index; }
};

#if CHORUS_USE_CUDA
/// A GPU of this machine, by its index in the CUDA runtime. Programs that use it are compiled with nvcc.
struct Cuda {
  int index = default_index();
  static constexpr const char* kind = "cuda";
  static constexpr int max_devices = 64;
  static constexpr int first_slot = Cpu::max_devices;
  /// In bytes. Parameters in a buffer start at multiples of it, so that kernels use 16-byte accesses, also in 2-byte
  /// copies with the same layout.
  static constexpr std::size_t parameter_alignment = 32, large_parameter_alignment = 32;
  /// The index of `Cuda{}`: 0, or the one that `launch` chose for this rank. Change it before tensors are created.
  static int& default_index() {
    static int index = 0;
    return index;
  }
  friend constexpr bool operator==(const Cuda& a, const Cuda& b) { return a.index == b.index; }
  friend constexpr auto operator<=>(const Cuda& a, const Cuda& b) { return a.index <=> b.index; }
};
#endif

/// A device type has a kind and an index.
template <class D>
concept Device = std::regular<D> && requires(D d) {
  { d.index } -> std::convertible_to<int>;
  { D::kind } -> std::convertible_to<const char*>;
};

/// The first element index >= `element`, for elements of `size` bytes, that is aligned to `alignment` bytes.
constexpr std::size_t aligned_element(std::size_t element, std::size_t size, std::size_t alignment) {
  const std::size_t step = alignment < size ? 1 : alignment / size;
  return (element + step - 1) / step * step;
}

/// The number of elements of `size` bytes that a parameter of `count` elements takes in a shared buffer. A small
/// parameter follows directly, a large one at its `parameter_place`.
template <Device D>
constexpr std::size_t padded_count(std::size_t count, std::size_t size) {
  return aligned_element(count, size, D::parameter_alignment);
}

/// The index of a parameter's first element in a shared buffer, at or after element `end`. Parameters of a page or more
/// start at a cache line, so that few packets cross lines.
template <Device D>
constexpr std::size_t parameter_place(std::size_t end, std::size_t count, std::size_t size) {
  return aligned_element(end, size, count * size < 4096 ? D::parameter_alignment : D::large_parameter_alignment);
}

/// The trace slot that counts a device's memory. Each kind of device has its own slots.
template <Device D>
constexpr int trace_slot(D device) {
  return D::first_slot + device.index;
}

namespace detail {
/// The slot of the device for which this thread computes a pass; -1 outside of passes.
inline thread_local constinit int pass_slot = -1;
}  // namespace detail

/// The default device of new tensors: in a pass the pass's device, if it is of that kind; otherwise `D{}`.
template <Device D>
D default_device() {
  const int index = detail::pass_slot - D::first_slot;
  return 0 <= index && index < D::max_devices ? D{index} : D{};
}

template <Device D>
void append(std::string& out, const D& device) {
  out += D::kind;
  out += ':';
  append(out, device.index);
}

}  // namespace chorus
