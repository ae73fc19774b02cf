#pragma once
/// Columns: a value whose last axis is sharded over the ranks of a TensorGroup, as its own type. Element-wise functions
/// accept it; functions that mix columns don't compile.

#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/tensor_regions.hpp>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace chorus {

/// [..., width], of which this rank holds a contiguous range of columns: `part()`. Without a group it holds all.
template <Operand X>
class Columns {
 public:
  using operand_type = X;

  /// `unit`: see Split. Throws ShapeError if the part does not have this rank's size.
  Columns(X part, Index width, Index unit = 1, TensorGroupRef group = nullptr)
      : part_(std::move(part)), width_(width), unit_(unit), group_(std::move(group)) {
    check<ShapeError>(value_of(part_).shape().back() == range().count, "Columns: expected ", range().count, " of ",
                      width, " columns, got shape ", value_of(part_).shape());
  }

  const X& part() const { return part_; }
  Index width() const { return width_; }
  Index unit() const { return unit_; }
  const TensorGroupRef& group() const { return group_; }
  /// The range of columns that this rank holds.
  AxisPart range() const { return group_ ? group_->part(width_, unit_) : AxisPart{0, width_}; }
  /// The shape of the whole value.
  auto shape() const {
    auto shape = value_of(part_).shape();
    shape.back() = width_;
    return shape;
  }
  /// Another value with the same sharding.
  template <Operand Y>
  Columns<Y> with(Y part) const {
    return {std::move(part), width_, unit_, group_};
  }
  /// Whether two values have the same sharding.
  template <class Y>
  bool same_as(const Columns<Y>& other) const {
    return width_ == other.width() && group_ == other.group() &&
           (group_ == nullptr || unit_ == other.unit() || group_->size() == 1);
  }

 private:
  X part_;
  Index width_, unit_;
  TensorGroupRef group_;
};

namespace detail {
template <class X>
inline constexpr bool is_columns = false;
template <class X>
inline constexpr bool is_columns<Columns<X>> = true;
template <class... Xs>
inline constexpr bool no_columns = false;

template <class A, class B>
void check_same_columns(const char* operation, const Columns<A>& a, const Columns<B>& b) {
  check<ShapeError>(a.same_as(b), operation, ": columns of shapes ", a.shape(), " and ", b.shape(),
                    " are split in different ways");
}
}  // namespace detail

/// All columns, on every rank (all-gather).
template <class X>
auto gather_columns(const Columns<X>& x) {
  return gather_axis(x.part(), -1, x.width(), x.unit(), false, x.group());
}

/// This rank's columns of a value that all ranks have.
template <Operand X>
auto scatter_columns(const X& x, Index unit = 1, const TensorGroupRef& group = tensor_group()) {
  const Index width = value_of(x).shape().back();
  auto part = scatter_axis(x, -1, unit, group);
  return Columns<decltype(part)>(std::move(part), width, unit, group);
}

#define CHORUS_OF_COLUMNS(FUNCTION)                               \
  template <class X, class... Numbers>                            \
  auto FUNCTION(const Columns<X>& x, const Numbers&... numbers) { \
    return x.with(FUNCTION(x.part(), numbers...));                \
  }
CHORUS_OF_COLUMNS(relu)
CHORUS_OF_COLUMNS(relu6)
CHORUS_OF_COLUMNS(sigmoid)
CHORUS_OF_COLUMNS(log_sigmoid)
CHORUS_OF_COLUMNS(silu)
CHORUS_OF_COLUMNS(gelu)
CHORUS_OF_COLUMNS(gelu_tanh)
CHORUS_OF_COLUMNS(mish)
CHORUS_OF_COLUMNS(hardsigmoid)
CHORUS_OF_COLUMNS(hardswish)
CHORUS_OF_COLUMNS(leaky_relu)
CHORUS_OF_COLUMNS(elu)
CHORUS_OF_COLUMNS(softplus)
CHORUS_OF_COLUMNS(hardtanh)
CHORUS_OF_COLUMNS(abs)
CHORUS_OF_COLUMNS(square)
CHORUS_OF_COLUMNS(sqrt)
CHORUS_OF_COLUMNS(exp)
CHORUS_OF_COLUMNS(log)
CHORUS_OF_COLUMNS(sin)
CHORUS_OF_COLUMNS(cos)
CHORUS_OF_COLUMNS(tanh)
CHORUS_OF_COLUMNS(erf)
#undef CHORUS_OF_COLUMNS

#define CHORUS_OF_COLUMNS(OP)                                 \
  template <class A, class B>                                 \
  auto operator OP(const Columns<A>& a, const Columns<B>& b) { \
    detail::check_same_columns(#OP, a, b);                    \
    return a.with(a.part() OP b.part());                      \
  }                                                           \
  template <class X>                                          \
  auto operator OP(const Columns<X>& x, Arithmetic auto n) {  \
    return x.with(x.part() OP n);                             \
  }                                                           \
  template <class X>                                          \
  auto operator OP(Arithmetic auto n, const Columns<X>& x) {  \
    return x.with(n OP x.part());                             \
  }
CHORUS_OF_COLUMNS(+)
CHORUS_OF_COLUMNS(-)
CHORUS_OF_COLUMNS(*)
CHORUS_OF_COLUMNS(/)
#undef CHORUS_OF_COLUMNS

template <class X>
auto operator-(const Columns<X>& x) {
  return x.with(-x.part());
}

// Functions that would mix columns. They return x, so that the message below is the only error.
#define CHORUS_MIXES_COLUMNS(FUNCTION)                                                                               \
  template <class X, class... More>                                                                                  \
  auto FUNCTION(const Columns<X>& x, const More&...) {                                                               \
    static_assert(detail::no_columns<X, More...>,                                                                    \
                  #FUNCTION ": it mixes columns, which ranks split: use gather_columns(x), or a "                   \
                            "RowParallelLinear");                                                                    \
    return x.part();                                                                                                 \
  }
CHORUS_MIXES_COLUMNS(linear)
CHORUS_MIXES_COLUMNS(matmul)
CHORUS_MIXES_COLUMNS(softmax)
CHORUS_MIXES_COLUMNS(log_softmax)
CHORUS_MIXES_COLUMNS(layer_norm)
CHORUS_MIXES_COLUMNS(sum)
CHORUS_MIXES_COLUMNS(mean)
#undef CHORUS_MIXES_COLUMNS

/// Drops the same elements as on one device: random numbers are drawn at the part's position in each row.
template <class X>
auto dropout(const Columns<X>& x, double p, bool training = true) {
  static_assert(tensor_of<X>::rank >= 2, "dropout: expected an input with a batch axis");
  if (x.group() == nullptr || !(training && p > 0)) return x.with(dropout(x.part(), p, training));
  check<UsageError>(p < 1, "dropout: expected a probability in [0, 1), got ", p);
  const auto columns = x.range();
  return x.with(detail::dropout_part(x.part(), p, {x.width(), columns.begin, columns.count}));
}

/// Reshapes all axes but the last, which must stay: `shape` counts all columns. Throws ShapeError.
template <class X, std::size_t NewRank>
auto reshape(const Columns<X>& x, std::array<Index, NewRank> shape) {
  check<ShapeError>(shape.back() == x.width(), "reshape: split columns must stay the last axis: expected ", x.width(),
                    " as its size, got ", shape);
  shape.back() = x.range().count;
  return x.with(reshape(x.part(), shape));
}

}  // namespace chorus
