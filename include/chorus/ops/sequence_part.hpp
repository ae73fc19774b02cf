#pragma once
/// SequencePart: a value whose sequence positions are sharded over the ranks of a TensorGroup (sequence parallelism,
/// Korthikanti et al. 2022), between column-sharded layers. A type of its own, as Columns.

#include <chorus/core/random.hpp>
#include <chorus/kernels/dropout_part.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/tensor_regions.hpp>
#include <utility>

namespace chorus {

/// The group that shards sequences, if the policy uses sequence parallelism; else null.
inline TensorGroupRef sequence_group() {
  const auto& group = tensor_group();
  return group != nullptr && group->splits_sequences() ? group : nullptr;
}

/// [batch, length, ...], of which this rank holds adjacent positions: `part()`. Without a group it holds all.
template <Operand X>
class SequencePart {
 public:
  SequencePart(X part, Index length, TensorGroupRef group)
      : part_(std::move(part)), length_(length), group_(std::move(group)) {}

  const X& part() const { return part_; }
  Index length() const { return length_; }
  const TensorGroupRef& group() const { return group_; }
  /// The shape of the whole value.
  auto shape() const {
    auto shape = value_of(part_).shape();
    shape[1] = length_;
    return shape;
  }
  /// Another value with the same sharding.
  template <Operand Y>
  SequencePart<Y> with(Y part) const {
    return {std::move(part), length_, group_};
  }

 private:
  X part_;
  Index length_;
  TensorGroupRef group_;
};

/// This rank's positions of x: [batch, length, ...], which all ranks have; all positions without sequence parallelism.
/// Transformer blocks map SequenceParts to SequenceParts: call this before the blocks and gather_sequence after them,
/// and each rank works on its own positions in between.
template <Operand X>
auto split_sequence(const X& x, const TensorGroupRef& group = sequence_group()) {
  static_assert(tensor_of<X>::rank >= 2, "split_sequence: expected a value [batch, length, ...]");
  auto part = scatter_axis(x, 1, 1, group);
  return SequencePart<decltype(part)>(std::move(part), value_of(x).shape()[1], group);
}

/// All positions, on every rank (all-gather). All ranks must compute the same with them.
template <class X>
auto gather_sequence(const SequencePart<X>& x) {
  return gather_axis(x.part(), 1, x.length(), 1, false, x.group());
}

template <class A, class B>
auto operator+(const SequencePart<A>& a, const SequencePart<B>& b) {
  check<ShapeError>(a.length() == b.length() && a.group() == b.group(), "+: sequences of shapes ", a.shape(), " and ",
                    b.shape(), " are split in different ways");
  return a.with(a.part() + b.part());
}

/// Drops the same elements as on one device.
template <class X>
auto dropout(const SequencePart<X>& x, double p, bool training = true) {
  if (x.group() == nullptr || !(training && p > 0)) return x.with(dropout(x.part(), p, training));
  check<UsageError>(p < 1, "dropout: expected a probability in [0, 1), got ", p);
  const auto& value = value_of(x.part());
  const Index samples = value.size(0), count = value.size(1);
  const Index inner = samples * count == 0 ? 0 : value.numel() / (samples * count);
  const auto places = x.group()->part(x.length(), 1);
  return x.with(detail::dropout_part(x.part(), p, {x.length() * inner, places.begin * inner, count * inner}));
}

}  // namespace chorus
