#pragma once
/// The rules of placement types: which kinds fit together, what comes out, and which call is missing where they don't.

#include <chorus/ops/placement/placed.hpp>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace chorus::detail {

/// One operand on one axis of ranks.
struct Kind {
  enum Name : std::uint8_t { plain, whole, copied, split, partial };  // plain: a number or a Tensor, with no gradient
  Name name = plain;
  int dim = 0;
  friend constexpr bool operator==(const Kind&, const Kind&) = default;
  constexpr bool is(Name other) const { return name == other; }
};

/// What the compiler says; see expect.
enum class Missing : std::uint8_t { nothing, all_reduce, all_gather, all_to_all, take_part, copy, original };

struct Outcome {
  Kind kind;
  Missing missing = Missing::nothing;
  constexpr Outcome(Kind result) : kind(result) {}
  constexpr Outcome(Missing call) : missing(call) {}
};

// Element by element, no sums.
constexpr Outcome meet(Kind a, Kind b) {
  if (a.is(Kind::partial) || b.is(Kind::partial)) return Missing::all_reduce;
  if (a.is(Kind::plain) || a == b) return b;
  if (b.is(Kind::plain)) return a;
  if (a.is(Kind::split) && b.is(Kind::split)) return Missing::all_to_all;
  if (a.is(Kind::whole) || b.is(Kind::whole)) return Missing::copy;
  return a.is(Kind::split) ? a : b;
}
constexpr Outcome add_kinds(Kind a, Kind b) { return a == b ? Outcome(a) : meet(a, b); }
constexpr Outcome multiply_kinds(Kind a, Kind b) {
  if (a.is(Kind::partial)) std::swap(a, b);
  if (!b.is(Kind::partial)) return meet(a, b);
  if (a.is(Kind::whole)) return Missing::copy;
  return a.is(Kind::plain) || a.is(Kind::copied) ? Outcome(b) : Missing::all_reduce;
}
constexpr Outcome divide_kinds(Kind a, Kind b) {
  return b.is(Kind::partial) ? Outcome(Missing::all_reduce) : multiply_kinds(a, b);
}
// a: [..., m, k], b: [..., k, n].
constexpr Outcome product_kinds(Kind a, Kind b) {
  if (a.is(Kind::partial) || b.is(Kind::partial) || !(a.is(Kind::split) || b.is(Kind::split)))
    return multiply_kinds(a, b);
  const bool sums_a = a.is(Kind::split) && a.dim == -1, sums_b = b.is(Kind::split) && b.dim == -2;
  if (sums_a && sums_b) return Kind{Kind::partial};
  if (a.is(Kind::split) && b.is(Kind::split)) return a.dim == b.dim && a.dim < -2 ? Outcome(a) : Missing::all_gather;
  if (sums_a || sums_b) return Missing::take_part;
  if (a.is(Kind::whole) || b.is(Kind::whole)) return Missing::copy;
  return a.is(Kind::split) ? a : b;
}
// x: [..., in], weight: [out, in].
constexpr Outcome linear_kinds(Kind x, Kind weight) {
  if (weight.is(Kind::split)) weight.dim = -3 - weight.dim;
  return product_kinds(x, weight);
}
// table: [entries, features], index: [...].
constexpr Outcome embedding_kinds(Kind table, Kind index) {
  if (table.is(Kind::partial) || index.is(Kind::partial)) return Missing::all_reduce;
  if (!index.is(Kind::split)) return table.is(Kind::split) && table.dim == -2 ? Kind{Kind::partial} : table;
  if (table.is(Kind::split)) return Missing::all_gather;
  return table.is(Kind::whole) ? Outcome(Missing::copy) : Kind{Kind::split, index.dim - 1};
}
// x: [..., features], which are normalised together; weight: [features].
constexpr Outcome norm_kinds(Kind x, Kind weight) {
  if ((x.is(Kind::split) && x.dim == -1) || weight.is(Kind::split)) return Missing::all_gather;
  return meet(x, weight);
}
// A function that is not linear, of each element.
constexpr Outcome nonlinear_kind(Kind x, Kind) { return x.is(Kind::partial) ? Outcome(Missing::all_reduce) : x; }
// A function that needs all of x, but may compute on each rank with the same x.
constexpr Outcome alike_kind(Kind x, Kind) {
  return x.is(Kind::split) ? Outcome(Missing::all_gather) : nonlinear_kind(x, {});
}
// A loss, which is one number with one gradient on all ranks.
constexpr Outcome loss_kinds(Kind a, Kind b) {
  if (a.is(Kind::partial) || b.is(Kind::partial)) return Missing::all_reduce;
  if (a.is(Kind::split) || b.is(Kind::split)) return Missing::all_gather;
  return a.is(Kind::copied) || b.is(Kind::copied) ? Outcome(Missing::original) : Kind{Kind::whole};
}
// A sum of all elements.
constexpr Outcome sum_kind(Kind x, Kind) { return x.is(Kind::split) ? Kind{Kind::partial} : x; }
// A sum along an axis, which is removed.
template <int dim>
constexpr Outcome sum_along(Kind x, Kind) {
  if (!x.is(Kind::split) || x.dim > dim) return x;
  return x.dim == dim ? Kind{Kind::partial} : Kind{Kind::split, x.dim + 1};
}
// A function that is not linear, along an axis.
template <int dim>
constexpr Outcome normalized_along(Kind x, Kind) {
  return x.is(Kind::split) && x.dim == dim ? Outcome(Missing::all_gather) : nonlinear_kind(x, {});
}
// Axes a and b of x change places.
template <int a, int b>
constexpr Outcome swapped(Kind x, Kind) {
  if (x.is(Kind::split) && (x.dim == a || x.dim == b)) x.dim = x.dim == a ? b : a;
  return x;
}

