#pragma once
/// Devices: the kind is a type, the number is a value.

#include <compare>
#include <concepts>
#include <cstddef>
#include <string>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

// nvcc loses defaulted comparisons, so devices define theirs.

/// A processor of this machine. `Cpu{1}`, `Cpu{2}`, ... are virtual devices: each has its own memory account, and under
/// `DataParallel` its own thread. So one machine runs and tests everything about several devices.
struct Cpu {
  int index = default_index();
  static constexpr const char* kind = "cpu";
  static constexpr int max_devices = 64;
  static constexpr int first_slot = 0;
  static constexpr std::size_t parameter_alignment = 1, large_parameter_alignment = 64;
  /// The number of `Cpu{}`: 0, or the choice of `launch` for this process. Change it before tensors are made.
  static int& default_index() {
    static constinit int index = 0;
    return index;
  }
  friend constexpr bool operator==(const Cpu& a, const Cpu& b) { return a.index == b.index; }
  friend constexpr auto operator<=>(const Cpu& a, const Cpu& b) { return a.index <=> b.index; }
};

#if CHORUS_USE_CUDA
/// A GPU of this machine, by its number in the CUDA runtime. nvcc compiles the programs that compute on it.
struct Cuda {
  int index = default_index();
  static constexpr const char* kind = "cuda";
  static constexpr int max_devices = 64;
  static constexpr int first_slot = Cpu::max_devices;
  /// In bytes. In a buffer of parameters each parameter begins at a multiple of it, so that kernels access it 16 bytes
  /// at a time. The same holds for 2-byte copies in the same order.
  static constexpr std::size_t parameter_alignment = 32, large_parameter_alignment = 32;
  /// The number of `Cuda{}`: 0, or the choice of `launch` for this rank. Change it before tensors are made.
  static int& default_index() {
    static int index = 0;
    return index;
  }
  friend constexpr bool operator==(const Cuda& a, const Cuda& b) { return a.index == b.index; }
  friend constexpr auto operator<=>(const Cuda& a, const Cuda& b) { return a.index <=> b.index; }
};
#endif

/// A device type: a kind and an index.
template <class D>
concept Device = std::regular<D> && requires(D d) {
  { d.index } -> std::convertible_to<int>;
  { D::kind } -> std::convertible_to<const char*>;
};

/// The first element from number `element` on, of `size` bytes each, that begins at a multiple of `alignment` bytes.
constexpr std::size_t aligned_element(std::size_t element, std::size_t size, std::size_t alignment) {
  const std::size_t step = alignment < size ? 1 : alignment / size;
  return (element + step - 1) / step * step;
}

/// The number of elements of `size` bytes that a parameter of `count` takes in a buffer of many. A small parameter
/// begins right after it, a large one at its `parameter_place`.
template <Device D>
constexpr std::size_t padded_count(std::size_t count, std::size_t size) {
  return aligned_element(count, size, D::parameter_alignment);
}

/// The first element of a parameter of `count` elements of `size` bytes in a buffer of many: the first suitable place
/// from element `end` on. Parameters of a page and more begin with a cache line, so that few packets lie in two.
template <Device D>
constexpr std::size_t parameter_place(std::size_t end, std::size_t count, std::size_t size) {
  return aligned_element(end, size, count * size < 4096 ? D::parameter_alignment : D::large_parameter_alignment);
}

/// The place where `trace` counts a device's memory: each kind of device has its own slots.
template <Device D>
constexpr int trace_slot(D device) {
  return D::first_slot + device.index;
}

namespace detail {
/// The slot of the device whose part of a pass this thread computes; -1 outside of passes.
inline thread_local constinit int pass_slot = -1;
}  // namespace detail

/// The device of a tensor for which none is named: within a pass the pass's device, if it is of that kind, otherwise
/// `D{}`.
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
