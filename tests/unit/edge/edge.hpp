#pragma once
/// Holds operators to what PyTorch computes for numbers at the edge: zeros, tiny and overflowing numbers, infinities,
/// NaN, one element, none. tests/edge_values.py wrote the values; what differs stands in differences.hpp.

#include <algorithm>
#include <any_function.hpp>
#include <catch.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/to_device.hpp>
#include <cmath>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "differences.hpp"

#ifndef CHORUS_EDGE_DEVICE
#define CHORUS_EDGE_DEVICE ::chorus::Cpu
#endif

namespace edge {

namespace ch = chorus;
using ch::Index;
using ch::Shape;
using Device = CHORUS_EDGE_DEVICE;
template <class T, int Rank>
using Tensor = ch::Tensor<T, Rank, Device>;
using Labels = ch::Tensor<std::int64_t, 1, Device>;

struct Array {
  std::vector<Index> shape;
  std::vector<double> values;
};

/// What an operator made of a case: its value, and the gradients by its inputs where it has any.
struct Outcome {
  Array y;
  std::optional<std::vector<std::vector<double>>> gradients;
};

/// What two numbers may differ by: of themselves, or, where one is the difference of others near 1, of 1.
enum class Rounding : std::uint8_t { relative, absolute };

/// Operators, and how many of them were held to what.
struct Group {
  explicit Group(std::string of) : name(std::move(of)) {}
  std::string name;
  std::set<std::string> met;
  int cases = 0;
};

inline const nlohmann::json& file() {
  static const nlohmann::json parsed = [] {
    std::ifstream in(CHORUS_EDGE_VALUES);
    return nlohmann::json::parse(in);
  }();
  return parsed;
}

inline std::vector<double> numbers(const nlohmann::json& list) {
  std::vector<double> out;
  for (const auto& value : list)
    out.push_back(value.is_number() ? value.get<double>()
                  : value == "nan"  ? NAN
                  : value == "inf"  ? INFINITY
                                    : -INFINITY);
  return out;
}

/// Whether two numbers are equal but for rounding; NaN is equal to NaN. Near the smallest normal number, below which
/// some functions of this library give 0, they are.
inline bool close(double got, double expected, bool single, Rounding rounding) {
  if (std::isnan(expected) || std::isnan(got)) return std::isnan(expected) && std::isnan(got);
  if (std::isinf(expected) || std::isinf(got)) return got == expected;
  double least = 4 * (single ? double{std::numeric_limits<float>::min()} : std::numeric_limits<double>::min());
  if (rounding == Rounding::absolute) least = single ? 2e-6 : 1e-14;
  return std::abs(got - expected) <= (single ? 2e-5 : 1e-10) * std::abs(expected) + least;
}

/// What differs in the cases of an operator: lines as they stand in differences.hpp, and the numbers.
struct Found {
  std::multiset<std::string> lines;
  std::string shown;

  void add(const std::string& line, const std::string& detail) {
    lines.insert(line);
    shown += "\n    " + line + detail;
  }
  void compare(const std::string& name, const std::vector<double>& got, const std::vector<double>& expected,
               bool single, Rounding rounding, const std::vector<Array>& inputs) {
    std::string places, numbers_shown;
    if (got.size() != expected.size()) return add(name + " size", "");
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (close(got[i], expected[i], single, rounding)) continue;
      places += " " + std::to_string(i);
      numbers_shown += ch::cat("\n      [", i, "] got ", got[i], ", PyTorch's is ", expected[i]);
      for (const Array& input : inputs)
        if (input.values.size() == got.size()) numbers_shown += ch::cat(" of ", input.values[i]);
    }
    if (!places.empty()) add(name + places, numbers_shown);
  }
};

/// What an operator makes of inputs in one type; the bool is whether gradients are zeros.
using Outcomes = test::AnyFunction<Outcome(const std::vector<Array>&, bool)>;

/// Holds what `outcome(inputs, zero)` says to the cases of an operator in one type.
inline void hold_cases(Group& group, const std::string& operation, bool single, Rounding rounding, Found& found,
                       const Outcomes& outcome) {
  const std::string kind = single ? "f32" : "f64";
  for (const auto& entry : file()["cases"][group.name][operation][kind]) {
    ++group.cases;
    std::vector<Array> inputs;
    std::string label;
    for (const std::string input : entry["in"]) {
      label += (label.empty() ? "" : ", ") + input;
      const auto& array = file()["inputs"][kind][input];
      inputs.push_back({array["shape"].get<std::vector<Index>>(), numbers(array["v"])});
    }
    const bool zero = entry.contains("zero");
    const std::string line = kind + " " + label + (zero ? " (no gradient)" : "") + ":";
    try {
      const Outcome got = outcome(inputs, zero);
      if (entry.contains("raises")) {
        found.add(line + " not refused", " as PyTorch does: " + entry["raises"].get<std::string>());
        continue;
      }
      if (got.y.shape != entry["shape"].get<std::vector<Index>>()) found.add(line + " shape", "");
      if (!zero) found.compare(line + " y", got.y.values, numbers(entry["y"]), single, rounding, inputs);
      if (!got.gradients) continue;
      const char* const names[] = {" dx", " d1", " d2", " d3", " d4"};
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto expected = numbers(entry["d"][i]);
        auto gradient = (*got.gradients)[i];
        if (gradient.empty()) gradient.assign(expected.size(), 0);  // no gradient is one of zeros
        if (!expected.empty()) found.compare(line + names[i], gradient, expected, single, rounding, inputs);
      }
    } catch (const ch::Error& error) {
      if (!entry.contains("raises")) found.add(line + " refused", ch::cat(": ", error.what()));
    } catch (const std::exception& error) {
      found.add(line + " threw", ch::cat(": ", error.what()));
    }
  }
}

