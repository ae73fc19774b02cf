#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/gumbel_softmax.hpp>
#include <chorus/ops/images.hpp>
#include <chorus/ops/lists.hpp>
#include <chorus/ops/order_statistics.hpp>
#include <chorus/ops/reduction_axes.hpp>
#include <chorus/ops/rounding.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/special_functions.hpp>
#include <chorus/ops/truth.hpp>
#include <vector>

#include "check_operator.hpp"

namespace further_test {

constexpr double inf = INFINITY;

template <class X>
std::vector<X> list(const X& a, const X& b) {
  return {a, b, a};
}
Tensor<1> row(std::initializer_list<double> numbers) {
  return Tensor<1>::from(numbers, {static_cast<Index>(numbers.size())});
}

TEST_CASE("gradients of lists that are joined in one pass") {
  const auto x = numbers<3>({2, 3, 4}, 1), y = numbers<3>({2, 3, 4}, 2);
  for (const Index axis : {0, 1, -1}) {
    check_operator([=](const auto& a, const auto& b) { return ch::concat(axis, list(a, b)); }, x, y);
    check_operator([=](const auto& a, const auto& b) { return ch::stack(axis, list(a, b)); }, x, y);
  }
  CHECK(values(ch::concat(1, list(x, y))) == values(ch::concat(1, x, y, x)));
  CHECK(values(ch::stack(1, list(x, y))) == values(ch::stack(1, x, y, x)));
  check_operator(
      [](const auto& a, const auto& b) {
        return ch::concat(1, std::vector{a, ch::slice(b, 1, 0, 1)});
      },
      x, y);
  check_operator([](const auto& a) { return ch::stack(0, std::vector{a, a}); }, numbers<0>({}, 1));

  // A list may mix what needs a gradient and what needs none; an undifferentiated one records nothing.
  std::vector parts{Variable<1>(row({1, 2})), Variable<1>(row({3}), true)};
  const auto all = ch::concat(0, parts);
  all.backward(row({5, 6, 7}));
  CHECK(parts[1].grad().to_vector() == std::vector<double>{7});
  CHECK(message_of<ch::UsageError>([&] {
          all.backward(row({5, 6, 7}));
        }) ==
        "backward: the graph behind 'concat' was freed by an earlier backward; pass retain_graph = true to that one");
  parts.pop_back();
  CHECK_FALSE(ch::concat(0, parts).requires_grad());
  const ch::Parameter<double, 1> weight(row({4, 5}));
  CHECK(ch::stack(0, std::vector{weight, weight}).value().to_vector() == std::vector<double>{4, 5, 4, 5});

  CHECK(message_of<ch::UsageError>([] { ch::stack(0, std::vector<Tensor<1>>()); }) ==
        "stack: expected at least one tensor, got none");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::concat(0, std::vector{x, numbers<3>({2, 5, 4}, 1)});
        }) == "concat: shapes [2, 3, 4] and [2, 5, 4] differ outside of axis 0");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::stack(0, std::vector{row({1}), row({1, 2})});
        }) == "stack: expected tensors of one shape, got [1] and [2]");
  CHECK_THROWS_AS(ch::concat(0, std::vector{row({1}), Tensor<1>::zeros({1}, ch::Cpu{1})}), ch::DeviceError);
}

TEST_CASE("a thousand steps are joined by one node, and their gradients arrive") {
  const Variable<1> x(numbers<1>({3}, 1), true);
  std::vector<Variable<1>> steps;
  for (int i = 0; i < 1000; ++i) steps.push_back(x * i);
  const auto all = ch::stack(0, steps);
  CHECK(all.shape() == Shape<2>{1000, 3});
  all.backward(Tensor<2>::ones({1000, 3}));
  CHECK(x.grad().to_vector() == std::vector<double>(3, 499500));
}

