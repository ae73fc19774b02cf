// Equations, which are read when a program is compiled, by the same functions.
#include <chorus/ops/einsum.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(einsum) {
  const auto text = fuzz::text_of(input);
  if (!chorus::detail::EinsumPlan::valid(text)) return;
  const chorus::detail::EinsumPlan plan(text);
  const auto in_a = plan.both.count + plan.summed.count + plan.of_a.count + plan.a_alone.count;
  const auto in_b = plan.both.count + plan.summed.count + plan.of_b.count + plan.b_alone.count;
  FUZZ_REQUIRE(in_a == plan.a.size() && in_b == plan.b.size());
  FUZZ_REQUIRE(plan.both.count + plan.of_a.count + plan.of_b.count == plan.out.size());
  FUZZ_REQUIRE(std::string(plan.a) + "," + std::string(plan.b) + "->" + std::string(plan.out) == text);
}