template <class K>
inline constexpr Kind kind_of{};
template <class Axis>
inline constexpr Kind kind_of<placement::Copied<Axis>>{Kind::copied};
template <class Axis, int dim>
inline constexpr Kind kind_of<placement::Split<Axis, dim>>{Kind::split, dim};
template <class Axis>
inline constexpr Kind kind_of<placement::Partial<Axis>>{Kind::partial};

template <class Axis, Kind::Name, int>
struct KindType {
  using type = void;
};
template <class Axis>
struct KindType<Axis, Kind::copied, 0> {
  using type = placement::Copied<Axis>;
};
template <class Axis, int dim>
struct KindType<Axis, Kind::split, dim> {
  using type = placement::Split<Axis, dim>;
};
template <class Axis>
struct KindType<Axis, Kind::partial, 0> {
  using type = placement::Partial<Axis>;
};

/// A list without repetition: of axes, or of kinds.
template <class... Items>
struct Distinct {
  template <class Item>
  using with = std::conditional_t<std::is_void_v<Item> || (std::is_same_v<Item, Items> || ...), Distinct,
                                  Distinct<Items..., Item>>;
};
template <class List, class... More>
struct DistinctOf {
  using type = List;
};
template <class List, class First, class... More>
struct DistinctOf<List, First, More...> : DistinctOf<typename List::template with<First>, More...> {};

/// The kinds of an operand.
template <class X>
struct PlacementOf {
  using axes = Distinct<>;
  template <class>
  static constexpr Kind on{std::is_arithmetic_v<X> || AnyTensor<X> ? Kind::plain : Kind::whole};
};
template <class X, class... Ks>
struct PlacementOf<Placed<X, Ks...>> {
  using axes = Distinct<typename Ks::axis...>;
  template <class Axis>
  static constexpr Kind found() {
    Kind kind = PlacementOf<X>::template on<Axis>;
    ((kind = std::is_same_v<typename Ks::axis, Axis> ? kind_of<Ks> : kind), ...);
    return kind;
  }
  template <class Axis>
  static constexpr Kind on = found<Axis>();
};

template <class List>
struct AxesOfBoth;
template <class... As>
struct AxesOfBoth<Distinct<As...>> {
  template <class... Bs>
  static auto with(Distinct<Bs...>) -> typename DistinctOf<Distinct<As...>, Bs...>::type;
};

template <class... Ks>
struct PlacedAs {
  template <class Y>
  using of = Placed<Y, Ks...>;
};
template <>
struct PlacedAs<> {
  template <class Y>
  using of = Y;
};

