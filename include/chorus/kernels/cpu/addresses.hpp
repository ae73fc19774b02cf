#pragma once
/// Where kernels find their numbers: what the processor is told of addresses, and what the compiler is not.

#include <chorus/core/dtype.hpp>

namespace chorus::kernels::detail {

/// `at`, but the compiler doesn't see what it was made of: of 16 addresses in a row it would else make 16 counters, all
/// in memory.
template <class T>
[[gnu::always_inline]] inline T* opaque(T* at) {
#ifdef __GNUC__
  asm("" : "+r"(at));
#endif
  return at;
}

/// Asks for the cache lines of `count` numbers that are read (or written) soon. What lies in short pieces far apart, no
/// processor foresees.
template <bool Written = false, class T>
void fetch_ahead(const T* from, Index count) {
  constexpr Index line = 64 / Index{sizeof(T)};
  for (Index i = 0; i < count; i += line) __builtin_prefetch(from + i, Written ? 1 : 0, Written ? 3 : 2);
}

/// `count` stretches of `length` numbers, `apart` numbers from one's beginning to the next one's.
template <class T>
struct Stretches {
  const T* first;
  Index count, length, apart;

  /// Asks for a part of them, of `parts`, so that they come while something else is computed.
  void fetch(Index part, Index parts) const {
    for (Index i = part * count / parts; i < (part + 1) * count / parts; ++i) fetch_ahead(first + i * apart, length);
  }
};

}  // namespace chorus::kernels::detail
