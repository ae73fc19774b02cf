#pragma once
/// Addresses: hints for the processor, and opacity for the compiler.

#include <chorus/core/dtype.hpp>

namespace chorus::kernels::detail {

/// `at`, with an origin that the compiler doesn't see. From 16 neighbouring addresses it would otherwise make 16
/// counters, all in memory.
template <class T>
[[gnu::always_inline]] inline T* opaque(T* at) {
#ifdef __GNUC__
  asm("" : "+r"(at));
#endif
  return at;
}

/// Prefetches the cache lines of `count` numbers that are read (or written) soon. No processor predicts short pieces
/// far apart.
template <bool Written = false, class T>
void fetch_ahead(const T* from, Index count) {
  constexpr Index line = 64 / Index{sizeof(T)};
  for (Index i = 0; i < count; i += line) __builtin_prefetch(from + i, Written ? 1 : 0, Written ? 3 : 2);
}

/// `count` stretches of `length` numbers, with `apart` numbers from one beginning to the next.
template <class T>
struct Stretches {
  const T* first;
  Index count, length, apart;

  /// Prefetches one of `parts` parts of them, so that they arrive while something else is computed.
  void fetch(Index part, Index parts) const {
    for (Index i = part * count / parts; i < (part + 1) * count / parts; ++i) fetch_ahead(first + i * apart, length);
  }
};

}  // namespace chorus::kernels::detail
