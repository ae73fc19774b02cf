#include <chorus/ops/comparison.hpp>
#include <chorus/ops/counting.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/ops/distances.hpp>
#include <chorus/ops/in_place.hpp>
#include <chorus/ops/matrix_parts.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/ops/truth.hpp>
#include <vector>

#include "check_operator.hpp"

namespace functions_test {

using Integers = ch::Tensor<std::int64_t, 1>;
constexpr double inf = INFINITY;

template <int Rank>
std::vector<int> bits(const ch::Tensor<bool, Rank>& x) {
  std::vector<int> out;
  for (Index i = 0; i < x.numel(); ++i) out.push_back(x.data()[i] ? 1 : 0);
  return out;
}

TEST_CASE("comparisons give truth values, of operands that broadcast and of numbers") {
  const auto x = Tensor<2>::from({1, 2, 3, 4, NAN, 6}, {2, 3});
  const auto row = Tensor<1>::from({1, 5, 3}, {3});
  CHECK((x == row).shape() == Shape<2>{2, 3});
  CHECK(bits(x == row) == std::vector<int>{1, 0, 1, 0, 0, 0});
  CHECK(bits(x != row) == std::vector<int>{0, 1, 0, 1, 1, 1});
  CHECK(bits(x < row) == std::vector<int>{0, 1, 0, 0, 0, 0});
  CHECK(bits(x <= row) == std::vector<int>{1, 1, 1, 0, 0, 0});
  CHECK(bits(Variable<2>(x, true) > 2) == std::vector<int>{0, 0, 1, 1, 0, 1});
  CHECK(bits(x.transpose(0, 1) >= 2) == std::vector<int>{0, 1, 1, 0, 1, 1});
  CHECK(bits(2 > x) == std::vector<int>{1, 0, 0, 0, 0, 0});
  CHECK(bits(Integers::from({1, 2}, {2}) < 1.5) == std::vector<int>{1, 0});
  CHECK(bits(ch::Tensor<std::uint8_t, 1>::from({1, 255}, {2}) > -1) == std::vector<int>{1, 1});
  // A number is converted to the tensor's type.
  CHECK(bits(ch::Tensor<float, 1>::from({0.1f}, {1}) == 0.1) == std::vector<int>{1});
  CHECK(message_of<ch::ShapeError>([&] { static_cast<void>(x < Tensor<1>::zeros({2})); }) ==
        "lt: shapes [2, 3] and [2] do not broadcast");
  CHECK_THROWS_AS(x == Tensor<2>(), ch::UsageError);
}

TEST_CASE("logic, and what is no number") {
  const auto a = Tensor<1>::from({0, 0, 1, 2}, {4}) != 0, b = Tensor<1>::from({0, 1, 0, 1}, {4}) != 0;
  CHECK(bits(a & b) == std::vector<int>{0, 0, 0, 1});
  CHECK(bits(a | b) == std::vector<int>{0, 1, 1, 1});
  CHECK(bits(a ^ b) == std::vector<int>{0, 1, 1, 0});
  CHECK(bits(~a) == std::vector<int>{1, 1, 0, 0});
  CHECK(bits(ch::logical_and(Integers::from({2, 4}, {2}), Integers::from({1, 0}, {2}))) == std::vector<int>{1, 0});
  const auto odd = Tensor<1>::from({1, NAN, inf, -inf}, {4});
  CHECK(bits(ch::isnan(odd)) == std::vector<int>{0, 1, 0, 0});
  CHECK(bits(ch::isinf(odd)) == std::vector<int>{0, 0, 1, 1});
  CHECK(bits(ch::isfinite(odd)) == std::vector<int>{1, 0, 0, 0});
  CHECK(bits(ch::isnan(Integers::from({2}, {1}))) == std::vector<int>{0});
}

TEST_CASE("any and all") {
  const auto x = Tensor<2>::from({0, 1, 0, NAN, 1, 0}, {2, 3});
  CHECK(bits(ch::any(x, 0)) == std::vector<int>{1, 1, 0});
  CHECK(bits(ch::all(x, 0)) == std::vector<int>{0, 1, 0});
  CHECK(bits(ch::any(x > 5, 1)) == std::vector<int>{0, 0});
  CHECK(ch::any(x).item());
  CHECK_FALSE(ch::all(x == x).item());
  const auto none = Tensor<2>::empty({2, 0});
  CHECK(bits(ch::all(none, 1)) == std::vector<int>{1, 1});
  CHECK_FALSE(ch::any(none).item());
  CHECK_THROWS_AS(ch::any(x, 2), ch::ShapeError);
}

TEST_CASE("choices by a mask: numbers, integers, masked_select, nonzero") {
  const auto x = numbers<2>({2, 3}, 1);
  const auto mask = x > 0;
  check_operator([&](const auto& a) { return ch::where(mask, a, -1); }, x);
  check_operator([&](const auto& a) { return ch::where(mask, 0.5, a); }, x);
  check_operator([&](const auto& a) { return ch::masked_select(a, mask); }, x);
  const auto row = Tensor<1>::from({1, 0, 1}, {3}) > 0;
  CHECK(ch::masked_select(Tensor<2>::from({1, 2, 3, 4, 5, 6}, {2, 3}), row).to_vector() ==
        std::vector<double>{1, 3, 4, 6});
  CHECK(ch::where(row, Integers::from({1, 2, 3}, {3}), Integers::from({7}, {1})).to_vector() ==
        std::vector<Index>{1, 7, 3});
  CHECK(ch::where(row, Integers::from({1, 2, 3}, {3}), 0).to_vector() == std::vector<Index>{1, 0, 3});
  const auto places = ch::nonzero(Tensor<2>::from({0, 1, 0, 2, 0, NAN}, {2, 3}));
  CHECK(places.shape() == Shape<2>{3, 2});
  CHECK(places.to_vector() == std::vector<Index>{0, 1, 1, 0, 1, 2});
  CHECK(ch::count_nonzero(Tensor<2>::from({0, 1, 0, 2, 0, NAN}, {2, 3})).item() == 3);
  CHECK(ch::count_nonzero(row).item() == 2);
  CHECK(ch::count_nonzero(Integers::zeros({0})).item() == 0);
  CHECK_THROWS_AS(ch::count_nonzero(Tensor<1>{}), ch::UsageError);
  CHECK(message_of<ch::ShapeError>([&] { ch::masked_select(Tensor<1>::zeros({2}), row); }) ==
        "masked_select: shapes [2] and [3] do not broadcast");
}

TEST_CASE("arithmetic and conversions of integers") {
  const auto a = Integers::from({1, 2, 3}, {3}), b = Integers::from({4, 0, -6}, {3});
  CHECK((a + b).to_vector() == std::vector<Index>{5, 2, -3});
  CHECK((a - b).to_vector() == std::vector<Index>{-3, 2, 9});
  CHECK((a * b).to_vector() == std::vector<Index>{4, 0, -18});
  CHECK((1 - 2 * (a + 1)).to_vector() == std::vector<Index>{-3, -5, -7});
  CHECK((-a).to_vector() == std::vector<Index>{-1, -2, -3});
  CHECK((a + b.view(Shape<2>{3, 1})).to_vector() == std::vector<Index>{5, 6, 7, 1, 2, 3, -5, -4, -3});
  CHECK(ch::sum(b).item() == -2);
  CHECK(ch::amax(b, 0).item() == 4);
  CHECK(ch::amin(b, 0).item() == -6);
  CHECK(ch::to<std::int64_t>(b > -1).to_vector() == std::vector<Index>{1, 1, 0});
  CHECK(bits(ch::to<bool>(b)) == std::vector<int>{1, 0, 1});
  CHECK(ch::to<std::int64_t>(ch::to<std::int32_t>(b)).to_vector() == b.to_vector());
}

TEST_CASE("tensors made of a rule") {
  CHECK(ch::arange(4).to_vector() == std::vector<Index>{0, 1, 2, 3});
  CHECK(ch::arange(5, -1, -2).to_vector() == std::vector<Index>{5, 3, 1});
  CHECK(ch::arange<double>(0, 1, 0.25).to_vector() == std::vector<double>{0, 0.25, 0.5, 0.75});
  CHECK(std::is_same_v<decltype(ch::arange(0, 1, 0.1)), ch::Tensor<float, 1>>);
  CHECK(message_of<ch::UsageError>([] { ch::arange(0, 5, -1); }) ==
        "arange: expected a step that leads from 0 to 5, got -1");
  CHECK_THROWS_AS(ch::arange(0, 5, 0), ch::UsageError);
  CHECK(ch::linspace<double>(1, -1, 5).to_vector() == std::vector<double>{1, 0.5, 0, -0.5, -1});
  CHECK(ch::linspace<double>(3, 9, 1).to_vector() == std::vector<double>{3});
  CHECK_THROWS_AS(ch::linspace(0, 1, -1), ch::UsageError);
  const ch::Variable<double, 2> known(Tensor<2>::from({1, 2, 3, 4, 5, 6}, {2, 3}), true);
  const auto like = ch::full_like(known, 7);  // also for a value with a gradient; in new memory
  CHECK(like.shape() == Shape<2>{2, 3});
  CHECK(like.to_vector() == std::vector<double>(6, 7));
  CHECK(known.value()(1, 2) == 6);
  CHECK(ch::zeros_like(known).to_vector() == std::vector<double>(6, 0));
  CHECK(ch::ones_like(Integers::from({5, 6}, {2})).to_vector() == std::vector<Index>{1, 1});
  CHECK(ch::ones_like(Tensor<1>::zeros({0})).numel() == 0);
  CHECK_THROWS_AS(ch::zeros_like(Tensor<1>{}), ch::UsageError);
  CHECK(ch::eye<double>(2, 3).to_vector() == std::vector<double>{1, 0, 0, 0, 1, 0});
  CHECK(ch::one_hot(Integers::from({2, 0}, {2})).to_vector() == std::vector<Index>{0, 0, 1, 1, 0, 0});
  CHECK(ch::one_hot<double>(Integers::from({1}, {1}), 2).to_vector() == std::vector<double>{0, 1});
  CHECK(message_of<ch::UsageError>([] { ch::one_hot(Integers::from({3}, {1}), 3); }) ==
        "one_hot: expected classes from 0 to 2, got 3");
}

TEST_CASE("gradients of rearranging") {
  const auto x = numbers<3>({2, 1, 3}, 1);
  check_operator([](const auto& a) { return ch::unsqueeze(a, -1); }, x);
  check_operator([](const auto& a) { return ch::squeeze(a, 1); }, x);
  check_operator([](const auto& a) { return ch::repeat(a, std::array<Index, 4>{2, 1, 3, 2}); }, x);
  check_operator([](const auto& a) { return ch::flip(a, std::array<Index, 2>{0, 2}); }, x);
  check_operator([](const auto& a) { return ch::roll(a, -4, 2); }, x);
  CHECK(ch::unsqueeze(x, 0).shape() == Shape<4>{1, 2, 1, 3});
  const auto m = Tensor<2>::from({1, 2, 3, 4}, {2, 2});
  CHECK(ch::tile(m, std::array<Index, 2>{1, 2}).to_vector() == std::vector<double>{1, 2, 1, 2, 3, 4, 3, 4});
  CHECK(ch::repeat(m, std::array<Index, 2>{2, 1}).to_vector() == std::vector<double>{1, 2, 3, 4, 1, 2, 3, 4});
  CHECK(ch::repeat(m, std::array<Index, 2>{0, 1}).numel() == 0);
  CHECK(ch::flip(m, 1).to_vector() == std::vector<double>{2, 1, 4, 3});
  CHECK(ch::roll(ch::arange(4), 1, 0).to_vector() == std::vector<Index>{3, 0, 1, 2});
  CHECK(message_of<ch::ShapeError>([&] { ch::squeeze(x, 0); }) ==
        "squeeze: expected size 1 of axis 0, got shape [2, 1, 3]");
  CHECK(message_of<ch::UsageError>([&] {
          ch::repeat(m, std::array<Index, 2>{1, -2});
        }) == "repeat: expected numbers of at least 0, got [1, -2]");
}

TEST_CASE("gradients of parts and products of vectors and matrices") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  check_operator([](const auto& a) { return ch::tril(a, 1); }, x);
  check_operator([](const auto& a) { return ch::triu(a, -1); }, x);
  check_operator([](const auto& a) { return ch::diag(a, -1); }, numbers<1>({3}, 2));
  check_operator([](const auto& a) { return ch::diag(a, 1); }, numbers<2>({3, 4}, 2));
  const auto u = numbers<1>({3}, 3), v = numbers<1>({3}, 4);
  check_operator([](const auto& a, const auto& b) { return ch::outer(a, b); }, u, numbers<1>({2}, 5));
  check_operator([](const auto& a, const auto& b) { return ch::dot(a, b); }, u, v);
  check_operator([](const auto& a, const auto& b) { return ch::cross(a, b, 0); }, numbers<2>({3, 2}, 1),
                 numbers<2>({3, 1}, 2));
  CHECK(ch::tril(Tensor<2>::from({1, NAN, 3, 4}, {2, 2})).to_vector() == std::vector<double>{1, 0, 3, 4});
  CHECK(ch::diag(Tensor<1>::from({1, 2}, {2}), 1).to_vector() == std::vector<double>{0, 1, 0, 0, 0, 2, 0, 0, 0});
  CHECK(ch::cross(Tensor<1>::from({1, 0, 0}, {3}), Tensor<1>::from({0, 1, 0}, {3})).to_vector() ==
        std::vector<double>{0, 0, 1});
  CHECK(message_of<ch::ShapeError>([&] { ch::dot(u, Tensor<1>::zeros({2})); }) ==
        "dot: expected vectors of one size, got shapes [3] and [2]");
  CHECK(message_of<ch::ShapeError>([&] { ch::cross(u, Tensor<1>::zeros({1})); }) ==
        "cross: expected size 3 of axis -1, got shapes [3] and [1]");
}

