#pragma once
/// The arithmetic of collectives: engines move bytes and call these functions on them.

#include <bit>
#include <chorus/comm/engine/engine.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace chorus::comm {

namespace detail {

template <class C>
using unsigned_of = std::conditional_t<sizeof(C) == 4, std::uint32_t, std::uint64_t>;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a || b;
    } else if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;  // signed overflow is undefined
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return static_cast<T>(a + b);
    }
  }
};
/// If two numbers are equal, or one is NaN, a comparison selects the operand at a certain position; the two orders
/// together select both. The bitwise or of both selections is the same in either order: -0 for 0 and -0, a NaN for
/// anything and a NaN.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return std::bit_cast<T>(std::bit_cast<unsigned_of<T>>(a < b ? a : b) |
                              std::bit_cast<unsigned_of<T>>(b < a ? b : a));
    else
      return a < b ? a : b;
  }
};
/// In max 0 wins over -0. Subtracting the two selections finds a wrong sign bit (-0 - -0 = 0); if they are equal, the
/// difference is 0.
struct Max {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      const auto x = std::bit_cast<unsigned_of<T>>(a > b ? a : b), y = std::bit_cast<unsigned_of<T>>(b > a ? b : a);
      return std::bit_cast<T>(x | y) - std::bit_cast<T>(x ^ y);
    } else {
      return a > b ? a : b;
    }
  }
};

/// Calls f(i) for i in [0, count), in blocks of constant length, which compilers vectorise even at -O2.
template <class Function>
void for_each_index(std::size_t count, Function f) {
  constexpr std::size_t block = 64;
  std::size_t i = 0;
  for (; i + block <= count; i += block) {
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (std::size_t j = i; j < i + block; ++j) f(j);
  }
  for (; i < count; ++i) f(i);
}

template <class T, class Op>
void combine(void* out, const void* in, const void* mine, std::size_t count) {
  const auto o = static_cast<T*>(out);
  const auto a = static_cast<const T*>(in), b = static_cast<const T*>(mine);
  if constexpr (Real<T>) {
    for_each_index(count, [=](std::size_t i) { o[i] = Op::template apply<compute_type<T>>(a[i], b[i]); });
  } else {
    for_each_index(count, [=](std::size_t i) { o[i] = Op::apply(a[i], b[i]); });
  }
}

/// The product x, rounded. With `zero`, a 0 that the compiler doesn't know, it can't be fused with an addition.
template <class T>
T rounded(T x, unsigned_of<T> zero) {
  return std::bit_cast<T>(std::bit_cast<unsigned_of<T>>(x) | zero);
}

template <class T, class Op>
void combine_products(void* out, const void* in, double in_scale, const void* mine, double mine_scale,
                      std::size_t count) {
  if (in_scale == 1 && mine_scale == 1) return combine<T, Op>(out, in, mine, count);
  if constexpr (Real<T>) {
    using C = compute_type<T>;
    const auto o = static_cast<T*>(out);
    const auto a = static_cast<const T*>(in), b = static_cast<const T*>(mine);
    const auto fa = static_cast<C>(in_scale), fb = static_cast<C>(mine_scale);
    unsigned_of<C> zero = 0;
    asm("" : "+r"(zero));  // hides the value from the compiler
    for_each_index(count, [=](std::size_t i) {
      const auto x = static_cast<T>(rounded<C>(fa * a[i], zero)), y = static_cast<T>(rounded<C>(fb * b[i], zero));
      o[i] = Op::template apply<C>(x, y);
    });
  }
}

template <class T>
void scaled(void* out, const void* mine, std::size_t count, double scale) {
  if constexpr (Real<T>) {
    if (scale != 1) {
      const auto o = static_cast<T*>(out);
      const auto a = static_cast<const T*>(mine);
      const auto factor = static_cast<compute_type<T>>(scale);
      for_each_index(count, [=](std::size_t i) { o[i] = static_cast<T>(factor * a[i]); });
      return;
    }
  }
  if (count != 0 && out != mine) std::memcpy(out, mine, count * sizeof(T));
}

}  // namespace detail

template <Scalar T>
Reduction reduction(ReduceOp op, double scale) {
  check<UsageError>(scale == 1 || Real<T>, "collective: scale ", scale, " needs floating-point numbers, these are ",
                    dtype<T>);
  const auto with = [&]<class Operator>(Operator) -> Reduction {
    return {
        dtype<T>,          op, sizeof(T), scale, &detail::combine<T, Operator>, &detail::combine_products<T, Operator>,
        &detail::scaled<T>};
  };
  if (op == ReduceOp::min) return with(detail::Min{});
  if (op == ReduceOp::max) return with(detail::Max{});
  return with(detail::Sum{});
}

}  // namespace chorus::comm
