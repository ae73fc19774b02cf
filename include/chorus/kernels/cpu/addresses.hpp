#pragma once
/// Prefetches, and pointers that the compiler cannot analyse.

#include <chorus/core/dtype.hpp>

namespace chorus::kernels::detail {

/// `at`, hidden from the compiler. For 16 adjacent addresses it would otherwise keep 16 counters, all in memory.
template <class T>
[[gnu::always_inline]] inline T* opaque(T* at) {
#ifdef __GNUC__
  asm("" : "+r"(at));
#endif
  return at;
}

/// Prefetches the cache lines of `count` numbers that are read (or written) soon. Processors don't prefetch short
/// pieces that are far apart.
template <bool Written = false, class T>
void fetch_ahead(const T* from, Index count) {
  constexpr Index line = 64 / Index{sizeof(T)};
  for (Index i = 0; i < count; i += line) __builtin_prefetch(from + i, Written ? 1 : 0, Written ? 3 : 2);
}

/// `count` stretches of `length` numbers each, which start `apart` numbers apart.
template <class T>
struct Stretches {
  const T* first;
  Index count, length, apart;

  /// Prefetches one of `parts` parts of the stretches, so that they arrive during other computations.
  void fetch(Index part, Index parts) const {
    for (Index i = part * count / parts; i < (part + 1) * count / parts; ++i) fetch_ahead(first + i * apart, length);
  }
};

}  // namespace chorus::kernels::detail
