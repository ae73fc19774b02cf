#pragma once
/// Placement types: what the ranks of an axis hold of a value, as a part of its type.
///
/// | kind | value | gradient |
/// |---|---|---|
/// | a plain Variable | the same on all ranks | the same on all, complete |
/// | placement::Copied<Axis> | the same on all ranks | a term of a sum |
/// | placement::Split<Axis, dim> | a part | a part |
/// | placement::Partial<Axis> | a term of a sum that has not been taken | the same on all |
///
/// A plain value and a Copied one differ in backward alone. A Tensor has no gradient and counts as both.

#include <array>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/tensor_group.hpp>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus {

using TensorGroupRef = std::shared_ptr<TensorGroup>;

/// Tags for the axes along which ranks share a computation. A tag of your own has `group()`: the ranks of this pass, or
/// null if there is no such axis.
namespace axis {
/// The ranks of TensorParallel, or of a Mesh's axis Tensor.
struct Tensor {
  static const TensorGroupRef& group() { return tensor_group(); }
};
}  // namespace axis

template <class A>
concept PlacementAxis = requires {
  { A::group() } -> std::convertible_to<TensorGroupRef>;
};

namespace placement {

/// The same on all ranks of the axis. They compute different things with it, so its gradient is a term of a sum.
template <PlacementAxis Axis>
struct Copied {
  using axis = Axis;
};
/// A part of axis `dim` of the value. It counts from the last axis: -1, -2, ...
template <PlacementAxis Axis, int dim>
struct Split {
  static_assert(dim < 0, "Split: expected an axis counted from the last one: -1, -2, ...");
  using axis = Axis;
};
/// The value is the sum of what the ranks hold.
template <PlacementAxis Axis>
struct Partial {
  using axis = Axis;
};

}  // namespace placement

namespace detail {

/// How ranks share an axis of `width` entries: in whole units. Without a group this rank has all.
struct AxisShare {
  Index width = 0, unit = 1;
  TensorGroupRef group;

  AxisPart range() const { return group ? group->part(width, unit) : AxisPart{0, width}; }
  friend bool operator==(const AxisShare& a, const AxisShare& b) {
    return a.width == b.width && a.group == b.group && (a.group == nullptr || a.unit == b.unit || a.group->size() == 1);
  }
};

// The base of a Placed for each of its kinds.
template <class Kind>
struct ShareOf {};
template <class Axis, int dim>
struct ShareOf<placement::Split<Axis, dim>> {
  AxisShare share;
};
template <class Axis, int dim>
const AxisShare& share_along(const ShareOf<placement::Split<Axis, dim>>& placed) {
  return placed.share;
}

// What a refused call returns: nothing is refused that follows from it.
struct Refused {
  struct axis {};
};

template <class Kind>
inline constexpr int split_dim = 0;  // not split
template <class Axis, int dim>
inline constexpr int split_dim<placement::Split<Axis, dim>> = dim;

constexpr bool all_differ(std::initializer_list<int> dims) {
  for (const auto* a = dims.begin(); a != dims.end(); ++a)
    for (const auto* b = dims.begin(); b != a; ++b)
      if (*a == *b && *a != 0) return false;
  return true;
}

// The index of an axis that counts from the last one.
template <int dim, std::size_t Rank>
constexpr std::size_t at_dim() {
  static_assert(dim < 0 && -dim <= static_cast<int>(Rank), "placement: the value has no such axis");
  return Rank - static_cast<std::size_t>(-dim);
}

template <class... More>
inline constexpr bool never = false;

template <class X>
inline constexpr bool is_refused = false;
template <class X>
inline constexpr bool is_refused<Placed<X, Refused>> = true;
template <Operand X>
Placed<X, Refused> refused(const X& x) {
  return {x, ShareOf<Refused>{}};
}

}  // namespace detail

/// What this rank holds of a value, with a kind for each axis along which it is not a plain value. Functions and
/// operators accept those kinds for which the result is one device's. For others the compiler names the missing call.
template <Operand X, class... Kinds>
class Placed : public detail::ShareOf<Kinds>... {
  static_assert(detail::all_differ({detail::split_dim<Kinds>...}),
                "Placed: two axes of ranks split one axis of a value: expected different ones");
  static constexpr int dim = (0 + ... + detail::split_dim<Kinds>);  // if one axis splits the value
  static constexpr bool one_split = ((detail::split_dim<Kinds> != 0 ? 1 : 0) + ... + 0) == 1;

 public:
  using operand_type = X;

  Placed(X part, detail::ShareOf<Kinds>... shares)
      : detail::ShareOf<Kinds>(std::move(shares))..., part_(std::move(part)) {}
  /// A value that is split in multiples of `unit`. Throws ShapeError if the part does not have this rank's size.
  Placed(X part, Index width, Index unit = 1,
         TensorGroupRef group = nullptr) requires(one_split && sizeof...(Kinds) == 1)
      : Placed(std::move(part), detail::ShareOf<Kinds>{{width, unit, std::move(group)}}...) {
    const auto& shape = value_of(part_).shape();
    check<ShapeError>(shape[detail::at_dim<dim, tensor_of<X>::rank>()] == range().count, "Columns: expected ",
                      range().count, " of ", width, " columns, got shape ", shape);
  }

