#include <chorus/ops/shape.hpp>

#include "check_operator.hpp"

namespace shape_test {

TEST_CASE("gradients of what changes shapes and order") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  check_operator([](const auto& a) { return ch::reshape(a, Shape<2>{4, -1}); }, x);
  check_operator([](const auto& a) { return ch::flatten(a); }, x);
  check_operator([](const auto& a) { return ch::flatten<0>(a); }, x);
  check_operator([](const auto& a) { return ch::permute(a, Shape<3>{2, 0, 1}); }, x);
  check_operator([](const auto& a) { return ch::permute(a, Shape<3>{-1, 0, -2}); }, x);
  check_operator([](const auto& a) { return ch::transpose(a, 0, -1); }, x);
  check_operator([](const auto& a) { return ch::expand(a, Shape<4>{3, 2, 3, 4}); }, x);
  check_operator([](const auto& a) { return ch::expand(a, Shape<3>{5, 4, 2}); }, numbers<2>({1, 2}, 2));
}

TEST_CASE("gradients of what cuts and joins") {
  const auto x = numbers<3>({2, 3, 4}, 1), y = numbers<3>({2, 5, 4}, 2);
  for (const Index axis : {0, 1, 2}) check_operator([axis](const auto& a) { return ch::slice(a, axis, 1, 2); }, x);
  check_operator([](const auto& a) { return ch::slice(a, 1, 1, 1); }, x);
  check_operator([](const auto& a, const auto& b) { return ch::concat(1, a, b, a); }, x, y);
  check_operator([](const auto& a) { return ch::concat(-1, a, a); }, x);
  check_operator([](const auto& a, const auto& b) { return ch::stack(1, a, b); }, x, numbers<3>({2, 3, 4}, 3));
  check_operator([](const auto& a, const auto& b) { return ch::stack(0, a, b); }, numbers<0>({}, 1), numbers<0>({}, 2));
}

TEST_CASE("a list of any length is joined in order") {
  for (const std::size_t count : {1u, 2u, 3u, 7u}) {
    std::vector<Variable<1>> parts;
    std::vector<double> expected;
    for (std::size_t i = 0; i < count; ++i) {
      parts.emplace_back(Tensor<1>::full({2}, static_cast<double>(i)), true);
      expected.insert(expected.end(), 2, static_cast<double>(i));
    }
    const auto all = ch::concat(0, std::span<const Variable<1>>(parts));
    CHECK(all.value().to_vector() == expected);
    all.backward(all.value());
    for (std::size_t i = 0; i < count; ++i)
      CHECK(parts[i].grad().to_vector() == std::vector<double>(2, static_cast<double>(i)));
  }
}

TEST_CASE("a result of another shape does not change with its source's gradient") {
  const Variable<2> x(Tensor<2>::ones({2, 2}), true);
  const auto flat = ch::reshape(x, Shape<1>{4});
  const auto seed = Tensor<1>::ones({4});
  flat.backward(seed);
  ch::reshape(x, Shape<1>{4}).backward(seed);
  CHECK(x.grad().to_vector() == std::vector<double>{2, 2, 2, 2});
  CHECK(seed.to_vector() == std::vector<double>{1, 1, 1, 1});
}

TEST_CASE("messages of shapes") {
  const auto x = Tensor<2>::ones({2, 3}), y = Tensor<2>::ones({3, 3});
  CHECK(message_of<ch::ShapeError>([&] { ch::reshape(x, Shape<1>{5}); }) == "reshape: shape [2, 3] does not fit [5]");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::reshape(x, Shape<2>{-1, 4});
        }) == "reshape: shape [2, 3] does not fit [-1, 4]");
  CHECK(message_of<ch::ShapeError>([&] { ch::permute(x, {0, 0}); }) == "permute: axes [0, 0] name an axis twice");
  CHECK(message_of<ch::ShapeError>([&] { ch::slice(x, 1, 2, 4); }) ==
        "slice: range [2, 4) is not inside axis 1 of shape [2, 3]");
  CHECK(message_of<ch::ShapeError>([&] { ch::concat(1, x, y); }) ==
        "concat: shapes [2, 3] and [3, 3] differ outside of axis 1");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::expand(x, Shape<2>{2, 6});
        }) == "expand: shape [2, 3] does not expand to [2, 6]");
  CHECK(message_of<ch::UsageError>([&] { ch::concat(0, std::span<const Tensor<2>>()); }) ==
        "concat: expected at least one tensor, got none");
}

TEST_CASE("integers and truth values change their shapes too") {
  const auto x = ch::Tensor<std::int64_t, 2>::from({1, 2, 3, 4}, {2, 2});
  CHECK(ch::concat(1, x, x).to_vector() == std::vector<Index>{1, 2, 1, 2, 3, 4, 3, 4});
  CHECK(ch::stack(0, x, x).shape() == Shape<3>{2, 2, 2});
  CHECK(ch::reshape(ch::permute(x, Shape<2>{1, 0}), Shape<1>{-1}).to_vector() == std::vector<Index>{1, 3, 2, 4});
  CHECK(ch::slice(ch::expand(x, Shape<3>{3, 2, 2}), 0, 1, 2).numel() == 4);
  const auto mask = ch::Tensor<bool, 1>::from({true, false}, {2});
  const auto both = ch::concat(0, mask, mask);
  CHECK((both(0) && !both(1) && both(2) && !both(3)));
}

}  // namespace shape_test
