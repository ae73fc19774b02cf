#pragma once
/// Byte copies and zeroing: the functions that each kind of device provides.

#include <cstddef>
#include <cstring>

#include <chorus/core/device.hpp>

namespace chorus {

/// Copies bytes between non-overlapping ranges.
inline void copy_bytes(Cpu, void* to, Cpu, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

inline void zero_bytes(Cpu, void* data, std::size_t bytes) {
  if (bytes != 0) std::memset(data, 0, bytes);
}

}  // namespace chorus

#if CHORUS_USE_CUDA
#include <chorus/tensor/cuda/memory.hpp>
#endif
