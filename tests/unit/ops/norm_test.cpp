#include <chorus/ops/norm.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "check_operator.hpp"

namespace norm_test {

constexpr double inf = std::numeric_limits<double>::infinity();

/// The value and the gradient of `f` at x.
template <class T, class F>
std::vector<T> at(const std::vector<T>& x, const F& f) {
  const ch::Variable<T, 1> v(ch::Tensor<T, 1>::from(x, {static_cast<Index>(x.size())}), true);
  const auto y = f(v);
  y.backward();
  auto out = v.grad().to_vector();
  out.insert(out.begin(), y.item());
  return out;
}
template <class T>
void check_close(const std::vector<T>& got, const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    CHECK(static_cast<double>(got[i]) == Approx(expected[i]).epsilon(1e-6).margin(1e-12));
}

TEST_CASE("gradients of norms and standard deviations, along each axis, several and all") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  for (const double p : {1.0, 2.0, 3.0, 1.5, 0.5, inf}) {
    check_operator([&](const auto& a) { return ch::norm(a, p); }, x);
    for (const Index axis : {0, -1}) check_operator([&](const auto& a) { return ch::norm(a, p, axis); }, x);
  }
  check_operator([&](const auto& a) { return ch::norm(a, 2, 1, ch::keep_axis); }, x);
  check_operator([&](const auto& a) { return ch::norm(a, 2, std::array<Index, 2>{0, 2}); }, x);
  check_operator([&](const auto& a) { return ch::std(a); }, x);
  check_operator([&](const auto& a) { return ch::std(a, 1); }, x);
  check_operator([&](const auto& a) { return ch::std(a, -1, ch::keep_axis, 0); }, x);
  check_operator([&](const auto& a) { return ch::std(a, std::array<Index, 2>{0, 2}, ch::keep_axis); }, x);
}

TEST_CASE("norms and their gradients are PyTorch's") {
  const auto norm = [](double p) { return [p](const auto& v) { return ch::norm(v, p); }; };
  const std::vector<double> x{1, -2, 0}, zeros{0, 0, 0};
  check_close(at(x, norm(1)), {3, 1, -1, 0});
  check_close(at(x, norm(2)), {2.23606797749979, 0.4472135954999579, -0.8944271909999159, 0});
  check_close(at(x, norm(inf)), {2, 0, -1, 0});
  check_close(at(x, norm(3)), {2.080083823051904, 0.2311204247835449, -0.9244816991341795, 0});
  check_close(at(x, norm(1.5)), {2.4472608147714756, 0.6392340078652324, -0.9040134034531215, 0});
  check_close(at(x, norm(0.5)), {5.82842712474619, 2.414213562373095, -1.7071067811865472, 0});
  check_close(at(x, norm(-inf)), {0, 0, 0, 0});
  check_close(at(std::vector<double>{3, -3, 1}, norm(inf)), {3, 0.5, -0.5, 0});
  for (const double p : {1.0, 2.0, 3.0, 1.5, 0.5, inf, -inf}) check_close(at(zeros, norm(p)), {0, 0, 0, 0});
  const auto infinite = at(std::vector<double>{inf, 1}, norm(2));
  CHECK(infinite[0] == inf);
  CHECK(std::isnan(infinite[1]));
  CHECK(infinite[2] == 0);
  CHECK(std::isnan(at(std::vector<double>{NAN, 1}, norm(2))[0]));
}

TEST_CASE("standard deviations and their gradients are PyTorch's") {
  const auto std = [](const auto& v) { return ch::std(v); };
  check_close(at(std::vector<double>{1, 1, 1}, std), {0, 0, 0, 0});
  check_close(at(std::vector<double>{1, 3}, std), {std::sqrt(2.0), -std::sqrt(0.5), std::sqrt(0.5)});
  const auto one = at(std::vector<double>{2}, std);
  CHECK((std::isnan(one[0]) && std::isnan(one[1])));
  CHECK(ch::std(Tensor<2>::from({1, 2, 3, 4, 6, 8}, {2, 3}), 1).to_vector() == std::vector<double>{1, 2});
}

TEST_CASE("rows that are zero have no part in the gradient, the others theirs") {
  const Variable<2> x(Tensor<2>::from({0, 0, 3, 4}, {2, 2}), true);
  ch::sum(ch::norm(x, 2, 1) + ch::std(x, 1)).backward();
  const double deviation = std::sqrt(0.5);
  check_close(x.grad().to_vector(), {0, 0, 0.6 - deviation, 0.8 + deviation});
}

TEST_CASE("squares of large and small floats neither overflow nor vanish") {
  const float root = std::sqrt(0.5f);
  for (const float size : {1e-44f, 1e-40f, 1e-30f, 1e-14f, 1.0f, 1e16f, 1e20f, 1e26f, 1e30f, 2e38f}) {
    const std::vector<float> two{size, size}, apart{size, -size};
    CAPTURE(size);
    const auto relative = [&](std::vector<float> got, const std::vector<double>& expected) {
      CHECK(static_cast<double>(got[0] / size) == Approx(expected[0]).epsilon(size < 1e-37f ? 0.1 : 1e-6));
      CHECK(static_cast<double>(got[1]) == Approx(expected[1]).epsilon(1e-5));
      CHECK(static_cast<double>(got[2]) == Approx(expected[2]).epsilon(1e-5));
    };
    relative(at(two, [](const auto& v) { return ch::norm(v) * 1.0f; }), {std::sqrt(2.0), root, root});
    if (size > 1e-37f && size < 1e38f)
      relative(at(apart, [](const auto& v) { return ch::std(v); }), {std::sqrt(2.0), root, -root});
    const double part = std::pow(2.0, -2.0 / 3);
    if (size > 1e-37f && size < 1e38f)
      relative(at(two, [](const auto& v) { return ch::norm(v, 3); }), {std::cbrt(2.0), part, part});
  }
}

TEST_CASE("norms of nothing, of narrow types, and messages") {
  CHECK(ch::norm(Tensor<2>::empty({0, 3}), 2, 0).to_vector() == std::vector<double>{0, 0, 0});
  CHECK(ch::norm(Tensor<1>::empty({0})).item() == 0);
  CHECK(static_cast<float>(ch::norm(ch::to<ch::bf16>(ch::Tensor<float, 1>::from({3, 4}, {2}))).item()) == 5);
  CHECK(static_cast<float>(ch::std(ch::to<ch::half>(ch::Tensor<float, 1>::from({1, 2, 3}, {3}))).item()) == 1);
  CHECK(message_of<ch::UsageError>([] { ch::norm(Tensor<1>::ones({2}), -1); }) ==
        "norm: expected a positive p, or -inf for the smallest element, got -1");
  CHECK(message_of<ch::UsageError>([] {
          ch::norm(Tensor<2>::ones({0, 2}), inf, 0);
        }) == "norm: an axis of a tensor of shape [0, 2] has no elements");
  CHECK(message_of<ch::ShapeError>([] { ch::norm(Tensor<2>::ones({1, 2}), 2, 2); }) ==
        "norm: axis 2 does not exist in a tensor of rank 2");
}

}  // namespace norm_test
