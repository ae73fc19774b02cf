#pragma once
/// Values inside of values: what a model takes and returns may be tuples, arrays, vectors, maps, optionals and
/// structs of tensors.

#include <algorithm>
#include <array>
#include <chorus/autograd/parameter.hpp>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::detail {

template <class X>
inline constexpr bool is_tuple = false;
template <class... Members>
inline constexpr bool is_tuple<std::tuple<Members...>> = true;
template <class X>
inline constexpr bool is_pair = false;
template <class First, class Second>
inline constexpr bool is_pair<std::pair<First, Second>> = true;
template <class X>
inline constexpr bool is_array = false;
template <class Element, std::size_t size>
inline constexpr bool is_array<std::array<Element, size>> = size > 0;
template <class X>
inline constexpr bool is_vector = false;
template <class Element>
inline constexpr bool is_vector<std::vector<Element>> = true;
template <class X>
inline constexpr bool is_map = false;
template <class Key, class Value>
inline constexpr bool is_map<std::map<Key, Value>> = true;
template <class Key, class Value>
inline constexpr bool is_map<std::unordered_map<Key, Value>> = true;
template <class X>
inline constexpr bool is_optional = false;
template <class Value>
inline constexpr bool is_optional<std::optional<Value>> = true;

template <class X>
concept IsTuple = is_tuple<X> || is_pair<X> || is_array<X>;
/// A struct that lists its members, as `auto fields() { return std::tie(images, mask); }`.
template <class X>
concept HasFields = requires(X& x) {
  x.fields();
};

enum class Kind { operands, graph_variables, scalars };
template <class X, Kind kind>
constexpr bool holds();
/// Whether there are tensors in a value of type X, at any depth.
template <class X>
inline constexpr bool holds_operands = holds<std::remove_cvref_t<X>, Kind::operands>();
/// Whether there are GraphVariables.
template <class X>
inline constexpr bool holds_graph_variables = holds<std::remove_cvref_t<X>, Kind::graph_variables>();
/// Whether there are tensors without axes.
template <class X>
inline constexpr bool holds_scalars = holds<std::remove_cvref_t<X>, Kind::scalars>();

template <class X, Kind kind>
constexpr bool holds() {
  if constexpr (Operand<X>) {
    return kind == Kind::operands || (kind == Kind::graph_variables && is_graph_variable<X>) ||
           (kind == Kind::scalars && tensor_of<X>::rank == 0);
  } else if constexpr (IsTuple<X>) {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (holds<std::remove_cvref_t<std::tuple_element_t<I, X>>, kind>() || ...);
    }
    (std::make_index_sequence<std::tuple_size_v<X>>{});
  } else if constexpr (is_vector<X> || is_optional<X>) {
    return holds<typename X::value_type, kind>();
  } else if constexpr (is_map<X>) {
    return holds<typename X::mapped_type, kind>();
  } else if constexpr (HasFields<X>) {
    return holds<decltype(std::declval<X&>().fields()), kind>();
  } else {
    return false;
  }
}

/// A tuple, pair or array, as X is, of these members.
template <class X, class... Members>
auto tuple_like(Members... members) {
  if constexpr (is_pair<X>)
    return std::pair<Members...>(std::move(members)...);
  else if constexpr (is_array<X>)
    return std::array{std::move(members)...};
  else
    return std::tuple<Members...>(std::move(members)...);
}
template <class X, class Value>
struct MapLike;
template <class Key, class Old, class Value>
struct MapLike<std::map<Key, Old>, Value> {
  using type = std::map<Key, Value>;
};
template <class Key, class Old, class Value>
struct MapLike<std::unordered_map<Key, Old>, Value> {
  using type = std::unordered_map<Key, Value>;
};
/// An empty map with X's keys.
template <class X, class Value>
using map_like = typename MapLike<X, Value>::type;

/// Of values that are all there.
template <class X>
std::vector<const X*> pointers_to(const std::vector<std::optional<X>>& values) {
  std::vector<const X*> pointers;
  for (const auto& value : values) pointers.push_back(&*value);
  return pointers;
}

/// What stands at one place in each of several values.
template <class X, class Pick>
auto picked(const std::array<const X*, 1>& values, const Pick& pick) {
  return std::array{&pick(*values[0])};
}
template <class X, class Pick>
auto picked(const std::vector<const X*>& values, const Pick& pick) {
  std::vector<decltype(&pick(*values[0]))> places;
  for (const X* value : values) places.push_back(&pick(*value));
  return places;
}

/// Member I of a tuple, or of a struct's fields.
template <std::size_t I, class X>
const auto& member_of(const X& x) {
  if constexpr (HasFields<X>)
    return std::get<I>(const_cast<X&>(x).fields());  // references, through which nothing is written
  else
    return std::get<I>(x);
}

