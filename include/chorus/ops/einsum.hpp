#pragma once
/// Einstein summation of two operands, as one matrix product or a sum of products.

#include <algorithm>
#include <array>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/reduction_axes.hpp>
#include <string_view>

namespace chorus {

/// The equation in `einsum<"bij,bjk->bik">`.
template <std::size_t N>
struct Equation {
  char text[N]{};
  consteval Equation(const char (&from)[N]) { std::copy_n(from, N, text); }  // NOLINT: converts from text
  constexpr std::string_view view() const { return {text, N - 1}; }
};

namespace detail {

/// The index of `c` in `text`, or npos. string_view::find compares the address with null, which GCC's undefined
/// behaviour sanitizer does not accept as a constant for template arguments.
constexpr std::size_t place_of(char c, std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i)
    if (text[i] == c) return i;
  return std::string_view::npos;
}
constexpr bool has(std::string_view text, char c) { return place_of(c, text) != std::string_view::npos; }

struct EinsumPlan {
  std::string_view a, b, out;
  static constexpr std::size_t most = 8;
  struct Letters {
    char letter[most]{};
    std::size_t count = 0;
    constexpr void add(char c) { letter[count++] = c; }
  };
  Letters both, summed, of_a, of_b, a_alone, b_alone;

  constexpr explicit EinsumPlan(std::string_view equation) {
    const auto comma = place_of(',', equation), arrow = place_of('-', equation);
    a = equation.substr(0, comma);
    b = equation.substr(comma + 1, arrow - comma - 1);
    out = equation.substr(arrow + 2);
    for (const char c : a) (has(b, c) ? (has(out, c) ? both : summed) : has(out, c) ? of_a : a_alone).add(c);
    for (const char c : b)
      if (!has(a, c)) (has(out, c) ? of_b : b_alone).add(c);
  }

  static constexpr bool valid(std::string_view equation) {
    const auto comma = place_of(',', equation), arrow = place_of('-', equation);
    if (comma > arrow || arrow == std::string_view::npos || !equation.substr(arrow).starts_with("->")) return false;
    const auto a = equation.substr(0, comma), b = equation.substr(comma + 1, arrow - comma - 1),
               out = equation.substr(arrow + 2);
    for (const auto part : {a, b, out})
      for (std::size_t i = 0; i < part.size(); ++i) {
        if (part[i] < 'a' || part[i] > 'z' || has(part.substr(i + 1), part[i])) return false;
        if (part.data() == out.data() && !has(a, part[i]) && !has(b, part[i])) return false;
      }
    return a.size() <= most && b.size() <= most;
  }
};

// x summed over the axes that only it has.
template <std::size_t Count, Operand X>
auto sum_letters(const X& x, std::string_view names, const EinsumPlan::Letters& letters) {
  if constexpr (Count == 0) {
    return reshape(x, value_of(x).shape());
  } else {
    std::array<Index, Count> axes{};
    for (std::size_t i = 0; i < Count; ++i) axes[i] = static_cast<Index>(names.find(letters.letter[i]));
    return sum(x, axes);
  }
}

}  // namespace detail

/// `einsum<"bij,bjk->bik">(a, b)`: letters name the axes of a, b and the result; letters missing from the result are
/// summed over. Lower-case letters, each once in an operand; no ellipsis. Throws ShapeError if the sizes of a letter
/// differ.
template <Equation equation, Operand A, Operand B>
auto einsum(const A& a, const B& b) {
  static_assert(detail::EinsumPlan::valid(equation.view()),
                "einsum: expected two operands and a result, as in \"ij,jk->ik\", each letter once in a part");
  constexpr detail::EinsumPlan plan(equation.view());
  static_assert(plan.a.size() == tensor_of<A>::rank && plan.b.size() == tensor_of<B>::rank,
                "einsum: the equation and the operands have different numbers of axes");
  std::array<Index, 128> size{};
  const auto measure = [&](std::string_view names, const auto& shape) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      auto& known = size[static_cast<std::size_t>(names[i])];
      check<ShapeError>(known == 0 || known == shape[i] + 1, "einsum ", equation.view(), ": shapes ",
                        value_of(a).shape(), " and ", value_of(b).shape(), " differ in axis ", names[i]);
      known = shape[i] + 1;
    }
  };
  measure(plan.a, value_of(a).shape());
  measure(plan.b, value_of(b).shape());

  // Each operand as [both, free, summed] and [both, summed, free].
  constexpr auto both = plan.both.count, summed = plan.summed.count, free_a = plan.of_a.count, free_b = plan.of_b.count;
  const auto arrange = [&]<std::size_t Rank, std::size_t Alone>(
                           const auto& x, std::string_view names, const detail::EinsumPlan::Letters& alone,
                           const detail::EinsumPlan::Letters& second, const detail::EinsumPlan::Letters& third) {
    const auto kept = detail::sum_letters<Alone>(x, names, alone);
    std::array<char, Rank + Alone> left{};
    std::size_t count = 0;
    for (const char c : names)
      if (std::string_view(alone.letter, alone.count).find(c) == std::string_view::npos) left[count++] = c;
    const std::string_view present(left.data(), count);
    Shape<static_cast<int>(Rank)> order{};
    std::array<Index, 3> sizes{1, 1, 1};
    std::size_t at = 0, part = 0;
    for (const auto* letters : {&plan.both, &second, &third}) {
      for (std::size_t i = 0; i < letters->count; ++i) {
        order[at++] = static_cast<Index>(present.find(letters->letter[i]));
        sizes[part] *= size[static_cast<std::size_t>(letters->letter[i])] - 1;
      }
      ++part;
    }
    return reshape(permute(kept, order), sizes);
  };
  const auto left = arrange.template operator()<both + free_a + summed, plan.a_alone.count>(a, plan.a, plan.a_alone,
                                                                                            plan.of_a, plan.summed);
  const auto right = arrange.template operator()<both + free_b + summed, plan.b_alone.count>(b, plan.b, plan.b_alone,
                                                                                             plan.summed, plan.of_b);
  std::array<char, both + free_a + free_b + 1> made{};
  Shape<static_cast<int>(both + free_a + free_b)> shape{}, order{};
  std::size_t at = 0;
  for (const auto* letters : {&plan.both, &plan.of_a, &plan.of_b})
    for (std::size_t i = 0; i < letters->count; ++i) {
      made[at] = letters->letter[i];
      shape[at++] = size[static_cast<std::size_t>(letters->letter[i])] - 1;
    }
  for (std::size_t i = 0; i < plan.out.size(); ++i)
    order[i] = static_cast<Index>(std::string_view(made.data(), at).find(plan.out[i]));
  using T = typename tensor_of<A>::value_type;
  if constexpr (free_a == 0 && free_b == 0 && !Narrow<T>) {
    // Products of single rows are faster as sums than as matrix products.
    const Shape<2> rows{value_of(left).size(0), value_of(left).size(2)};
    return permute(reshape(sum(reshape(left, rows) * reshape(right, rows), 1), shape), order);
  } else {
    return permute(reshape(matmul(left, right), shape), order);
  }
}

}  // namespace chorus
