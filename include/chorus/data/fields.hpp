#pragma once
/// Access to the members of a pair, a tuple or a plain struct.

#include <cstddef>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus::data::detail {

template <class X>
concept TupleLike = requires {
  std::tuple_size<X>::value;
};

/// Converts to any type, for counting a struct's initialisers.
struct Anything {
  template <class T>
  operator T() const;  // never called
};
template <class X, std::size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return requires { X{((void)I, Anything{})...}; };
}
/// The number of members of a plain struct: the largest number of initialisers. An array counts each of its elements.
template <class X, std::size_t N = 8>
constexpr std::size_t members() {
  if constexpr (takes<X>(std::make_index_sequence<N>()))
    return N;
  else if constexpr (N == 0)
    return 0;
  else
    return members<X, N - 1>();
}

template <class X>
constexpr std::size_t count_fields() {
  if constexpr (TupleLike<X>)
    return std::tuple_size_v<X>;
  else
    return members<X>();
}
template <class X>
inline constexpr std::size_t field_count = count_fields<X>();

template <class X>
concept HasFields = TupleLike<X> ||
    (std::is_aggregate_v<X> && !std::is_array_v<X> && !std::is_empty_v<X> && field_count<X> > 0);

/// References to the members of a plain struct with up to 8 of them.
template <class X>
auto tied(const X& x) {
  constexpr std::size_t count = field_count<X>;
  static_assert(!takes<X>(std::make_index_sequence<9>()), "DataLoader: expected a sample struct of at most 8 members");
  if constexpr (count == 1) {
    const auto& [a] = x;
    return std::tie(a);
  } else if constexpr (count == 2) {
    const auto& [a, b] = x;
    return std::tie(a, b);
  } else if constexpr (count == 3) {
    const auto& [a, b, c] = x;
    return std::tie(a, b, c);
  } else if constexpr (count == 4) {
    const auto& [a, b, c, d] = x;
    return std::tie(a, b, c, d);
  } else if constexpr (count == 5) {
    const auto& [a, b, c, d, e] = x;
    return std::tie(a, b, c, d, e);
  } else if constexpr (count == 6) {
    const auto& [a, b, c, d, e, f] = x;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (count == 7) {
    const auto& [a, b, c, d, e, f, g] = x;
    return std::tie(a, b, c, d, e, f, g);
  } else {
    const auto& [a, b, c, d, e, f, g, h] = x;
    return std::tie(a, b, c, d, e, f, g, h);
  }
}

template <std::size_t I, class X>
const auto& field(const X& x) {
  if constexpr (TupleLike<X>)
    return std::get<I>(x);
  else
    return std::get<I>(tied(x));
}

}  // namespace chorus::data::detail
