#include <chorus/ops/reduction.hpp>

#include "check_operator.hpp"

namespace reduction_test {

TEST_CASE("gradients of reductions, along each axis and over all") {
  const auto x = numbers<3>({3, 4, 5}, 1);
  const auto check_all = [&](const auto& f) {
    check_operator([&](const auto& a) { return f(a); }, x);
    for (const Index axis : {0, 1, 2, -1}) {
      check_operator([&](const auto& a) { return f(a, axis); }, x);
      check_operator([&](const auto& a) { return f(a, axis, ch::keep_axis); }, x);
    }
  };
  check_all([](const auto&... arguments) { return ch::sum(arguments...); });
  check_all([](const auto&... arguments) { return ch::mean(arguments...); });
}

TEST_CASE("gradients of extrema and variances") {
  const auto x = numbers<3>({3, 4, 5}, 2);
  for (const Index axis : {0, 1, 2}) {
    check_operator([&](const auto& a) { return ch::amax(a, axis); }, x);
    check_operator([&](const auto& a) { return ch::amin(a, axis, ch::keep_axis); }, x);
    check_operator([&](const auto& a) { return ch::var(a, axis); }, x);
    check_operator([&](const auto& a) { return ch::var(a, axis, ch::keep_axis, 0); }, x);
  }
  check_operator([&](const auto& a) { return ch::amax(a); }, x);
  check_operator([&](const auto& a) { return ch::var(a); }, x);
}

TEST_CASE("shapes and numbers of reductions") {
  const auto x = Tensor<2>::from({1, 5, 3, 4, 2, 6}, {2, 3});
  CHECK(ch::sum(x, 0).to_vector() == std::vector<double>{5, 7, 9});
  CHECK(ch::mean(x, 1).to_vector() == std::vector<double>{3, 4});
  CHECK(ch::amax(x, 1, ch::keep_axis).shape() == Shape<2>{2, 1});
  static_assert(!std::is_convertible_v<bool, ch::KeepAxis>);  // mean(x, 1, true) says what to write
  CHECK(ch::amin(x).item() == 1);
  CHECK(ch::argmax(x, 1).to_vector() == std::vector<Index>{1, 2});
  CHECK(ch::argmax(x, 0).to_vector() == std::vector<Index>{1, 0, 1});
  CHECK(ch::var(x, 1).to_vector() == std::vector<double>{4, 4});
}

TEST_CASE("ties share the gradient of amax") {
  const Variable<1> x(Tensor<1>::from({2, 1, 2, 2}, {4}), true);
  ch::amax(x).backward(Tensor<0>::full({}, 3));
  CHECK(x.grad().to_vector() == std::vector<double>{1, 0, 1, 1});
}

TEST_CASE("sums of nothing") {
  const Variable<2> x(Tensor<2>::empty({0, 3}), true);
  const auto y = ch::sum(x, 0);
  CHECK(y.value().to_vector() == std::vector<double>{0, 0, 0});
  y.backward(Tensor<1>::ones({3}));
  CHECK(x.grad().shape() == Shape<2>{0, 3});
  CHECK(ch::sum(x).item() == 0);
}

TEST_CASE("sums of narrow integers and truth values have 64 bits") {
  const auto x = ch::Tensor<std::int32_t, 2>::from({1 << 30, 1 << 30, 1 << 30, 5, -7, 3}, {2, 3});
  const ch::Tensor<std::int64_t, 1> rows = ch::sum(x, 1);
  CHECK(rows.to_vector() == std::vector<std::int64_t>{3LL << 30, 1});
  CHECK(ch::sum(x, 0, ch::keep_axis).to_vector() == std::vector<std::int64_t>{(1 << 30) + 5, (1 << 30) - 7, (1 << 30) + 3});
  CHECK(ch::sum(ch::Tensor<std::uint8_t, 1>::full({300}, 1)).item() == 300);
  CHECK(ch::sum(ch::Tensor<bool, 1>::full({300}, true)).item() == 300);
}

TEST_CASE("messages of reductions") {
  const auto x = Tensor<2>::ones({2, 3});
  CHECK(message_of<ch::ShapeError>([&] { ch::sum(x, 2); }) == "sum: axis 2 does not exist in a tensor of rank 2");
  CHECK(message_of<ch::ShapeError>([&] { ch::argmax(x, -3); }) ==
        "argmax: axis -3 does not exist in a tensor of rank 2");
}

}  // namespace reduction_test
