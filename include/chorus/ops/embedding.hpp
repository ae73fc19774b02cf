#pragma once
/// Embedding with a padding entry.

#include <algorithm>
#include <chorus/kernels/transform.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/masking.hpp>
#include <cstdint>

namespace chorus {

namespace functors {
struct IsEntry {
  std::int64_t entry;
  CHORUS_HD bool operator()(std::int64_t index) const { return index == entry; }
};
}  // namespace functors

/// embedding(weight, index), but entry `padding_index` gets no gradient. Throws UsageError if it is out of range.
template <Operand W, int Rank, class D>
auto embedding(const W& weight, const Tensor<std::int64_t, Rank, D>& index, Index padding_index) {
  check<UsageError>(padding_index >= 0 && padding_index < value_of(weight).size(0), "embedding: padding_index ",
                    padding_index, " is not in [0, ", value_of(weight).size(0), ")");
  const auto rows = embedding(weight, index);
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = 1;
  const auto indices = contiguous(index);
  const auto padding = Tensor<bool, Rank + 1, D>::empty(shape, index.device());
  kernels::transform(index.device(), functors::IsEntry{padding_index}, indices.numel(), padding.data(), indices.data());
  return where(padding, value_of(rows), rows);
}
template <Operand W, Narrow T, int Rank, class D>
auto embedding(const W& weight, const NarrowIndices<T, Rank, D>& index, Index padding_index) {
  return to<T>(embedding(weight, index.plain(), padding_index));
}

}  // namespace chorus
