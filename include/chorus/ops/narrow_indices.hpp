#pragma once
/// The type that what is looked up by integers has, in models that compute in 16 bits.

#include <chorus/ops/cast.hpp>
#include <cstdint>
#include <utility>

namespace chorus {

/// Integers of a model that computes in T, as MixedPrecision hands them to it: what an embedding looks up by them is T.
/// For everything else a Tensor like any other.
template <Narrow T, int Rank, Device D = Cpu>
class NarrowIndices : public Tensor<std::int64_t, Rank, D> {
 public:
  explicit NarrowIndices(Tensor<std::int64_t, Rank, D> index) : Tensor<std::int64_t, Rank, D>(std::move(index)) {}

  const Tensor<std::int64_t, Rank, D>& plain() const { return *this; }
};

namespace detail {
template <class T, int Rank, class D>
inline constexpr bool is_tensor<NarrowIndices<T, Rank, D>> = true;
}  // namespace detail

template <Narrow T, int Rank, class D>
const Tensor<std::int64_t, Rank, D>& value_of(const NarrowIndices<T, Rank, D>& x) {
  return value_of(x.plain());
}

/// The numbers of x in the scalar type of `other`: to<...>(x).
template <Operand X, Operand Other>
auto type_as(const X& x, const Other&) {
  return to<typename tensor_of<Other>::value_type>(x);
}

}  // namespace chorus
