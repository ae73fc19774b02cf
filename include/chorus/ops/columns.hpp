#pragma once
/// Columns: a value whose last axis is sharded over the ranks of a TensorGroup. Element-wise functions accept it;
/// functions that mix columns don't compile.

#include <chorus/ops/placement.hpp>
#include <chorus/ops/tensor_regions.hpp>
#include <utility>

namespace chorus {

/// [..., width], of which this rank holds a contiguous range of columns: `part()`. Without a group it holds all.
template <class X>
using Columns = Placed<X, placement::Split<axis::Tensor, -1>>;

/// All columns, on every rank (all-gather).
template <class X>
auto gather_columns(const Columns<X>& x) {
  return all_gather<axis::Tensor>(x);
}

/// This rank's columns of a value that all ranks have.
template <Operand X>
auto scatter_columns(const X& x, Index unit = 1, const TensorGroupRef& group = tensor_group()) {
  const Index width = value_of(x).shape().back();
  auto part = scatter_axis(x, -1, unit, group);
  return Columns<decltype(part)>(std::move(part), width, unit, group);
}

}  // namespace chorus
