#pragma once
/// Calls that change what ranks hold of a value, each with its gradient:
///
/// | call | value | gradient |
/// |---|---|---|
/// | `copy<Axis>(x)` | plain to Copied | all-reduce |
/// | `all_reduce<Axis>(x)` | Partial to plain | as it is |
/// | `all_reduce<placement::Copied<Axis>>(x)` | Partial to Copied | all-reduce |
/// | `all_gather<Axis>(x)` | Split to plain | own part |
/// | `all_gather<placement::Copied<Axis>>(x)` | Split to Copied | reduce-scatter |
/// | `reduce_scatter<Axis, dim>(x)` | Partial to Split | all-gather |
/// | `take_part<Axis, dim>(x)` | plain to Split | all-gather |
/// | | Copied to Split | zeros around it |
/// | `all_to_all<Axis, dim>(x)` | Split to Split along another axis | all-to-all |
///
/// All ranks make the same calls, in a forward pass and in its backward pass. Without ranks all return x.

#include <chorus/ops/placement/rules.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/ops/tensor_regions.hpp>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace chorus {

namespace detail {

// What a collective ends in: the axis itself for a plain value.
template <class To>
struct Target {
  using axis = To;
  using kind = void;
};
template <class Axis>
struct Target<placement::Copied<Axis>> {
  using axis = Axis;
  using kind = placement::Copied<Axis>;
};

template <class Axis, class X>
inline constexpr Kind kind_along = PlacementOf<X>::template on<Axis>;

/// The kinds of X with another kind on one axis; void: a plain value.
template <class X, class Axis, class K>
struct WithKind : DistinctOf<Distinct<>, K> {};
template <class X, class... Ks, class Axis, class K>
struct WithKind<Placed<X, Ks...>, Axis, K>
    : DistinctOf<Distinct<>, std::conditional_t<std::is_same_v<typename Ks::axis, Axis>, K, Ks>...,
                 std::conditional_t<(std::is_same_v<typename Ks::axis, Axis> || ...), void, K>> {};

// x with another part and another kind on one axis.
template <class K, class Y, class X>
auto placed_as(Y part, const X& x, const ShareOf<K>& share) {
  return [&]<class... Ks>(Distinct<Ks...>) {
    const auto of = [&]<class Own>(std::type_identity<Own>) -> ShareOf<Own> {
      if constexpr (std::is_same_v<Own, K>)
        return share;
      else
        return share_from<Own>(x, x);
    };
    return Placed<Y, Ks...>(std::move(part), of(std::type_identity<Ks>{})...);
  }(typename WithKind<X, typename K::axis, K>::type{});
}
template <class Axis, class Y, class X>
auto placed_whole(Y part, const X& x) {
  return placed_from(typename WithKind<X, Axis, void>::type{}, std::move(part), x, x);
}
template <class Axis, class To, class Y, class X>
auto placed_to(Y part, const X& x) {
  if constexpr (std::is_void_v<To>)
    return placed_whole<Axis>(std::move(part), x);
  else
    return placed_as<To>(std::move(part), x, ShareOf<To>{});
}

template <class Axis>
TensorGroupRef group_along() {
  return Axis::group();
}

}  // namespace detail

/// x, the same on all ranks, where they start to compute different things with it: Copied. Its gradients are summed.
/// Use one copy several times, and they are summed in one message.
template <PlacementAxis Axis, class X>
requires(Operand<X> || detail::is_placed<X>) auto copy(const X& x) {
  constexpr auto kind = detail::kind_along<Axis, X>;
  static_assert(!kind.is(detail::Kind::partial),
                "copy: x is a term of a sum that was not taken (Partial): all_reduce<placement::Copied<Axis>>(x)");
  static_assert(!kind.is(detail::Kind::split),
                "copy: x is a part of a value (Split): all_gather<placement::Copied<Axis>>(x)");
  static_assert(!kind.is(detail::Kind::copied),
                "copy: x is a copy already (Copied): its gradient would be summed twice");
  if constexpr ((kind.is(detail::Kind::plain) || kind.is(detail::Kind::whole)) && !detail::is_refused<X>)
    return detail::placed_to<Axis, placement::Copied<Axis>>(
        enter_tensor_region(detail::part_of_placed(x), detail::group_along<Axis>()), x);
  else
    return detail::refused(detail::part_of_placed(x));
}

