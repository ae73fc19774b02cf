#pragma once
/// Along which axis the outputs of the devices are joined, and which outputs are refused.

#include <chorus/ops/shape.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <cstddef>
#include <vector>

namespace chorus::dp {

/// The axis along which outputs, one per device, are joined: the axis of their type (BatchAxis), else `split.dim`.
/// Throws ShapeError if shapes differ in another axis, or if samples lie along another axis: joining a state [layers,
/// batch, hidden] along axis 0 would give another result than one device. An output has its samples along `dim` if it
/// has the same number of rows there, at least one, per sample. An output with its samples along another axis is
/// refused. An output without samples, such as a mean of shape [1], is joined.
template <Operand Part>
std::size_t joined_axis(const std::vector<const Part*>& parts, const Split& split) {
  const int dim = detail::batch_axis_of<Part>(split.dim);
  if constexpr (detail::said_axis<Part> == detail::no_axis) {
    check<ShapeError>(parts.size() == 1, "DataParallel: an output whole(...) of shape ", value_of(*parts[0]).shape(),
                      " belongs to the whole batch, so the outputs of ", parts.size(),
                      " devices can't be joined: return only outputs of samples");
    return 0;
  }
  const auto axis = normalize_axis("DataParallel", dim, tensor_of<Part>::rank);
  if (parts.size() == 1) return axis;
  const auto& first = value_of(*parts[0]).shape();
  const auto on_all = [&](const auto& holds) {
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (!holds(value_of(*parts[i]).shape(), split.size(i))) return false;
    return true;
  };
  if constexpr (detail::says_batch_axis<Part>) {
    const bool right = on_all([&](const auto& shape, Index samples) { return shape[axis] == samples; });
    check<ShapeError>(right, "DataParallel: expected the samples of an output along axis ", dim, ": replica 0's, of ",
                      split.size(0), " samples, has shape ", first);
  } else if (const Index rows = first[axis] / split.size(0);
             rows == 0 || !on_all([&](const auto& shape, Index samples) { return shape[axis] == rows * samples; })) {
    for (std::size_t other = 0; other < first.size(); ++other)
      if (other != axis && on_all([&](const auto& shape, Index samples) { return shape[other] == samples; }))
        fail<ShapeError>("DataParallel: replica 0's output of shape ", first, " has its ", split.size(0),
                         " samples along axis ", other, ", but outputs are joined along axis ", dim,
                         ": return batch_axis<", other, ">(output) from the model, or a vector from each device");
  }
  for (std::size_t i = 1; i < parts.size(); ++i) {
    auto expected = first;
    expected[axis] = value_of(*parts[i]).shape()[axis];
    check<ShapeError>(value_of(*parts[i]).shape() == expected, "DataParallel: replica ", i, "'s output of shape ",
                      value_of(*parts[i]).shape(), " can't be joined to replica 0's of shape ", first, " along axis ",
                      dim);
  }
  return axis;
}

}  // namespace chorus::dp
