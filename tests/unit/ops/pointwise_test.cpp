#include <chorus/kernels/cpu/pointwise.hpp>
#include <chorus/ops/pointwise.hpp>

#include "check_operator.hpp"
#include "swiglu.hpp"

namespace pointwise_test {

struct Leaky {
  double slope;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x > 0, x, slope * x);
  }
};
struct FusedMultiplyAdd {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b, const S& c) const {
    return a * b + c;
  }
};

TEST_CASE("a user's functor, its gradient by Dual numbers") {
  const auto swiglu = [](const auto& a, const auto& b) { return ch::pointwise(SwiGlu{}, a, b); };
  check_operator(swiglu, numbers<3>({2, 3, 9}, 1), numbers<3>({2, 3, 9}, 2));
  check_operator(swiglu, numbers<3>({2, 3, 9}, 1), numbers<1>({9}, 2));
  check_operator([](const auto& x) { return ch::pointwise(Leaky{0.3}, x); }, numbers<2>({3, 17}, 3));
}

TEST_CASE("three operands of different ranks") {
  const auto fma = [](const auto& a, const auto& b, const auto& c) {
    return ch::pointwise(FusedMultiplyAdd{}, a, b, c);
  };
  check_operator(fma, numbers<3>({2, 3, 4}, 1), numbers<2>({3, 1}, 2), numbers<0>({}, 3));
}

TEST_CASE("an operand may be its own partner, whatever the size") {
  for (const Index size : {1, 3, 8, 16, 37}) {
    CAPTURE(size);
    check_operator([](const auto& x) { return ch::pointwise(ch::functors::Mul{}, x, x); }, numbers<1>({size}, 1));
    check_operator([](const auto& x, const auto& c) { return ch::pointwise(FusedMultiplyAdd{}, x, x, c); },
                   numbers<2>({2, size}, 2), numbers<1>({1}, 3));
  }
}

TEST_CASE("long arrays, broadcast in blocks") {
  const auto a = numbers<2>({3, 1100}, 1);
  const auto b = numbers<2>({3, 1}, 2);
  const auto y = ch::pointwise(SwiGlu{}, a, b);
  double worst = 0;
  for (Index i = 0; i < 3; ++i)
    for (Index j = 0; j < 1100; ++j)
      worst = std::max(worst, std::abs(y(i, j) - a(i, j) / (1 + std::exp(-a(i, j))) * b(i, 0)));
  CHECK(worst < 1e-12);
}

}  // namespace pointwise_test
