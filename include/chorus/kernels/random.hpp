#pragma once
/// Random numbers, counter-based: number i of a stream depends on (seed, stream, i) alone, so that any part of the
/// stream can be drawn anywhere. A stream is a purpose: a parameter's number, an epoch.

#include <cstdint>
#include <vector>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

/// Numbers `offset` to `offset + count - 1` of a stream, uniform in [lo, hi): 24 random bits for a float, 53 for a
/// double. The floats have the same bits on every device.
template <class T>
void fill_uniform(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T lo, T hi);

/// Numbers `offset` to `offset + count - 1` of a stream, normally distributed (Box and Muller 1958, in double).
template <class T>
void fill_normal(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T mean,
                 T deviation);

/// The numbers 0 to n - 1 in random order (Fisher and Yates; Durstenfeld 1964).
std::vector<Index> permutation(std::uint64_t seed, std::uint64_t stream, Index n);

}  // namespace chorus::inline CHORUS_ABI::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/random.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/random.hpp>
#endif
