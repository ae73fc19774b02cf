#pragma once
/// The rows of a table whose entries ranks share.

#include <algorithm>
#include <chorus/core/tensor_group.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/masking.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

namespace chorus::detail {

/// weight: this rank's `part` of `entries`: [part, features], index: [...] -> [..., features], zero where another rank
/// has the entry. Throws UsageError for an index out of range.
template <Operand W, int Rank, class D>
auto rows_here(const W& weight, const Tensor<std::int64_t, Rank, D>& index, Index entries, const AxisPart& part) {
  using Rows = decltype(embedding(weight, index));
  auto own = contiguous(index).to_vector();
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = 1;
  auto elsewhere = Tensor<bool, Rank + 1, Cpu>::empty(shape);
  for (std::size_t i = 0; i < own.size(); ++i) {
    check<UsageError>(own[i] >= 0 && own[i] < entries, "embedding: index ", own[i], " is not in [0, ", entries, ")");
    own[i] -= part.begin;
    elsewhere.data()[i] = own[i] < 0 || own[i] >= part.count;
    if (elsewhere.data()[i]) own[i] = 0;
  }
  const auto device = index.device();
  const auto rows =
      embedding(weight, Tensor<std::int64_t, Rank, D>::from(std::span<const std::int64_t>(own), index.shape(), device));
  const auto nothing = tensor_of<decltype(rows)>::zeros(value_of(rows).shape(), device);
  return Rows(where(Tensor<bool, Rank + 1, D>::from(std::span<const bool>(elsewhere.data(), own.size()), shape, device),
                    nothing, rows));
}

}  // namespace chorus::detail