/// Holds what differs to the list of it.
inline void hold_differences(const Group& group, const std::string& operation, const Found& found) {
  const std::string name = group.name + ": " + operation;
  auto unexpected = found.lines;
  for (const Difference& known : differences()) {
    if (known.name != name) continue;
    const bool there = std::erase_if(unexpected, [&](const std::string& line) {
      return line == known.what || (!known.everywhere && line.starts_with(std::string(known.what) + " "));
    }) != 0;
    if (!there && known.everywhere) {
      std::cout << name << " is listed, but right: " << known.what << "\n";
      CHECK(name == "listed without need");
    }
  }
  if (unexpected.empty()) return;
  std::cout << name << " differs:" << found.shown << "\n";  // not by Catch, which breaks lines
  CHECK(name == "PyTorch's");
}

template <class X>
std::vector<double> values_of(const X& x) {
  if (!x.defined()) return {};
  const auto all = ch::contiguous(x).to_vector();
  return {all.begin(), all.end()};
}

template <class T, int Rank>
ch::Variable<T, Rank, Device> variable(const Array& array) {
  Shape<Rank> shape{};
  REQUIRE(array.shape.size() == shape.size());
  std::copy(array.shape.begin(), array.shape.end(), shape.begin());
  const std::vector<T> all(array.values.begin(), array.values.end());
  return ch::Variable<T, Rank, Device>(Tensor<T, Rank>::from(all, shape, Device{}), true);
}

/// The gradient that all values get: 1, -0.5, 2, 0.25, again and again; or zeros.
template <class T, int Rank>
Tensor<T, Rank> gradient_like(const Tensor<T, Rank>& y, bool zero) {
  constexpr double pattern[] = {1, -0.5, 2, 0.25};
  std::vector<T> all(static_cast<std::size_t>(y.numel()));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = zero ? T{0} : static_cast<T>(pattern[i % 4]);
  return Tensor<T, Rank>::from(all, y.shape(), y.device());
}

/// What an operator of Variables of these ranks makes of the arrays.
template <class T, int... Ranks, class Y>
Outcome outcome_of(const test::AnyFunction<Y(const ch::Variable<T, Ranks, Device>&...)>& f,
                   const std::vector<Array>& arrays, bool zero) {
  REQUIRE(arrays.size() == sizeof...(Ranks));
  const auto inputs = [&]<std::size_t... i>(std::index_sequence<i...>) {
    return std::tuple{variable<T, Ranks>(arrays[i])...};
  }
  (std::make_index_sequence<sizeof...(Ranks)>());
  const Y y = std::apply(f, inputs);
  const auto& value = ch::value_of(y);
  Outcome out{{{value.shape().begin(), value.shape().end()}, values_of(value)}, {}};
  if constexpr (requires { y.backward(value); }) {
    if (y.requires_grad()) y.backward(gradient_like(value, zero));
    out.gradients =
        std::apply([](const auto&... x) { return std::vector<std::vector<double>>{values_of(x.grad())...}; }, inputs);
  }
  return out;
}

inline void operator_is_right(Group& group, const std::string& operation, Rounding rounding, const Outcomes& in_float,
                              const Outcomes& in_double) {
  INFO(group.name << ": " << operation);
  REQUIRE(file()["cases"][group.name].contains(operation));
  REQUIRE(group.met.insert(operation).second);
  Found found;
  hold_cases(group, operation, true, rounding, found, in_float);
  hold_cases(group, operation, false, rounding, found, in_double);
  hold_differences(group, operation, found);
}
/// Holds `f`, called with Variables of these ranks, to all cases of an operator in float and double, and what differs
/// to the list of that.
template <int... Ranks, class F>
void operator_is_right(Group& group, const std::string& operation, const F& f, Rounding rounding = Rounding::relative) {
  const auto outcome = [&]<class T>(T, const std::vector<Array>& inputs, bool zero) {
    using Y = decltype(f(std::declval<const ch::Variable<T, Ranks, Device>&>()...));
    const test::AnyFunction<Y(const ch::Variable<T, Ranks, Device>&...)> untyped(f);
    return outcome_of<T, Ranks...>(untyped, inputs, zero);
  };
  operator_is_right(
      group, operation, rounding,
      [&](const std::vector<Array>& inputs, bool zero) { return outcome(float{}, inputs, zero); },
      [&](const std::vector<Array>& inputs, bool zero) { return outcome(double{}, inputs, zero); });
}

/// That the file has no operator which the group left out, and the list no operator that doesn't exist.
inline void group_is_whole(const Group& group) {
  std::set<std::string> known;
  for (const auto& [name, cases] : file()["cases"][group.name].items()) known.insert(name);
  CHECK(group.met == known);
  for (const Difference& difference : differences()) {
    const std::string name(difference.name), prefix = group.name + ": ";
    if (name.rfind(prefix, 0) == 0) CHECK(known.count(name.substr(prefix.size())) == 1);
  }
  std::cout << group.name << ": " << group.met.size() << " operators and forms, " << group.cases << " cases\n";
}

}  // namespace edge
