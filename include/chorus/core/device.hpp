#pragma once
/// Devices: the kind is a type, the number is a value.

#include <compare>
#include <concepts>
#include <cstddef>
#include <string>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus::inline CHORUS_ABI {

// nvcc loses comparisons that are defaulted, so devices write theirs out.

/// A processor of this machine. `Cpu{1}`, `Cpu{2}`, ... are virtual devices: each has its own memory account, and under
/// `DataParallel` its own thread, so that everything about several devices can be run and tested on one machine.
struct Cpu {
  int index = 0;
  static constexpr const char* kind = "cpu";
  static constexpr int max_devices = 64;
  static constexpr int first_slot = 0;
  static constexpr std::size_t parameter_alignment = 1, large_parameter_alignment = 64;
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
  /// The number behind `Cuda{}`: 0, or what `launch` has chosen for this rank. To be changed before tensors are made.
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

/// How many elements of `size` bytes a parameter of `count` takes in a buffer of many: up to where the next one begins.
template <Device D>
constexpr std::size_t padded_count(std::size_t count, std::size_t size) {
  const std::size_t step = D::parameter_alignment < size ? 1 : D::parameter_alignment / size;
  return (count + step - 1) / step * step;
}

/// Where a parameter of `count` elements of `size` bytes begins in a buffer of many: the first place from element `end`
/// on that suits it. Parameters of a page and more begin with a cache line, so that few packets lie in two.
template <Device D>
constexpr std::size_t parameter_place(std::size_t end, std::size_t count, std::size_t size) {
  const std::size_t alignment = count * size < 4096 ? D::parameter_alignment : D::large_parameter_alignment;
  const std::size_t step = alignment < size ? 1 : alignment / size;
  return (end + step - 1) / step * step;
}

/// Where `trace` counts a device's memory: kinds of devices have slots of their own.
template <Device D>
constexpr int trace_slot(D device) {
  return D::first_slot + device.index;
}

template <Device D>
void append(std::string& out, const D& device) {
  out += D::kind;
  out += ':';
  append(out, device.index);
}

}  // namespace chorus