TEST_CASE("what split, chunk and unbind cut fits together again") {
  const auto x = numbers<3>({2, 7, 4}, 1);
  const auto again = [](const auto& parts) { return ch::concat(1, parts); };
  check_operator([&](const auto& a) { return again(ch::split(a, 3, 1)); }, x);
  check_operator([&](const auto& a) { return again(ch::split(a, std::vector<Index>{0, 5, 2}, 1)); }, x);
  check_operator([&](const auto& a) { return again(ch::chunk(a, 3, -2)); }, x);
  check_operator([](const auto& a) { return ch::stack(1, ch::unbind(a, 1)); }, x);
  check_operator([](const auto& a) { return ch::unbind(a)[1] * ch::split(a, 1)[0]; }, x);
  CHECK(ch::split(x, 3, 1).back().shape() == Shape<3>{2, 1, 4});
  CHECK(ch::chunk(x, 4, 1).size() == 4);
  CHECK(ch::chunk(x, 5, 1).size() == 4);  // as in PyTorch: of 2, 2, 2 and 1
  CHECK(message_of<ch::ShapeError>([&] {
          ch::split(x, std::vector<Index>{3, 3}, 1);
        }) == "split: expected sizes with the sum 7, that of axis 1 of shape [2, 7, 4], got 6");
  CHECK_THROWS_AS(ch::split(x, 0), ch::UsageError);
  CHECK_THROWS_AS(ch::chunk(x, 0), ch::UsageError);
}

TEST_CASE("a grid of coordinates") {
  const auto [y, x] = ch::meshgrid(row({1, 2}), row({3, 4, 5}));
  CHECK(y.to_vector() == std::vector<double>{1, 1, 1, 2, 2, 2});
  CHECK(x.to_vector() == std::vector<double>{3, 4, 5, 3, 4, 5});
  check_operator(
      [](const auto& a, const auto& b) {
        const auto [p, q] = ch::meshgrid(a, b);
        return p * q;
      },
      row({1, 2}), row({3, 4, 5}));
}

TEST_CASE("rounding, also of what has no fractions") {
  const auto x = row({-2.5, -1.5, -0.5, -0.0, 0.4, 0.5, 2.5, 3.7, 1e300, -inf, inf});
  CHECK(ch::round(x).to_vector() == std::vector<double>{-2, -2, -0.0, -0.0, 0, 0, 2, 4, 1e300, -inf, inf});
  CHECK(ch::floor(x).to_vector() == std::vector<double>{-3, -2, -1, -0.0, 0, 0, 2, 3, 1e300, -inf, inf});
  CHECK(ch::ceil(x).to_vector() == std::vector<double>{-2, -1, -0.0, -0.0, 1, 1, 3, 4, 1e300, -inf, inf});
  CHECK(ch::sign(x).to_vector() == std::vector<double>{-1, -1, -1, 0, 1, 1, 1, 1, 1, -1, 1});
  CHECK(ch::all(ch::isnan(ch::round(row({NAN, NAN}))) & (ch::sign(row({NAN, NAN})) == 0)).item());
  const auto whole = ch::Tensor<float, 1>::from({16777217.0f, 8388607.5f, 0.49999997f, -8388609.0f}, {4});
  CHECK(ch::round(whole).to_vector() == std::vector<float>{16777217.0f, 8388608.0f, 0, -8388609.0f});
  check_operator([](const auto& a) { return ch::floor(a) + ch::ceil(a) + ch::round(a) + ch::sign(a); },
                 numbers<1>({9}, 1));
}

TEST_CASE("gradients of angles and of the gamma function") {
  check_operator([](const auto& y, const auto& x) { return ch::atan2(y, x); }, numbers<2>({3, 4}, 1),
                 numbers<1>({4}, 2));
  for (const double low : {0.1, -0.95, -1.9, 20.0}) {
    const auto x = numbers<1>({11}, 3, low, low + 0.85);
    check_operator([](const auto& a) { return ch::lgamma(a); }, x);
    check_operator([](const auto& a) { return ch::digamma(a) / 10; }, x);
  }
}

TEST_CASE("gradients of products, also where there are zeros") {
  check_operator([](const auto& a) { return ch::prod(a, 1); }, numbers<3>({2, 4, 3}, 1));
  check_operator([](const auto& a) { return ch::prod(a); }, row({2, 0, 3}));
  check_operator([](const auto& a) { return ch::prod(a, -1); }, Tensor<2>::from({2, 0, 0, 4, 1, 2}, {2, 3}));
  CHECK(ch::prod(Tensor<2>::empty({2, 0}), 1).to_vector() == std::vector<double>{1, 1});
}

