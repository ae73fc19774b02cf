#pragma once
/// Values inside of values: what a model takes and returns may be tuples, arrays, vectors, maps, optionals and
/// structs of tensors.

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

/// Calls `f` with every tensor in `x`, at any depth.
template <class X, class F>
void for_each_operand(const X& x, const F& f) {
  if constexpr (!holds_operands<X>) {
    return;
  } else if constexpr (Operand<X>) {
    f(x);
  } else if constexpr (IsTuple<X>) {
    std::apply([&](const auto&... members) { (for_each_operand(members, f), ...); }, x);
  } else if constexpr (is_vector<X>) {
    for (const auto& element : x) for_each_operand(element, f);
  } else if constexpr (is_map<X>) {
    for (const auto& [key, value] : x) for_each_operand(value, f);
  } else if constexpr (is_optional<X>) {
    if (x) for_each_operand(*x, f);
  } else {
    X copy = x;  // of handles
    std::apply([&](const auto&... members) { (for_each_operand(members, f), ...); }, copy.fields());
  }
}

}  // namespace chorus::detail