template <class X>
using part_type = std::remove_cvref_t<decltype(part_of_placed(as_placed(std::declval<const X&>())))>;
// The part of an operand that may have a gradient, if one of both may.
template <class A, class B>
using recorded_part = std::conditional_t<AnyTensor<part_type<A>>, part_type<B>, part_type<A>>;

/// What `rule` makes of the kinds of two operands.
template <auto rule, class A, class B = A>
struct Combined {
  using a_type = placed_type<A>;
  using b_type = placed_type<B>;
  using both = decltype(AxesOfBoth<typename PlacementOf<a_type>::axes>::with(typename PlacementOf<b_type>::axes{}));

  template <class Axis>
  static constexpr Outcome outcome = rule(PlacementOf<a_type>::template on<Axis>,
                                          PlacementOf<b_type>::template on<Axis>);

  template <class... Axes>
  static constexpr Missing first(Distinct<Axes...>) {
    Missing found = Missing::nothing;
    ((found = found == Missing::nothing ? outcome<Axes>.missing : found), ...);
    return found;
  }
  static constexpr bool after_refusal = is_refused<a_type> || is_refused<b_type>;
  static constexpr Missing missing = after_refusal ? Missing::nothing : first(both{});

  template <class... Axes>
  static auto list(Distinct<Axes...>) ->
      typename DistinctOf<Distinct<>,
                          typename KindType<Axes, outcome<Axes>.kind.name, outcome<Axes>.kind.dim>::type...>::type;
  using kinds = std::conditional_t<after_refusal, Distinct<Refused>, decltype(list(both{}))>;

  template <class... Ks>
  static PlacedAs<Ks...> as(Distinct<Ks...>);
  /// The type of a result with part Y.
  template <class Y>
  using result = typename decltype(as(kinds{}))::template of<Y>;
};

// The share of a result's axis: that of the operand which is split.
template <class K, class A, class B>
ShareOf<K> share_from(const A& a, const B& b) {
  if constexpr (split_dim<K> == 0)
    return {};
  else if constexpr (PlacementOf<A>::template on<typename K::axis>.is(Kind::split))
    return {share_along<typename K::axis>(a)};
  else
    return {share_along<typename K::axis>(b)};
}
template <class... Ks, class Y, class A, class B>
auto placed_from(Distinct<Ks...>, Y part, const A& a, const B& b) {
  if constexpr (sizeof...(Ks) == 0)
    return part;
  else
    return Placed<Y, Ks...>(std::move(part), share_from<Ks>(a, b)...);
}

// The share of a table's entries; null if ranks don't split them.
template <class X, class... Ks>
const AxisShare* share_of_entries(const Placed<X, Ks...>& table) {
  const AxisShare* found = nullptr;
  const auto look = [&]<class K>(std::type_identity<K>) {
    if constexpr (split_dim<K> == -2) found = &share_along<typename K::axis>(table);
  };
  (look(std::type_identity<Ks>{}), ...);
  return found;
}
template <Operand X>
const AxisShare* share_of_entries(const X&) {
  return nullptr;
}

// An axis, counted from the last one.
template <int dim, int rank>
inline constexpr int from_the_last = dim < 0 ? dim : dim - rank;

// How the operands' numbers lie beside each other.
enum class Beside : std::uint8_t { elements, matrices, anyhow };

// Whether x has more than one entry along an axis.
template <int dim, class X>
bool spans(const X& x) {
  if constexpr (Operand<X>)
    if constexpr (tensor_of<X>::rank >= -dim) {
      const auto& shape = value_of(x).shape();
      return shape[at_dim<dim, tensor_of<X>::rank>()] != 1;
    }
  return false;
}

// A sum is taken over the ranks of the pass.
template <class Axis, class X>
void check_in_pass(const char* operation, const X& x) {
  check<UsageError>(share_along<Axis>(x).group == Axis::group(), operation,
                    ": expected a value that the ranks of this pass split, got one of another pass, or one that this "
                    "rank has whole: list all layers with CHORUS_MODULE, and call the net");
}

