#include <chorus/ops/attention.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/padding.hpp>

#include "check_operator.hpp"

namespace masking_test {

template <std::size_t N>
ch::Tensor<bool, static_cast<int>(N)> every_third(const std::array<Index, N>& shape) {
  auto mask = ch::Tensor<bool, static_cast<int>(N)>::empty(shape);
  for (Index i = 0; i < mask.numel(); ++i) mask.data()[i] = i % 3 == 0;
  return mask;
}

TEST_CASE("gradients of choices by a mask") {
  const auto mask = every_third<2>({3, 5}), row = every_third<2>({1, 5});
  const auto x = numbers<2>({3, 5}, 1), y = numbers<2>({3, 5}, 2);
  check_operator([&](const auto& a) { return ch::masked_fill(a, mask, -1.5); }, x);
  check_operator([&](const auto& a) { return ch::masked_fill(a, row, 2); }, x);
  check_operator([&](const auto& a, const auto& b) { return ch::where(mask, a, b); }, x, y);
  check_operator([&](const auto& a, const auto& b) { return ch::where(row, a, b); }, x, numbers<0>({}, 3));
}

TEST_CASE("what a mask hides has no influence, not even as NaN") {
  const auto mask = every_third<1>({2});
  const Variable<1> x(Tensor<1>::from({NAN, 1}, {2}), true);
  const auto y = ch::masked_fill(x, mask, -INFINITY);
  CHECK(y.value()(0) == -INFINITY);
  y.backward(Tensor<1>::ones({2}));
  CHECK(x.grad().to_vector() == std::vector<double>{0, 1});
}

TEST_CASE("gradients of padding") {
  check_operator([](const auto& x) { return ch::pad2d(x, {1, 2, 0, 3}, 0.5); }, numbers<3>({2, 3, 4}, 1));
  CHECK(ch::pad2d(Tensor<2>::ones({1, 1}), {.left = 1, .bottom = 1}, 3).to_vector() == std::vector<double>{3, 1, 3, 3});
  CHECK(message_of<ch::UsageError>([] {
          ch::pad2d(Tensor<2>::ones({1, 1}), {.top = -1});
        }) == "pad2d: expected padding of at least 0, got left 0, right 0, top -1, bottom 0");
}

TEST_CASE("gradients of attention") {
  const auto q = numbers<3>({2, 4, 3}, 1), k = numbers<3>({2, 5, 3}, 2), v = numbers<3>({2, 5, 2}, 3);
  for (const bool causal : {false, true})
    check_operator([causal](const auto&... in) { return ch::scaled_dot_product_attention(in..., causal); }, q, k, v);
}

TEST_CASE("causal attention does not see later keys") {
  const auto q = numbers<2>({3, 4}, 1), k = numbers<2>({3, 4}, 2), v = numbers<2>({3, 2}, 3);
  const auto before = ch::scaled_dot_product_attention(q, k, v, true);
  v(2, 0) = 1000;
  k(2, 1) = -50;
  const auto after = ch::scaled_dot_product_attention(q, k, v, true);
  CHECK(values(before.slice(0, 0, 2)) == values(after.slice(0, 0, 2)));
  CHECK(before(0, 0) == v(0, 0));
  CHECK(before(2, 0) != after(2, 0));
}

}  // namespace masking_test