TEST_CASE("medians and quantiles") {
  const auto x = numbers<3>({2, 5, 4}, 1);
  check_operator([](const auto& a) { return ch::median(a, 1).values; }, x);
  check_operator([](const auto& a) { return ch::median(a); }, x);
  for (const auto between : {ch::Interpolation::linear, ch::Interpolation::lower, ch::Interpolation::higher,
                             ch::Interpolation::nearest, ch::Interpolation::midpoint})
    check_operator([=](const auto& a) { return ch::quantile(a, 0.3, -1, between); }, x);
  check_operator([](const auto& a) { return ch::quantile(a, 1); }, x);
  const auto middle = ch::median(Tensor<2>::from({3, 1, 2, 0, NAN, 1, 2, 3}, {2, 4}), 1);
  CHECK(middle.values.to_vector()[0] == 1);
  CHECK(std::isnan(middle.values.to_vector()[1]));
  CHECK(middle.indices.to_vector() == std::vector<Index>{1, 0});
  CHECK(std::isnan(ch::quantile(row({1, NAN, 2}), 0).item()));
  CHECK(std::isnan(ch::median(row({1, NAN, 2})).item()));
  CHECK(ch::quantile(row({1, inf}), 0).item() == 1);
  const Variable<1> equal(row({2, 1, 2, 3, 2}), true);
  ch::median(equal).backward();
  CHECK(equal.grad().to_vector() == std::vector<double>{1. / 3, 0, 1. / 3, 0, 1. / 3});
  CHECK(message_of<ch::UsageError>([&] { ch::quantile(x, 1.5); }) == "quantile: expected a number in [0, 1], got 1.5");
  CHECK(message_of<ch::ShapeError>([] {
          ch::median(Tensor<2>::empty({2, 0}), 1);
        }) == "median: axis 1 of shape [2, 0] has no elements");
}

TEST_CASE("gradients of index_add and of scattered reductions") {
  using How = ch::ScatterReduction;
  const auto x = numbers<2>({3, 4}, 1), source = numbers<2>({2, 4}, 2);
  const auto rows = ch::Tensor<std::int64_t, 1>::from({2, 2}, {2});
  check_operator([&](const auto& a, const auto& s) { return ch::index_add(a, 0, rows, s); }, x, source);
  CHECK(message_of<ch::ShapeError>([&] { ch::index_add(x, 1, rows, source); }) ==
        "index_add: expected a source of shape [3, 2] for 2 indices and an input of shape [3, 4], got [2, 4]");
  CHECK(message_of<ch::UsageError>([&] {
          ch::index_add(x, 0, ch::Tensor<std::int64_t, 1>::full({2}, 3), source);
        }) == "index_add: index 3 is not in [0, 3)");

  const auto index = ch::Tensor<std::int64_t, 2>::from({0, 2, 1, 1, 0, 1, 1, 2}, {2, 4});
  for (const auto how : {How::sum, How::prod, How::mean, How::amax, How::amin})
    for (const bool self : {true, false})
      check_operator([&](const auto& a, const auto& s) { return ch::scatter_reduce(a, 0, index, s, how, self); }, x,
                     source);
  // Zeros among the factors; equal extremes.
  const auto to_first = ch::Tensor<std::int64_t, 1>::from({0, 0}, {2});
  const auto gradient_of = [&](How how, const Tensor<1>& of, const Tensor<1>& from) {
    const Variable<1> a(of, true), s(from, true);
    ch::scatter_reduce(a, 0, to_first, s, how).backward(Tensor<1>::ones({1}));
    return std::pair{a.grad().to_vector()[0], s.grad().to_vector()};
  };
  CHECK(gradient_of(How::prod, row({2}), row({0, 3})) == std::pair{0.0, std::vector<double>{6, 0}});
  CHECK(gradient_of(How::prod, row({2}), row({0, 0})) == std::pair{0.0, std::vector<double>{0, 0}});
  CHECK(gradient_of(How::amax, row({3}), row({3, 1})) == std::pair{0.5, std::vector<double>{0.5, 0}});
  CHECK(std::isnan(ch::scatter_reduce(row({3}), 0, to_first, row({NAN, 1}), How::amin).item()));
  const Tensor<1> written = row({1, 2});
  const Variable<1> leaf(row({3}), true);
  const auto late = ch::scatter_reduce(leaf, 0, to_first, written, How::prod);
  written += 1;
  CHECK_THROWS_AS(late.backward(Tensor<1>::ones({1})), ch::UsageError);
}

