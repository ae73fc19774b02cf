#pragma once
/// Counter-based random numbers: number i of a stream depends only on (seed, stream, i), so that any part of the stream
/// can be drawn anywhere. Each purpose, such as a parameter or an epoch, has a stream.

#include <cstdint>
#include <vector>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/dropout_key.hpp>

namespace chorus::kernels {

/// Numbers `offset` to `offset + count - 1` of a stream, uniform in [lo, hi): 24 random bits for a float, 53 for a
/// double. The floats have the same bits on every device.
template <class T>
void fill_uniform(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T lo, T hi);

/// Numbers `offset` to `offset + count - 1` of a stream, normally distributed (Box and Muller 1958, in double).
template <class T>
void fill_normal(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T mean,
                 T deviation);

// The numbers of a random operation. A row's numbers are a pure function of the key and of the row's index in the
// global batch, `key.first_sample` + its index here, on any device. `out`: [rows, inner].

/// Uniform in [0, 1), at most `last`, with as many bits as above. Floats have the same bits on every device.
template <class T>
void draw_uniform(Cpu, Index rows, Index inner, T* out, T last, const RandomKey& key);

/// Standard normal.
template <class T>
void draw_normal(Cpu, Index rows, Index inner, T* out, const RandomKey& key);

/// Uniform integers in [low, low + range). The same on every device.
template <class T>
void draw_integers(Cpu, Index rows, Index inner, T* out, std::int64_t low, std::uint64_t range, const RandomKey& key);

/// out = 1 with probability p, else 0; NaN if p is not in [0, 1].
template <class T>
void is_below(Cpu, Index count, const T* p, T* out);

/// A random permutation of 0 to n - 1 (Fisher and Yates; Durstenfeld 1964).
std::vector<Index> permutation(std::uint64_t seed, std::uint64_t stream, Index n);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/random.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/random.hpp>
#endif
