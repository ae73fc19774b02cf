// Element-wise functions.
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/masking.hpp>

#include "case.hpp"

namespace golden {
namespace {

// Operands of different ranks: the smaller one gets axes of size 1 in front, which is how broadcasting is defined.
template <class F>
void binary(Case& test, const F& f) {
  with_rank(std::max(test.rank("x"), test.rank("y")), [&]<int Rank>(std::integral_constant<int, Rank>) {
    const auto operand = [&](const char* name) {
      const auto& from = test.file(ch::cat("in.", name)).shape;
      Shape<Rank> shape{};
      shape.fill(1);
      for (std::size_t i = 0; i < from.size(); ++i) shape[shape.size() - from.size() + i] = from[i];
      return test.in<Rank>(name, shape);
    };
    test.out("y", f(operand("x"), operand("y")));
  });
}

}  // namespace

void add_pointwise(Operations& operations) {
#define UNARY(NAME) operations[#NAME] = [](Case& test) { unary(test, [](const auto& x) { return ch::NAME(x); }); }
  UNARY(abs);
  UNARY(neg);
  UNARY(square);
  UNARY(sqrt);
  UNARY(rsqrt);
  UNARY(reciprocal);
  UNARY(exp);
  UNARY(log);
  UNARY(log1p);
  UNARY(sin);
  UNARY(cos);
  UNARY(tanh);
  UNARY(erf);
  UNARY(relu);
  UNARY(relu6);
  UNARY(sigmoid);
  UNARY(log_sigmoid);
  UNARY(silu);
  UNARY(gelu);
  UNARY(gelu_tanh);
  UNARY(mish);
  UNARY(hardsigmoid);
  UNARY(hardswish);
#undef UNARY
  operations["leaky_relu"] = [](Case& test) {
    unary(test, [&](const auto& x) { return ch::leaky_relu(x, test.attr("negative_slope", 0.01)); });
  };
  operations["elu"] = [](Case& test) {
    unary(test, [&](const auto& x) { return ch::elu(x, test.attr("alpha", 1.0)); });
  };
  operations["softplus"] = [](Case& test) {
    unary(test, [&](const auto& x) { return ch::softplus(x, test.attr("beta", 1.0), test.attr("threshold", 20.0)); });
  };
  operations["hardtanh"] = [](Case& test) {
    unary(test, [&](const auto& x) { return ch::hardtanh(x, test.attr("min", -1.0), test.attr("max", 1.0)); });
  };
  operations["clamp"] = [](Case& test) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    unary(test, [&](const auto& x) { return ch::clamp(x, test.attr("min", -infinity), test.attr("max", infinity)); });
  };

#define BINARY(NAME) \
  operations[#NAME] = [](Case& test) { binary(test, [](const auto& x, const auto& y) { return ch::NAME(x, y); }); }
  BINARY(add);
  BINARY(sub);
  BINARY(mul);
  BINARY(div);
  BINARY(maximum);
  BINARY(minimum);
#undef BINARY
  operations["pow"] = [](Case& test) {
    if (test.attrs().contains("exponent"))
      unary(test, [&](const auto& x) { return ch::pow(x, test.attr<double>("exponent")); });
    else
      binary(test, [](const auto& x, const auto& y) { return ch::pow(x, y); });
  };
  operations["masked_fill"] = [](Case& test) {
    with_rank(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      const auto x = test.in<Rank>("x");
      with_rank(test.rank("mask"), [&]<int MaskRank>(std::integral_constant<int, MaskRank>) {
        if constexpr (MaskRank <= Rank)
          test.out("y", ch::masked_fill(x, test.mask<MaskRank>("mask"), test.attr<double>("value")));
      });
    });
  };
}

}  // namespace golden
