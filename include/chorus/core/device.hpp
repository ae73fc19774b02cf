#pragma once
/// Devices: the kind is a type, the number is a value.

#include <compare>
#include <concepts>
#include <cstddef>
#include <string>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

// nvcc loses comparisons that are defaulted, so devices write theirs out.

/// A processor of this machine. `Cpu{1}`, `Cpu{2}`, ... are virtual devices: each has its own memory account, and under
/// `DataParallel` its own thread, so that everything about several devices can be run and tested on one machine.
struct Cpu {
  int index = default_index();
  static constexpr const char* kind = "cpu";
  static constexpr int max_devices = 64;
  static constexpr int first_slot = 0;
  static constexpr std::size_t parameter_alignment = 1, large_parameter_alignment = 64;
  /// The number of `Cpu{}`: 0, or what `launch` has chosen for this process. To be changed before tensors are made.
  static int& default_index() {
    static constinit int index = 0;
    return index;
  }
  friend constexpr bool operator==(const Cpu& a, const Cpu& b) { return a.index == b.index; }
  friend constexpr auto operator<=>(const Cpu& a, const Cpu& b) { return a.index <=> b.index; }
};

#if CHORUS_USE_CUDA
/// A GPU of this machine, by its number in the CUDA runtime. Programs that compute on it are compiled by nvcc.
struct Cuda {
  int index = default_index();
  static constexpr const char* kind = "cuda";
  static constexpr int max_devices = 64;
  static constexpr int first_slot = Cpu::max_devices;
  /// In bytes. Where a model's parameters lie in one buffer each begins at a multiple of it, so that kernels access it
  /// 16 bytes at a time; and so it is with 2-byte copies in the same order.
  static constexpr std::size_t parameter_alignment = 32, large_parameter_alignment = 32;
  /// The number of `Cuda{}`: 0, or what `launch` has chosen for this rank. To be changed before tensors are made.
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

/// How many elements of `size` bytes a parameter of `count` takes in a buffer of many. A small one that follows begins
/// right after them, a large one at its `parameter_place`.
template <Device D>
constexpr std::size_t padded_count(std::size_t count, std::size_t size) {
  return aligned_element(count, size, D::parameter_alignment);
}

/// Where a parameter of `count` elements of `size` bytes begins in a buffer of many: the first place from element `end`
/// on that suits it. Parameters of a page and more begin with a cache line, so that few packets lie in two.
template <Device D>
constexpr std::size_t parameter_place(std::size_t end, std::size_t count, std::size_t size) {
  return aligned_element(end, size, count * size < 4096 ? D::parameter_alignment : D::large_parameter_alignment);
}

/// Where `trace` counts a device's memory: kinds of devices have slots of their own.
template <Device D>
constexpr int trace_slot(D device) {
  return D::first_slot + device.index;
}

namespace detail {
/// The slot of the device whose part of a pass this thread computes; -1 outside of passes.
inline thread_local constinit int pass_slot = -1;
}  // namespace detail

/// Where a tensor is made for which nobody names a device: within a pass on the pass's device, if it is of that kind,
/// else on `D{}`.
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