TEST_CASE("places and counts") {
  const auto different = ch::unique(Tensor<2>::from({3, 1, 3, 2}, {2, 2}));
  CHECK(different.values.to_vector() == std::vector<double>{1, 2, 3});
  CHECK(different.inverse.to_vector() == std::vector<Index>{2, 0, 2, 1});
  CHECK(different.counts.to_vector() == std::vector<Index>{1, 1, 2});
  CHECK(ch::unique(Tensor<1>::from({NAN, 1, NAN}, {3})).counts.to_vector() == std::vector<Index>{1, 1, 1});
  CHECK(ch::unique(Tensor<2>::empty({0, 2})).values.numel() == 0);
  CHECK(ch::unique(Tensor<1>::from({0.0, -0.0, -1}, {3})).inverse.to_vector() == std::vector<Index>{1, 1, 0});
  const auto large = ch::Tensor<std::uint64_t, 1>::from({1ull << 63, 3, ~0ull, 3}, {4});
  CHECK(ch::unique(large).values.to_vector() == std::vector<std::uint64_t>{3, 1ull << 63, ~0ull});
  const auto narrow = ch::to<ch::bf16>(Tensor<1>::from({2, -1, 2}, {3}));
  CHECK(ch::to<double>(ch::unique(narrow).values).to_vector() == std::vector<double>{-1, 2});
  const auto sorted = Tensor<1>::from({1, 2, 2, 4}, {4}), wanted = Tensor<1>::from({2, 5, 0, NAN}, {4});
  CHECK(ch::searchsorted(sorted, wanted).to_vector() == std::vector<Index>{1, 4, 0, 4});
  CHECK(ch::searchsorted(sorted, wanted, true).to_vector() == std::vector<Index>{3, 4, 0, 4});
  CHECK(message_of<ch::UsageError>([&] { ch::searchsorted(wanted, sorted); }) ==
        "searchsorted: expected numbers in ascending order, got a smaller one at index 2");
  CHECK(ch::bincount(Integers::from({1, 3, 1}, {3}), 5).to_vector() == std::vector<Index>{0, 2, 0, 1, 0});
  CHECK(message_of<ch::UsageError>([] { ch::bincount(Integers::from({-1}, {1})); }) ==
        "bincount: expected numbers of at least 0, got -1");
  const auto h = ch::histogram(Tensor<1>::from({0, 0.5, 1, 2, 9, NAN}, {6}), 2, 0, 2);
  CHECK(h.counts.to_vector() == std::vector<Index>{2, 2});
  CHECK(h.edges.to_vector() == std::vector<double>{0, 1, 2});
  CHECK(ch::histogram(sorted, 3).counts.to_vector() == std::vector<Index>{1, 2, 1});
  CHECK(message_of<ch::UsageError>([&] { ch::histogram(wanted, 3); }) ==
        "histogram: expected finite numbers, or limits, got nan");
  CHECK_THROWS_AS(ch::histogram(sorted, 0), ch::UsageError);
  CHECK_THROWS_AS(ch::histogram(sorted, 2, 2, 1), ch::UsageError);
}