/// The same of a parameter: one that is Summed or split along another axis of ranks.
template <PlacementAxis Axis, class X>
requires requires(const X& x) { x.placed(); }
auto copy(const X& x) { return copy<Axis>(x.placed()); }

namespace detail {
// A parameter beside x: a copy for each axis along which x is not a plain value.
template <class P>
auto copied_along(const P& parameter, Distinct<>) {
  return parameter;
}
template <class P, class First, class... More>
auto copied_along(const P& parameter, Distinct<First, More...>) {
  return copied_along(copy<First>(parameter), Distinct<More...>{});
}
template <class P, class X, class... Ks>
auto copied_beside(const Placed<X, Ks...>&, const P& parameter) {
  return copied_along(parameter, Distinct<typename Ks::axis...>{});
}
}  // namespace detail

/// The sum of what ranks hold (all-reduce). `To`: an axis, whose ranks compute the same with it, or
/// placement::Copied<Axis>.
template <class To, class X>
requires(Operand<X> || detail::is_placed<X>) auto all_reduce(const X& x) {
  using Axis = typename detail::Target<To>::axis;
  constexpr bool sums = detail::kind_along<Axis, X>.is(detail::Kind::partial);
  static_assert(sums || detail::is_refused<X>,
                "all_reduce: expected a term of a sum (Partial): the other ranks' values would be added to it");
  if constexpr (!sums) {
    return detail::refused(detail::part_of_placed(x));
  } else {
    const auto group = detail::group_along<Axis>();
    const auto sum = leave_tensor_region(x.part(), group);
    if constexpr (std::is_void_v<typename detail::Target<To>::kind>)
      return detail::placed_whole<Axis>(sum, x);
    else
      return detail::placed_to<Axis, To>(enter_tensor_region(sum, group), x);
  }
}

/// All of the value, on each rank (all-gather). `To`: as for all_reduce.
template <class To, class X>
requires(Operand<X> || detail::is_placed<X>) auto all_gather(const X& x) {
  using Axis = typename detail::Target<To>::axis;
  constexpr auto kind = detail::kind_along<Axis, X>;
  static_assert(kind.is(detail::Kind::split) || detail::is_refused<X>, "all_gather: expected parts of a value (Split)");
  if constexpr (!kind.is(detail::Kind::split)) {
    return detail::refused(detail::part_of_placed(x));
  } else {
    constexpr bool copied = !std::is_void_v<typename detail::Target<To>::kind>;
    const auto& share = detail::share_along<Axis>(x);
    return detail::placed_to<Axis, typename detail::Target<To>::kind>(
        gather_axis(x.part(), kind.dim, share.width, share.unit, copied, share.group), x);
  }
}

/// This rank's part of axis `dim` of the sum of what ranks hold (reduce-scatter), in multiples of `unit`.
template <PlacementAxis Axis, int dim, class X>
requires(Operand<X> || detail::is_placed<X>) auto reduce_scatter(const X& x, Index unit = 1) {
  constexpr bool sums = detail::kind_along<Axis, X>.is(detail::Kind::partial);
  static_assert(sums || detail::is_refused<X>,
                "reduce_scatter: expected a term of a sum (Partial): the other ranks' values would be added to it");
  if constexpr (!sums) {
    return detail::refused(detail::part_of_placed(x));
  } else {
    constexpr int axis = detail::from_the_last<dim, tensor_of<typename X::operand_type>::rank>;
    const auto group = detail::group_along<Axis>();
    return detail::placed_as<placement::Split<Axis, axis>>(reduce_scatter_axis(x.part(), axis, unit, group), x,
                                                           {{value_of(x.part()).size(axis), unit, group}});
  }
}

