#pragma once
/// Rows of a table that has one for each place of a sequence.

#include <chorus/core/shared_places.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus::detail {

/// table: [places, ...] -> the rows of `count` places from `begin` on; if ranks share the tokens of each sample, those
/// of this rank's places. Throws UsageError if `count` is not their number.
template <Operand X>
auto rows_of_places(const X& table, Index begin, Index count) {
  const auto rows = [&](Index first, Index end) {
    if constexpr (AnyTensor<X>)
      return table.slice(0, first, end);
    else
      return slice(table, 0, first, end);
  };
  if (shared_places == nullptr) return rows(begin, begin + count);
  const auto& runs = shared_places->runs();
  check<UsageError>(count == shared_places->own(), "SequenceParallel: expected positions of ", shared_places->own(),
                    " places, this rank's part of a sample, got ", count);
  const auto run = [&](const AxisPart& part) { return rows(begin + part.begin, begin + part.begin + part.count); };
  return concat(0, run(runs[0]), run(runs[1]));
}

}  // namespace chorus::detail