TEST_CASE("gradients of logaddexp, nan_to_num and cdist") {
  const auto a = numbers<2>({3, 4}, 1), b = numbers<2>({2, 4}, 2);
  check_operator([](const auto& x, const auto& y) { return ch::logaddexp(x, y); }, a, numbers<1>({4}, 3));
  check_operator([](const auto& x, const auto& y) { return ch::cdist(x, y); }, a, b);
  check_operator([](const auto& x, const auto& y) { return ch::cdist(x, y, 1); }, a, b);
  CHECK(ch::logaddexp(Tensor<1>::from({1000, -inf, inf}, {3}), Tensor<1>::from({-1000, -inf, 1}, {3})).to_vector() ==
        std::vector<double>{1000, -inf, inf});
  const Variable<1> odd(Tensor<1>::from({NAN, inf, -inf, 2}, {4}), true);
  const auto y = ch::nan_to_num(odd, 7, {}, -3);
  CHECK(y.value().to_vector() == std::vector<double>{7, std::numeric_limits<double>::max(), -3, 2});
  y.backward(Tensor<1>::ones({4}));
  CHECK(odd.grad().to_vector() == std::vector<double>{0, 0, 0, 1});
  CHECK(message_of<ch::ShapeError>([&] {
          ch::cdist(a, Tensor<2>::zeros({2, 3}));
        }) == "cdist: expected equal last sizes, got shapes [3, 4] and [2, 3]");
}