  /// What this rank holds, as a plain value: the compiler checks no further what is done with it.
  const X& part() const { return part_; }
  /// Of the axis that is split.
  Index width() const requires one_split { return sole().width; }
  Index unit() const requires one_split { return sole().unit; }
  const TensorGroupRef& group() const requires one_split { return sole().group; }
  /// The range of that axis that this rank holds.
  AxisPart range() const requires one_split { return sole().range(); }
  /// The shape of the whole value.
  auto shape() const {
    auto shape = value_of(part_).shape();
    (set_whole<Kinds>(shape), ...);
    return shape;
  }
  /// Another value of the same kinds.
  template <Operand Y>
  Placed<Y, Kinds...> with(Y part) const {
    return {std::move(part), static_cast<const detail::ShareOf<Kinds>&>(*this)...};
  }
  /// Whether two values are split in the same way.
  template <class Y>
  bool same_as(const Placed<Y, Kinds...>& other) const requires one_split {
    return sole() == other.sole();
  }

  // A whole value has these. They return something usable, so that the message is the only error.
  template <class... None>
  const auto& value() const {
    static_assert(
        detail::never<None...> || detail::is_refused<Placed>,
        "value: ranks hold different parts or terms of x: all_reduce<Axis>(x) or all_gather<Axis>(x) is missing");
    return value_of(part_);
  }
  template <class... None>
  double item() const {
    static_assert(
        detail::never<None...> || detail::is_refused<Placed>,
        "item: ranks hold different parts or terms of x: all_reduce<Axis>(x) or all_gather<Axis>(x) is missing");
    return 0;
  }
  template <class... Seed>
  void backward(const Seed&...) const {
    static_assert(detail::never<Seed...> || detail::is_refused<Placed>,
                  "backward: ranks hold different parts or terms of x: all_reduce<Axis>(x) or all_gather<Axis>(x) is "
                  "missing");
  }

 private:
  template <Operand Y, class... Others>
  friend class Placed;

  const detail::AxisShare& sole() const {
    const detail::AxisShare* found = nullptr;
    (find<Kinds>(found), ...);
    return *found;
  }
  template <class Kind>
  void find(const detail::AxisShare*& found) const {
    if constexpr (detail::split_dim<Kind> != 0) found = &static_cast<const detail::ShareOf<Kind>&>(*this).share;
  }
  template <class Kind, class Shape>
  void set_whole(Shape& shape) const {
    if constexpr (detail::split_dim<Kind> != 0)
      shape[detail::at_dim<detail::split_dim<Kind>, std::tuple_size_v<Shape>>()] = detail::ShareOf<Kind>::share.width;
  }

  X part_;
};

/// Calls x what it is not for the compiler: `assume<placement::Partial<axis::Tensor>>(x)`. For values that ranks
/// computed without these types; nothing is checked.
template <class Kind, Operand X>
requires(detail::split_dim<Kind> == 0) auto assume(const X& x) { return Placed<X, Kind>(x, detail::ShareOf<Kind>{}); }

namespace detail {

template <class X>
inline constexpr bool is_placed = false;
template <class X, class... Kinds>
inline constexpr bool is_placed<Placed<X, Kinds...>> = true;

/// What rules apply to: a Placed, or a parameter of one (SplitParameter, Summed).
template <class X>
concept PlacedLike = is_placed<X> || requires(const X& x) {
  x.placed();
};
template <class X>
concept PlacedOrPlain = PlacedLike<X> || Operand<X> || std::is_arithmetic_v<X>;
template <class... Xs>
concept SomePlaced = (PlacedLike<Xs> || ...) && (PlacedOrPlain<Xs> && ...);

template <class X>
const X& as_placed(const X& x) {
  return x;
}
template <class X>
requires requires(const X& x) { x.placed(); }
auto as_placed(const X& x) { return x.placed(); }
template <class X>
using placed_type = std::remove_cvref_t<decltype(as_placed(std::declval<const X&>()))>;

template <class X>
const X& part_of_placed(const X& x) {
  return x;
}
template <class X, class... Kinds>
const X& part_of_placed(const Placed<X, Kinds...>& x) {
  return x.part();
}

/// Whether a model under a policy of ranks may return it: whole values, and columns of classes for cross_entropy.
template <class Y>
inline constexpr bool may_leave = !is_placed<Y> || is_refused<Y>;
template <class X>
inline constexpr bool may_leave<Placed<X, placement::Split<axis::Tensor, -1>>> = true;
template <class... Ys>
inline constexpr bool may_leave<std::tuple<Ys...>> = (may_leave<Ys> && ...);

}  // namespace detail

}  // namespace chorus

/// Inside a policy's pass: its ranks are known in the pass alone.
#define CHORUS_WHOLE_OUTPUT(POLICY, ...)                                                                    \
  static_assert(::chorus::detail::may_leave<__VA_ARGS__>, POLICY                                            \
                ": the model returns a part of a value, a copy or a term of a sum: all_gather<Axis>(x) or " \
                "all_reduce<Axis>(x) is missing")
