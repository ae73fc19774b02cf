// Part of the library chorus::compiled: what is computed with integers on the CPU.

#define CHORUS_BUILDS_LIBRARY
#include <chorus/compiled/erased.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/quantization/quantization_aware.hpp>
#include <cstdint>

namespace chorus::kernels {

template <class From, class... To>
struct Converted {
  static inline const Erased table[] = {erased(&convert<From, To>)...};
};
template struct Converted<bool, std::int64_t, std::int32_t, std::uint8_t>;
template struct Converted<std::int64_t, bool, std::int32_t, std::uint8_t>;
template struct Converted<std::int32_t, bool, std::int64_t, std::uint8_t>;
template struct Converted<std::uint8_t, bool, std::int64_t, std::int32_t>;

template <class T>
struct Reduced {
  static inline const Erased table[] = {erased(&sum<T>), erased(&amax<T>), erased(&amin<T>)};
};
template struct Reduced<std::int64_t>;

template <class F, class T, std::size_t N>
struct IntegersOfSameShape {
  static inline void (*const forward)(Cpu, const F&, Index, const std::array<const T*, N>&, T*) = pointwise_forward;
};
template <class F, class T, std::size_t N>
struct BroadcastIntegers {
  using Strides = std::span<const Index>;
  static inline void (*const forward)(Cpu, const F&, Strides, const std::array<const T*, N>&,
                                      const std::array<Strides, N>&, T*) = pointwise_forward;
};
#define CHORUS_OF_ONE(F)                                             \
  template struct IntegersOfSameShape<functors::F, std::int64_t, 1>; \
  template struct IntegersOfSameShape<functors::F, std::int32_t, 1>;
#define CHORUS_OF_TWO(F)                                             \
  template struct IntegersOfSameShape<functors::F, std::int64_t, 2>; \
  template struct IntegersOfSameShape<functors::F, std::int32_t, 2>; \
  template struct BroadcastIntegers<functors::F, std::int64_t, 2>;   \
  template struct BroadcastIntegers<functors::F, std::int32_t, 2>;
CHORUS_OF_ONE(AddScalar)
CHORUS_OF_ONE(MulScalar)
CHORUS_OF_ONE(Neg)
CHORUS_OF_ONE(SubtractFrom)
CHORUS_OF_TWO(Add)
CHORUS_OF_TWO(Mul)
CHORUS_OF_TWO(Sub)

}  // namespace chorus::kernels