TEST_CASE("arithmetic in place: views see it, and what backward has saved counts as written") {
  const auto x = Tensor<2>::from({1, 2, 3, 4}, {2, 2});
  x += Tensor<1>::from({10, 20}, {2});
  CHECK(x.to_vector() == std::vector<double>{11, 22, 13, 24});
  x[1] *= 2;
  x.transpose(0, 1).select(0, 0) -= Tensor<1>::from({1, 2}, {2});
  CHECK(x.to_vector() == std::vector<double>{10, 22, 24, 48});
  x /= 2;
  x += x.transpose(0, 1);  // reads the memory that it writes
  CHECK(x.to_vector() == std::vector<double>{10, 23, 23, 48});
  x -= Tensor<2>(x);
  CHECK(x.to_vector() == std::vector<double>{0, 0, 0, 0});
  const auto whole = Integers::from({1, 2}, {2});
  (whole += 3) *= whole;
  whole -= 1;
  CHECK(whole.to_vector() == std::vector<Index>{15, 24});
  CHECK(message_of<ch::ShapeError>([&] { x += Tensor<1>::zeros({3}); }) ==
        "add_: shapes [2, 2] and [3] do not broadcast");
  CHECK(message_of<ch::ShapeError>([&] {
          x[0].view(Shape<2>{1, 2}) *= x;
        }) == "mul_: expected an operand that broadcasts to shape [1, 2], got shape [2, 2]");
  CHECK(message_of<ch::UsageError>([&] { Tensor<1>::zeros({1}).expand(Shape<1>{3}) += 1; }) ==
        "add_: expected a tensor with memory for each element, got an expanded one of shape [3]");

  const auto numbers_before = Tensor<1>::from({1, 2}, {2});
  const Variable<1> leaf(numbers_before, true);
  const auto squares = leaf * leaf, soft = ch::softmax(leaf, 0), more = leaf + 1;
  numbers_before *= 2;
  CHECK(message_of<ch::UsageError>([&] {
          squares.backward(Tensor<1>::ones({2}));
        }).starts_with("backward of 'mul': it needs a tensor of shape [2] as it was in the forward pass"));
  more.backward(Tensor<1>::ones({2}));  // needs no saved values
  soft.value() += 1;                    // its backward reads its own result
  CHECK_THROWS_AS(soft.backward(Tensor<1>::ones({2})), ch::UsageError);

  const ch::Parameter<double, 1> weight(Tensor<1>::from({1, 2}, {2}));
  const auto product = ch::sum(weight * weight, 0);
  weight.value() -= 0.5 * weight.value();
  CHECK(ch::value_of(weight).to_vector() == std::vector<double>{0.5, 1});
  CHECK_THROWS_AS(product.backward(), ch::UsageError);
}

}  // namespace functions_test
