#include <chorus/autograd/gradient_check.hpp>
#include <chorus/kernels/cpu/pointwise.hpp>
#include <chorus/ops/pointwise.hpp>

#include <catch.hpp>

namespace gradient_check_test {

namespace ch = chorus;

// x² with a gradient that is wrong by a factor.
struct Wrong {
  double factor;
  template <class S>
  S operator()(const S& x) const {
    return x * x;
  }
  template <class S>
  ch::Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{dy * x * (2 * factor)}};
  }
};
double error_with(double factor) {
  const auto x = ch::Tensor<double, 1>::from({0.5, 1, 2}, {3});
  return ch::gradient_error([factor](const auto& a) { return ch::pointwise(Wrong{factor}, a); }, x);
}

TEST_CASE("wrong gradients are found") {
  CHECK(error_with(1) < 1e-8);
  CHECK(error_with(1.001) > 5e-4);
  CHECK(error_with(NAN) == INFINITY);
}

TEST_CASE("a gradient that is missing counts as 0, and inputs stay as they were") {
  const auto x = ch::Tensor<double, 1>::from({0.5, 1, 2}, {3});
  const auto unused = ch::gradient_error(
      [](const auto& a, const auto& b) { return ch::pointwise(ch::functors::Add{}, a, b.detach()); }, x, x);
  CHECK(unused > 0.3);
  CHECK(x.to_vector() == std::vector<double>{0.5, 1, 2});
}

}  // namespace gradient_check_test
