#pragma once
/// Integer inputs of models that compute in 16 bits.

#include <chorus/ops/cast.hpp>
#include <cstdint>
#include <utility>

namespace chorus {

/// Indices that MixedPrecision passes to a model that computes in T: an embedding returns T for them. Otherwise a plain
/// Tensor.
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

/// x in the scalar type of `other`: to<...>(x).
template <Operand X, Operand Other>
auto type_as(const X& x, const Other&) {
  return to<typename tensor_of<Other>::value_type>(x);
}

}  // namespace chorus