/// Base of what `map_tensors` calls. An own member takes the place of one of these.
struct TensorFunction {
  /// Whether an X is looked into; the function gets what is not.
  template <class X>
  static constexpr bool opens = holds_operands<X> && !Operand<X>;
  /// Whether an X becomes one with more axes, so that it can't stand in a struct.
  template <class X>
  static constexpr bool adds_axis = false;
  /// Whether it makes nothing of the tensors.
  static constexpr bool looks_only = false;
};

/// The traversal of nested values. `values` points to one or more values of one type X: each device's, say. At each
/// place where they have a tensor, `f` gets the pointers to all of theirs; what it returns takes the tensor's place in
/// the value that is returned. A struct stays the same type. Throws ShapeError where vectors or maps have different
/// sizes or keys, or some optionals a value and others none.
template <class Values, class F>
decltype(auto) map_tensors(const Values& values, const F& f) {
  using X = std::remove_cvref_t<decltype(*values[0])>;
  const X& first = *values[0];
  [[maybe_unused]] const auto at = [&](const auto& pick) -> decltype(auto) {
    return map_tensors(picked(values, pick), f);
  };
  [[maybe_unused]] const auto check_all = [&](const auto& is_like_first, const auto& what_it_is) {
    for (std::size_t i = 1; i < values.size(); ++i)
      if (!is_like_first(*values[i]))
        fail<ShapeError>("DataParallel: replica ", i, " returned ", what_it_is(*values[i]));
  };
  if constexpr (!F::template opens<X>) {
    return f(values);
  } else if constexpr (IsTuple<X>) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return tuple_like<X>(at([](const X& x) -> const auto& { return member_of<I>(x); })...);
    }
    (std::make_index_sequence<std::tuple_size_v<X>>{});
  } else if constexpr (is_vector<X>) {
    check_all([&](const X& x) { return x.size() == first.size(); },
              [&](const X& x) { return cat(x.size(), " values where replica 0 returned ", first.size()); });
    const auto element = [&](std::size_t i) { return at([i](const X& x) -> const auto& { return x[i]; }); };
    std::vector<decltype(element(0))> out;
    for (std::size_t i = 0; i < first.size(); ++i) out.push_back(element(i));
    return out;
  } else if constexpr (is_map<X>) {
    check_all(
        [&](const X& x) {
          return x.size() == first.size() &&
                 std::all_of(first.begin(), first.end(), [&](const auto& own) { return x.contains(own.first); });
        },
        [](const X&) { return "a map with other keys than replica 0"; });
    const auto element = [&](const auto& key) { return at([&](const X& x) -> const auto& { return x.at(key); }); };
    map_like<X, decltype(element(first.begin()->first))> out;
    for (const auto& [key, value] : first) out.emplace(key, element(key));
    return out;
  } else if constexpr (is_optional<X>) {
    check_all([&](const X& x) { return x.has_value() == first.has_value(); },
              [](const X& x) {
                return x ? "a value where replica 0 returned none" : "none where replica 0 returned a value";
              });
    const auto value = [&] { return at([](const X& x) -> const auto& { return *x; }); };
    return first ? std::optional(value()) : std::optional<decltype(value())>();
  } else {
    X out = first;  // of handles
    const auto field = [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      using Field = std::remove_cvref_t<std::tuple_element_t<I, decltype(out.fields())>>;
      static_assert(!F::template adds_axis<Field>,
                    "DataParallel: a field of a struct that the model returns has no axes, where a number for each "
                    "device would go: return a tuple in the struct's place, or give the field one axis, of size 1");
      if constexpr (holds_operands<Field> && !F::template adds_axis<Field>) {
        const auto member = [](const X& x) -> const auto& { return member_of<I>(x); };
        if constexpr (F::looks_only)
          at(member);
        else
          std::get<I>(out.fields()) = at(member);
      }
    };
    [&]<std::size_t... I>(std::index_sequence<I...>) { (field(std::integral_constant<std::size_t, I>{}), ...); }
    (std::make_index_sequence<std::tuple_size_v<decltype(out.fields())>>{});
    return out;
  }
}

template <class F>
struct LookAtTensor : TensorFunction {
  const F& f;
  explicit LookAtTensor(const F& look) : f(look) {}
  static constexpr bool looks_only = true;
  template <class X>
  bool operator()(const std::array<const X*, 1>& value) const {
    if constexpr (Operand<X>) f(*value[0]);
    return true;
  }
};
/// Calls `f` with every tensor in `x`, at any depth.
template <class X, class F>
void for_each_tensor(const X& x, const F& f) {
  map_tensors(std::array{&x}, LookAtTensor<F>(f));
}

}  // namespace chorus::detail