TEST_CASE("gradients of sampled images") {
  const auto x = numbers<4>({2, 3, 4, 5}, 1), grid = numbers<4>({2, 3, 2, 2}, 4, -1.4, 1.4);
  for (const auto padding : {ch::SamplePadding::zeros, ch::SamplePadding::border, ch::SamplePadding::reflection})
    for (const bool corners : {false, true})
      check_operator(
          [&](const auto& a, const auto& g) {
            return ch::grid_sample(a, g, {.padding = padding, .align_corners = corners});
          },
          x, grid);
  check_operator([&](const auto& a) { return ch::grid_sample(a, grid, {.mode = ch::SampleMode::nearest}); }, x);
  // What lies outside counts as 0, whatever the border's pixels are, and NaN points nowhere.
  const auto spoilt = Tensor<4>::full({1, 1, 2, 2}, inf);
  CHECK(ch::grid_sample(spoilt, Tensor<4>::full({1, 1, 1, 2}, 9)).item() == 0);
  CHECK(std::isnan(ch::grid_sample(x, Tensor<4>::full({2, 1, 1, 2}, NAN)).to_vector()[0]));
  CHECK(message_of<ch::ShapeError>([&] {
          ch::grid_sample(x, numbers<4>({1, 3, 2, 2}, 1));
        }) == "grid_sample: expected a grid [2, out_h, out_w, 2] for images of shape [2, 3, 4, 5], got [1, 3, 2, 2]");
}

TEST_CASE("gradients of windows and shuffled pixels") {
  const auto x = numbers<4>({2, 4, 4, 5}, 1);
  check_operator(
      [](const auto& a) {
        return ch::unfold(a, {2, 3}, {.dilation = {1, 2}, .padding = 1, .stride = 2});
      },
      x);
  check_operator([](const auto& a) { return ch::pixel_shuffle(a, 2); }, x);
  check_operator([](const auto& a) { return ch::max_pool1d(a, 3, {.stride = 2, .padding = 1}); },
                 numbers<3>({2, 3, 7}, 1));
  CHECK(ch::max_pool1d(numbers<3>({1, 1, 7}, 1), 2).shape() == Shape<3>{1, 1, 3});
  CHECK(message_of<ch::ShapeError>([&] {
          ch::unfold(x, {5, 1});
        }) == "unfold: a window of 5 x 1 does not fit an input of shape [2, 4, 4, 5]");
  CHECK(message_of<ch::ShapeError>([&] { ch::pixel_shuffle(x, 3); }) ==
        "pixel_shuffle: expected channels that are a multiple of 9, got shape [2, 4, 4, 5]");
}

TEST_CASE("samples of categories: soft, hard, with the frequencies of their logits") {
  const auto logits = ch::log(ch::expand(row({1, 2, 5}), {4000, 3}));
  const auto hard = ch::gumbel_softmax(logits, 0.5, true);
  CHECK(ch::allclose(ch::sum(hard, 1), Tensor<1>::ones({4000})));
  const auto share = ch::mean(hard, 0).to_vector();
  CHECK(std::abs(share[0] - 0.125) < 0.02);
  CHECK(std::abs(share[2] - 0.625) < 0.03);
  const Variable<2> leaf(logits, true);
  ch::sum(ch::gumbel_softmax(leaf, 1, true) * logits).backward();
  CHECK(ch::all(ch::isfinite(leaf.grad())).item());
  CHECK(ch::any(leaf.grad() != 0).item());
  CHECK_THROWS_AS(ch::gumbel_softmax(logits, 0), ch::UsageError);
}

TEST_CASE("allclose") {
  CHECK(ch::allclose(row({1, inf}), row({1 + 1e-6, inf})));
  CHECK_FALSE(ch::allclose(row({1, 2}), row({1, 2.1})));
  CHECK(ch::allclose(row({1, 2}), row({1, 2.1}), 0, 0.2));
  CHECK_FALSE(ch::allclose(row({NAN}), row({NAN})));
  CHECK(ch::allclose(row({NAN}), row({NAN}), 1e-5, 1e-8, true));
  CHECK_FALSE(ch::allclose(row({inf}), row({-inf})));
  CHECK(ch::allclose(Tensor<2>::ones({2, 3}), row({1})));
  CHECK_THROWS_AS(ch::allclose(row({1, 2}), row({1, 2, 3})), ch::ShapeError);
}

}  // namespace further_test
