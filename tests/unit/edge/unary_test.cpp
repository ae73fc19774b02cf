#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/more_activations.hpp>

#include "edge.hpp"

namespace unary_test {
using namespace edge;

TEST_CASE("functions of one number at the edge are PyTorch's") {
  Group group("unary");
  // Where a result or a gradient is 1 less a number near it.
  const std::set<std::string> near_one{"tanh", "gelu", "gelu_tanh", "mish", "softsign", "tanhshrink"};
  const auto is_right = [&](const char* name, const auto& f) {
    operator_is_right<1>(group, name, f, near_one.count(name) == 1 ? Rounding::absolute : Rounding::relative);
  };
#define UNARY(NAME) is_right(#NAME, [](const auto& x) { return ch::NAME(x); });
  UNARY(abs)
  UNARY(square)
  UNARY(sqrt)
  UNARY(rsqrt)
  UNARY(reciprocal)
  UNARY(exp)
  UNARY(log)
  UNARY(log1p)
  UNARY(sin)
  UNARY(cos)
  UNARY(tanh)
  UNARY(erf)
  UNARY(relu)
  UNARY(sigmoid)
  UNARY(neg)
  UNARY(relu6)
  UNARY(log_sigmoid)
  UNARY(silu)
  UNARY(gelu)
  UNARY(gelu_tanh)
  UNARY(mish)
  UNARY(hardsigmoid)
  UNARY(hardswish)
  UNARY(leaky_relu)
  UNARY(elu)
  UNARY(softplus)
  UNARY(hardtanh)
  UNARY(selu)
  UNARY(celu)
  UNARY(softsign)
  UNARY(tanhshrink)
  UNARY(hardshrink)
  UNARY(softshrink)
#undef UNARY
  is_right("elu 0.5", [](const auto& x) { return ch::elu(x, 0.5); });
  is_right("celu 2", [](const auto& x) { return ch::celu(x, 2); });
  is_right("softplus 2 10", [](const auto& x) { return ch::softplus(x, 2, 10); });
  is_right("softplus 1 100", [](const auto& x) { return ch::softplus(x, 1, 100); });
  is_right("threshold", [](const auto& x) { return ch::threshold(x, 0.1, 20); });
  is_right("clamp", [](const auto& x) { return ch::clamp(x, -1, 2); });
  is_right("clamp below", [](const auto& x) { return ch::clamp(x, 0.25); });
  is_right("clamp above", [](const auto& x) { return ch::clamp(x, -INFINITY, 0.25); });
  is_right("add 1", [](const auto& x) { return x + 1; });
  is_right("sub 1", [](const auto& x) { return x - 1; });
  is_right("1 sub", [](const auto& x) { return 1 - x; });
  is_right("mul 3", [](const auto& x) { return x * 3; });
  is_right("mul 0", [](const auto& x) { return x * 0; });
  is_right("div 3", [](const auto& x) { return x / 3; });
  is_right("div 0", [](const auto& x) { return x / 0; });
  is_right("3 div", [](const auto& x) { return 3 / x; });
  const std::pair<const char*, double> exponents[] = {{"-1", -1},   {"-0.5", -0.5}, {"0", 0},          {"0.5", 0.5},
                                                      {"1", 1},     {"2", 2},       {"3", 3},          {"4", 4},
                                                      {"2.5", 2.5}, {"-2", -2},     {"0.333", 1.0 / 3}};
  for (const auto& [name, exponent] : exponents)
    is_right(("pow " + std::string(name)).c_str(), [e = exponent](const auto& x) { return ch::pow(x, e); });
  is_right("dropout in evaluation", [](const auto& x) { return ch::dropout(x, 0.5, false); });
  is_right("cumsum", [](const auto& x) { return ch::cumsum(x, 0); });
  group_is_whole(group);
}

}  // namespace unary_test