template <auto rule, Beside beside, class Axis, class A, class B>
void check_shares(const char* operation, const A& a, const B& b) {
  constexpr Kind of_a = PlacementOf<A>::template on<Axis>, of_b = PlacementOf<B>::template on<Axis>;
  if constexpr (of_a.is(Kind::split) && of_b.is(Kind::split)) {
    check<ShapeError>(share_along<Axis>(a) == share_along<Axis>(b), operation, ": columns of shapes ", a.shape(),
                      " and ", b.shape(), " are split in different ways");
  } else if constexpr (of_a.is(Kind::split) && (beside == Beside::elements || of_a.dim < -2)) {
    if constexpr (beside != Beside::anyhow)
      check<ShapeError>(share_along<Axis>(a).group == nullptr || !spans<of_a.dim>(part_of_placed(b)), operation,
                        ": a value of shape ", a.shape(), " is split along axis ", of_a.dim,
                        ", which the other one has whole: use take_part on that one");
  } else if constexpr (of_b.is(Kind::split)) {
    check_shares<rule, beside, Axis>(operation, b, a);
  }
  if constexpr (rule(of_a, of_b).kind.is(Kind::partial) && of_a.is(Kind::split)) check_in_pass<Axis>(operation, a);
}

template <auto rule, Beside beside, class... Axes, class A, class B>
void check_all_shares(Distinct<Axes...>, const char* operation, const A& a, const B& b) {
  (check_shares<rule, beside, Axes>(operation, a, b), ...);
}

/// f of the operands' parts, as a value of the kinds that `rule` gives.
template <auto rule, Beside beside, class A, class B, class F>
auto combined(const char* operation, const A& a, const B& b, const F& f) {
  using Rule = Combined<rule, A, B>;
  const auto& x = as_placed(a);
  const auto& y = as_placed(b);
  check_all_shares<rule, beside>(typename Rule::both{}, operation, x, y);
  return placed_from(typename Rule::kinds{}, f(part_of_placed(x), part_of_placed(y)), x, y);
}

/// The same of one operand.
template <auto rule, class A, class F>
auto mapped(const char* operation, const A& a, const F& f) {
  using Rule = Combined<rule, A>;
  const auto& x = as_placed(a);
  const auto check_axis = [&]<class Axis>(std::type_identity<Axis>) {
    constexpr Kind kind = PlacementOf<placed_type<A>>::template on<Axis>;
    if constexpr (kind.is(Kind::split) && rule(kind, kind).kind.is(Kind::partial)) check_in_pass<Axis>(operation, x);
  };
  [&]<class... Axes>(Distinct<Axes...>) { (check_axis(std::type_identity<Axes>{}), ...); }(typename Rule::both{});
  return placed_from(typename Rule::kinds{}, f(part_of_placed(x)), x, x);
}

/// What a call returns: y, or after a refusal what no other message follows from.
template <Missing missing, class Y>
auto unless(const Y& y) {
  if constexpr (missing == Missing::nothing)
    return y;
  else
    return refused(part_of_placed(y));
}

/// Called by functions of placed values: the only error that a program gets from them. `Where` is a type of the calling
/// function alone, so that each has its own.
template <Missing missing, class Where>
constexpr void expect(Where) {
  static_assert(missing != Missing::all_reduce,
                "placement: an operand is a term of a sum that was not taken (Partial): all_reduce<Axis>(x) or "
                "reduce_scatter<Axis, dim>(x) is missing");
  static_assert(missing != Missing::all_gather,
                "placement: it mixes columns, which ranks split (Split): all_gather<Axis>(x) is missing, or a layer "
                "for split values");
  static_assert(missing != Missing::all_to_all,
                "placement: operands are split along different axes: all_to_all<Axis, dim>(x) is missing");
  static_assert(
      missing != Missing::take_part,
      "placement: it mixes columns, which ranks split in one operand alone: take_part<Axis, dim>(x) of the other, or "
      "all_gather<Axis>(x), is missing");
  static_assert(
      missing != Missing::copy,
      "placement: a whole value meets what differs between ranks, so its gradient is a term of a sum: copy<Axis>(x) is "
      "missing, or Summed for a parameter");
  static_assert(
      missing != Missing::original,
      "placement: x is a copy, whose gradient is a term of a sum (Copied): pass it as it was before copy<Axis>(x)");
}

}  // namespace chorus::detail