/// This rank's part of axis `dim` of a value that all ranks have, in multiples of `unit`.
template <PlacementAxis Axis, int dim, class X>
requires(Operand<X> || detail::is_placed<X>) auto take_part(const X& x, Index unit = 1) {
  constexpr auto kind = detail::kind_along<Axis, X>;
  static_assert(!kind.is(detail::Kind::partial),
                "take_part: x is a term of a sum that was not taken (Partial): reduce_scatter<Axis, dim>(x)");
  static_assert(!kind.is(detail::Kind::split), "take_part: x is a part already (Split): all_to_all<Axis, dim>(x)");
  const auto& whole = detail::part_of_placed(x);
  if constexpr (kind.is(detail::Kind::partial) || kind.is(detail::Kind::split) || detail::is_refused<X>) {
    return detail::refused(whole);
  } else {
    constexpr int axis = detail::from_the_last<dim, tensor_of<std::remove_cvref_t<decltype(whole)>>::rank>;
    const auto group = detail::group_along<Axis>();
    const detail::AxisShare share{value_of(whole).size(axis), unit, group};
    check<ShapeError>(unit > 0 && share.width % unit == 0, "take_part: units of ", unit, " do not divide axis ", dim,
                      " of shape ", value_of(whole).shape());
    if constexpr (kind.is(detail::Kind::whole)) {
      return detail::placed_as<placement::Split<Axis, axis>>(scatter_axis(whole, axis, unit, group), x, {share});
    } else {
      const auto range = share.range();
      return detail::placed_as<placement::Split<Axis, axis>>(
          detail::as_recorded(slice(whole, axis, range.begin, range.begin + range.count)), x, {share});
    }
  }
}

namespace detail {
// Parts of one axis for parts of another. All ranks' parts are sent to all: n times the bytes of a pairwise exchange.
template <int from, int to, class T, int Rank, class D>
Tensor<T, Rank, D> exchanged(const Tensor<T, Rank, D>& x, const AxisShare& mine, const AxisShare& wanted,
                             TensorGroup& group) {
  const auto whole = all_parts(x, {at_dim<from, Rank>(), mine.width, mine.unit}, group);
  return part_of(whole, {at_dim<to, Rank>(), wanted.width, wanted.unit}, group);
}
}  // namespace detail

/// A value that ranks split along another axis, split along axis `dim`, in multiples of `unit`.
template <PlacementAxis Axis, int dim, class X>
requires(Operand<X> || detail::is_placed<X>) auto all_to_all(const X& x, Index unit = 1) {
  constexpr auto kind = detail::kind_along<Axis, X>;
  static_assert(kind.is(detail::Kind::split) || detail::is_refused<X>, "all_to_all: expected parts of a value (Split)");
  if constexpr (!kind.is(detail::Kind::split)) {
    return detail::refused(detail::part_of_placed(x));
  } else {
    using Part = typename X::operand_type;
    static constexpr int to = detail::from_the_last<dim, tensor_of<Part>::rank>, from = kind.dim;
    const detail::AxisShare mine = detail::share_along<Axis>(x);
    const detail::AxisShare wanted{value_of(x.part()).size(to), unit, mine.group};
    check<ShapeError>(unit > 0 && wanted.width % unit == 0, "all_to_all: units of ", unit, " do not divide axis ", dim,
                      " of shape ", x.shape());
    const auto exchange = [&] {
      return detail::between_ranks(
          "all_to_all", [&](const auto& part) { return detail::exchanged<from, to>(part, mine, wanted, *mine.group); },
          [mine, wanted](const auto& dy) { return detail::exchanged<to, from>(dy, wanted, mine, *mine.group); },
          x.part());
    };
    return detail::placed_as<placement::Split<Axis, to>>(mine.group == nullptr ? x.part() : exchange(), x, {wanted});
  }
}

// Refused: a value may have several axes of ranks, and which one is meant belongs into the program.
#define CHORUS_OF_PLACED(FUNCTION, CALL)                                        \
  template <class X, class... Ks, class... More>                                \
  auto FUNCTION(const Placed<X, Ks...>& x, const More&...) {                    \
    static_assert(detail::never<X>, #FUNCTION ": which ranks? expected " CALL); \
    return detail::refused(x.part());                                           \
  }
CHORUS_OF_PLACED(all_reduce, "all_reduce<axis::Tensor>(x), or another axis")
CHORUS_OF_PLACED(all_gather, "all_gather<axis::Tensor>(x), or another axis")
CHORUS_OF_PLACED(reduce_scatter, "reduce_scatter<axis::Tensor, dim>(x), or another axis")
CHORUS_OF_PLACED(all_to_all, "all_to_all<axis::Tensor, dim>(x), or another axis")
#undef CHORUS_OF_PLACED

}  // namespace chorus
