#pragma once
/// Nested values: a model may take and return tuples, arrays, vectors, maps, optionals and structs of tensors.

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

/// Whether X is made from a template of types, such as std::vector.
template <class X, template <class...> class Of>
inline constexpr bool is_of = false;
template <template <class...> class Of, class... Parts>
inline constexpr bool is_of<Of<Parts...>, Of> = true;
template <class X>
inline constexpr bool is_array = false;
template <class Element, std::size_t size>
inline constexpr bool is_array<std::array<Element, size>> = size > 0;
template <class X>
inline constexpr bool is_vector = is_of<X, std::vector>;
template <class X>
inline constexpr bool is_map = is_of<X, std::map> || is_of<X, std::unordered_map>;
template <class X>
inline constexpr bool is_optional = is_of<X, std::optional>;
template <class X>
inline constexpr bool is_list = is_of<X, std::tuple> || is_of<X, std::pair>;  // its members may have different types
template <class X>
concept IsTuple = is_list<X> || is_array<X>;
/// A struct that lists its members with `auto fields() { return std::tie(images, mask); }`.
template <class X>
concept HasFields = requires(X& x) {
  x.fields();
};

/// Whether `is` is true for the type of some tensor in an X, at any depth.
template <class X, class Is>
constexpr bool holds(const Is& is) {
  if constexpr (Operand<X>) {
    return is(std::type_identity<X>{});
  } else if constexpr (IsTuple<X>) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return (holds<std::remove_cvref_t<std::tuple_element_t<I, X>>>(is) || ...);
    }
    (std::make_index_sequence<std::tuple_size_v<X>>{});
  } else if constexpr (is_vector<X> || is_optional<X>) {
    return holds<typename X::value_type>(is);
  } else if constexpr (is_map<X>) {
    return holds<typename X::mapped_type>(is);
  } else if constexpr (HasFields<X>) {
    return holds<decltype(std::declval<X&>().fields())>(is);
  } else {
    return false;
  }
}
/// Whether an X contains tensors.
template <class X>
inline constexpr bool holds_operands = holds<std::remove_cvref_t<X>>([](auto) { return true; });
/// Whether an X contains GraphVariables.
template <class X>
inline constexpr bool holds_graph_variables = holds<std::remove_cvref_t<X>>([]<class V>(std::type_identity<V>) {
  return is_graph_variable<V>;
});
/// Whether an X contains scalars.
template <class X>
inline constexpr bool holds_scalars = holds<std::remove_cvref_t<X>>([]<class V>(std::type_identity<V>) {
  return tensor_of<V>::rank == 0;
});

/// A tuple, pair or array, the same as X, with these members.
template <class X, class... Members>
auto tuple_like(Members... members) {
  if constexpr (is_of<X, std::pair>)
    return std::pair<Members...>(std::move(members)...);
  else if constexpr (is_array<X>)
    return std::array{std::move(members)...};
  else
    return std::tuple<Members...>(std::move(members)...);
}
/// An empty map with X's keys.
template <class Value, class Key, class Old, class Compare, class... Rest>
std::map<Key, Value, Compare> map_like(const std::map<Key, Old, Compare, Rest...>&) {
  return {};
}
template <class Value, class Key, class Old, class Hash, class Equal, class... Rest>
std::unordered_map<Key, Value, Hash, Equal> map_like(const std::unordered_map<Key, Old, Hash, Equal, Rest...>&) {
  return {};
}

/// Pointers to the values, all of which must be present.
template <class X>
std::vector<const X*> pointers_to(const std::vector<std::optional<X>>& values) {
  std::vector<const X*> pointers;
  for (const auto& value : values) pointers.push_back(&*value);
  return pointers;
}

/// Pointers to the same member of each value.
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
    return std::get<I>(const_cast<X&>(x).fields());  // references that are only read
  else
    return std::get<I>(x);
}

/// Base of the functions for `map_tensors`, which may override these members.
struct TensorFunction {
  /// Whether map_tensors descends into an X; otherwise the function gets the X itself.
  template <class X>
  static constexpr bool opens = holds_operands<X> && !Operand<X>;
  /// Whether an X becomes one with more axes, which can't be a field of a struct.
  template <class X>
  static constexpr bool adds_axis = false;
  /// Whether the function returns nothing.
  static constexpr bool looks_only = false;
};

/// Traverses nested values. `values` points to one or more values of one type X, such as one per device. At each
/// tensor, `f` gets the pointers to that tensor in all values; its result takes the tensor's place in the result. A
/// struct keeps its type. Throws ShapeError if vectors or maps differ in size or keys, or only some optionals have a
/// value.
template <class Values, class F>
decltype(auto) map_tensors(const Values& values, const F& f) {
  using X = std::remove_cvref_t<decltype(*values[0])>;
  const X& first = *values[0];
  [[maybe_unused]] const auto at = [&](const auto& pick) -> decltype(auto) {
    return map_tensors(picked(values, pick), f);
  };
  if constexpr (!F::template opens<X>) {
    return f(values);
  } else if constexpr (IsTuple<X>) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return tuple_like<X>(at([](const X& x) -> const auto& { return member_of<I>(x); })...);
    }
    (std::make_index_sequence<std::tuple_size_v<X>>{});
  } else if constexpr (is_vector<X>) {
    for (std::size_t i = 1; i < values.size(); ++i)
      check<ShapeError>(values[i]->size() == first.size(), "DataParallel: replica ", i, " returned ", values[i]->size(),
                        " values, expected those of replica 0, ", first.size());
    const auto element = [&](std::size_t i) { return at([i](const X& x) -> const auto& { return x[i]; }); };
    std::vector<decltype(element(0))> out;
    for (std::size_t i = 0; i < first.size(); ++i) out.push_back(element(i));
    return out;
  } else if constexpr (is_map<X>) {
    for (std::size_t i = 1; i < values.size(); ++i)
      for (const auto& [key, value] : first)
        check<ShapeError>(values[i]->size() == first.size() && values[i]->contains(key), "DataParallel: replica ", i,
                          " returned a map with other keys than replica 0");
    const auto element = [&](const auto& key) { return at([&](const X& x) -> const auto& { return x.at(key); }); };
    auto out = map_like<decltype(element(first.begin()->first))>(first);
    for (const auto& [key, value] : first) out.emplace(key, element(key));
    return out;
  } else if constexpr (is_optional<X>) {
    for (std::size_t i = 1; i < values.size(); ++i)
      check<ShapeError>(values[i]->has_value() == first.has_value(), "DataParallel: replica ", i,
                        first ? " returned none, replica 0 a value" : " returned a value, replica 0 none");
    const auto value = [&] { return at([](const X& x) -> const auto& { return *x; }); };
    return first ? std::optional(value()) : std::optional<decltype(value())>();
  } else {
    X out = first;  // a shallow copy: tensors are handles
    const auto field = [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      using Field = std::remove_cvref_t<std::tuple_element_t<I, decltype(out.fields())>>;
      static_assert(!F::template adds_axis<Field>,
                    "DataParallel: a field of the struct that the model returns has no axis for a number per device: "
                    "return a tuple, or give the field one axis of size 1");
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
