#include <algorithm>
#include <catch.hpp>
#include <chorus/kernels/random_numbers.hpp>
#include <chorus/ops/random.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "../message_of.hpp"

namespace random_ops_test {

using namespace chorus;
using chorus::Tensor, chorus::Variable;
using Catch::Matchers::Contains;

double mean_of(const auto& x) {
  double sum = 0;
  for (const auto v : x) sum += static_cast<double>(v);
  return sum / static_cast<double>(x.size());
}
double variance_of(const auto& x) {
  const double mean = mean_of(x);
  double sum = 0;
  for (const auto v : x) sum += (static_cast<double>(v) - mean) * (static_cast<double>(v) - mean);
  return sum / static_cast<double>(x.size());
}

/// The pass of one of `devices` devices, with `samples` samples from index `first` on.
RandomContext pass(std::int64_t first, std::int64_t samples, int devices = 2) {
  RandomContext context{.seed = 5, .step = 3, .first_sample = [first] { return first; }, .samples = samples};
  context.devices = devices;
  return context;
}
/// The result of `draw` in that pass.
auto in(RandomContext context, const auto& draw) {
  const RandomScope scope(context);
  return draw();
}
auto whole(const auto& draw) { return in(pass(0, 0, 1), draw); }

TEMPLATE_TEST_CASE("rand and randn have the moments they should", "", float, double) {
  manual_seed(1);
  const auto u = rand<TestType, 2>({1000, 100}).to_vector(), n = randn<TestType, 2>({1000, 100}).to_vector();
  CHECK(mean_of(u) == Approx(0.5).margin(0.005));
  CHECK(variance_of(u) == Approx(1.0 / 12).margin(0.002));
  CHECK(*std::min_element(u.begin(), u.end()) >= 0);
  CHECK(*std::max_element(u.begin(), u.end()) < 1);
  int tenths[10] = {};
  for (const auto x : u) ++tenths[static_cast<int>(10 * x)];
  for (const int count : tenths) CHECK(count == Approx(10000).margin(400));
  CHECK(mean_of(n) == Approx(0).margin(0.015));
  CHECK(variance_of(n) == Approx(1).margin(0.02));
  CHECK(std::count_if(n.begin(), n.end(), [](auto x) { return std::abs(x) > 2; }) == Approx(4550).margin(300));
  // Rows differ, and neighbours are uncorrelated.
  double product = 0;
  for (std::size_t i = 100; i < n.size(); ++i) product += static_cast<double>(n[i]) * static_cast<double>(n[i - 100]);
  CHECK(std::abs(product / 99900) < 0.015);
  CHECK(std::set<TestType>(n.begin(), n.end()).size() > 99000);
}

TEMPLATE_TEST_CASE("rand and randn of 2 bytes", "", bf16, half) {
  manual_seed(1);
  const auto u = to<float>(rand<TestType, 1>({20000})).to_vector(),
             n = to<float>(randn<TestType, 1>({20000})).to_vector();
  CHECK(mean_of(u) == Approx(0.5).margin(0.01));
  CHECK(*std::max_element(u.begin(), u.end()) < 1);
  CHECK(mean_of(n) == Approx(0).margin(0.03));
  CHECK(variance_of(n) == Approx(1).margin(0.04));
}

TEST_CASE("random operations: a seed repeats all, each call draws others") {
  const auto all = [] {
    manual_seed(7);
    std::vector<double> out;
    const auto add = [&](const auto& x) {
      for (const auto v : x.to_vector()) out.push_back(static_cast<double>(v));
    };
    const auto half = Tensor<double, 1>::full({6}, 0.5);
    for (int i = 0; i < 2; ++i) {
      add(rand<double, 1>({6}));
      add(randn<double, 1>({6}));
      add(randint<std::int64_t, 1>(0, 1 << 30, {6}));
      add(rand_like(half));
      add(randn_like(half));
      add(normal(half, half));
      add(randperm(6));
      add(multinomial(half, 6, true));
    }
    return out;
  };
  const auto first = all();
  CHECK(first == all());
  for (std::size_t at = 0; at < first.size() / 2; at += 6) {
    const auto begin = first.begin() + static_cast<std::ptrdiff_t>(at),
               again = begin + static_cast<std::ptrdiff_t>(first.size() / 2);
    INFO(at / 6);
    CHECK_FALSE(std::equal(begin, begin + 6, again));
  }
}

TEST_CASE("randint: the numbers of a range, all alike likely") {
  manual_seed(2);
  int counts[7] = {};
  for (const auto x : randint<std::int64_t, 1>(-3, 4, {70000}).to_vector()) ++counts[x + 3];
  for (const int count : counts) CHECK(count == Approx(10000).margin(400));
  for (const auto x : randint<std::uint8_t, 1>(0, 256, {1000}).to_vector()) CHECK(x <= 255);
  const auto wide = randint<std::int64_t, 1>(std::numeric_limits<std::int64_t>::min(),
                                             std::numeric_limits<std::int64_t>::max(), {4000})
                        .to_vector();
  CHECK(std::count_if(wide.begin(), wide.end(), [](auto x) { return x > (std::int64_t{1} << 62); }) ==
        Approx(1000).margin(120));
  CHECK(kernels::upper_product(~std::uint64_t{0}, ~std::uint64_t{0}) == ~std::uint64_t{0} - 1);
  CHECK(kernels::upper_product(std::uint64_t{1} << 63, 10) == 5);
  CHECK_THROWS_AS((randint<std::int64_t, 1>(3, 3, {1})), UsageError);
  CHECK_THROWS_AS((randint<std::uint8_t, 1>(0, 257, {1})), UsageError);
  CHECK_THROWS_AS((randint<std::uint8_t, 1>(-1, 2, {1})), UsageError);
}

TEST_CASE("bernoulli: ones as often as the probabilities say") {
  manual_seed(3);
  const auto p = Tensor<float, 1>::from({0, 0.25f, 0.9f, 1}, {4});
  const auto ones = bernoulli(contiguous(p.expand(Shape<2>{20000, 4})));
  double counts[4] = {};
  for (Index i = 0; i < ones.numel(); ++i) counts[i % 4] += static_cast<double>(ones.data()[i]);
  CHECK(counts[0] == 0);
  CHECK(counts[1] == Approx(5000).margin(250));
  CHECK(counts[2] == Approx(18000).margin(200));
  CHECK(counts[3] == 20000);
  for (const float wrong : {-0.1f, 1.1f, NAN})
    CHECK_THROWS_AS(bernoulli(Tensor<float, 1>::full({2}, wrong)), UsageError);
}

TEST_CASE("normal: of means and deviations") {
  manual_seed(4);
  const auto mean = Tensor<double, 1>::full({40000}, 3), std = Tensor<double, 1>::full({40000}, 2);
  for (const auto& x : {normal(mean, std), normal(mean, 2.0), normal(3.0, std), normal<double, 1>(3, 2, {40000})}) {
    CHECK(mean_of(x.to_vector()) == Approx(3).margin(0.05));
    CHECK(variance_of(x.to_vector()) == Approx(4).margin(0.15));
  }
  CHECK_THROWS_AS(normal(mean, std.slice(0, 0, 4)), ShapeError);
  CHECK_THROWS_AS(normal(mean, -1.0), UsageError);
  CHECK_THROWS_AS(normal(0.0, Tensor<double, 1>::full({2}, NAN)), UsageError);
}

TEST_CASE("normal: gradients go through mean + std * randn_like(std), not through normal") {
  Variable mean(Tensor<double, 1>::zeros({3}), true), std(Tensor<double, 1>::ones({3}), true);
  static_assert(AnyTensor<decltype(normal(mean, std))>);
  manual_seed(4);
  const auto noise = randn_like(std);
  manual_seed(4);
  const auto x = mean + std * randn_like(std);
  CHECK(x.value().to_vector() == noise.to_vector());
  manual_seed(4);
  CHECK(normal(mean, std).to_vector() == noise.to_vector());
}

TEST_CASE("randperm: every number once, other orders alike likely") {
  manual_seed(5);
  int counts[6] = {};
  for (int i = 0; i < 6000; ++i) {
    const auto p = randperm(3).to_vector();
    CHECK(std::set(p.begin(), p.end()).size() == 3);
    ++counts[2 * p[0] + (p[1] > p[2] ? 1 : 0)];
  }
  for (const int count : counts) CHECK(count == Approx(1000).margin(130));
  CHECK(randperm(0).numel() == 0);
  CHECK(randperm<std::int32_t>(5).to_vector().size() == 5);
  CHECK_THROWS_AS(randperm(-1), UsageError);
}

TEST_CASE("multinomial: categories as often as their weights say") {
  manual_seed(6);
  const auto weights = Tensor<float, 2>::from({0, 1, 3, 0, 2, 2, 0, 0}, {2, 4});
  const auto drawn = multinomial(weights, 20000, true);
  int counts[8] = {};
  for (Index i = 0; i < drawn.numel(); ++i) ++counts[i / 20000 * 4 + drawn.data()[i]];
  const int expected[8] = {0, 5000, 15000, 0, 10000, 10000, 0, 0};
  for (int i = 0; i < 8; ++i) CHECK(counts[i] == Approx(expected[i]).margin(expected[i] == 0 ? 0 : 300));
  CHECK(multinomial(weights[0], 5, true).shape() == Shape<1>{5});

  // Without replacement: the first by its weight, the second by the remaining weights.
  int pairs[3][3] = {};
  const auto three = Tensor<double, 1>::from({1, 2, 3}, {3});
  for (int i = 0; i < 12000; ++i) {
    const auto p = multinomial(three, 2).to_vector();
    ++pairs[p[0]][p[1]];
  }
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) {
      const double probability = i == j ? 0 : (i + 1) / 6.0 * (j + 1) / (6.0 - (i + 1));
      CHECK(pairs[i][j] == Approx(12000 * probability).margin(i == j ? 0 : 220));
    }
}

TEST_CASE("multinomial: weights that are none") {
  const auto wrong = [](std::vector<double> weights, Index count = 1, bool replacement = true) {
    return message_of<UsageError>([&] {
      multinomial(Tensor<double, 1>::from(weights, {static_cast<Index>(weights.size())}), count, replacement);
    });
  };
  CHECK_THAT(wrong({1, -1}), Contains("got -1"));
  CHECK_THAT(wrong({1, NAN}), Contains("finite weights"));
  CHECK_THAT(wrong({1, INFINITY}), Contains("finite weights"));
  CHECK_THAT(wrong({0, 0}), Contains("sum above 0"));
  CHECK_THAT(wrong({1, 0, 1}, 3, false), Contains("expected 3 categories with a weight above 0, got 2"));
  CHECK_THAT(wrong({1}, 0), Contains("some samples"));
  CHECK_THAT(wrong({}), Contains("categories"));
}

TEST_CASE("random operations: samples' numbers don't depend on the device that has them") {
  const auto same = [](const auto& draw) {
    // draw(begin, end): for these rows of a batch of 7.
    const auto all = whole([&] { return draw(0, 7); });
    CHECK(in(pass(0, 4), [&] { return draw(0, 4); }).to_vector() == contiguous(all.slice(0, 0, 4)).to_vector());
    CHECK(in(pass(4, 3), [&] { return draw(4, 7); }).to_vector() == contiguous(all.slice(0, 4, 7)).to_vector());
  };
  same([](Index begin, Index end) { return rand<float, 2>({end - begin, 5}); });
  same([](Index begin, Index end) { return randn<double, 3>({end - begin, 2, 3}); });
  same([](Index begin, Index end) { return randint<std::int64_t, 1>(0, 1000, {end - begin}); });
  const auto x = whole([] { return rand<double, 2>({7, 3}); });
  same([&](Index begin, Index end) { return randn_like(x.slice(0, begin, end)); });
  same([&](Index begin, Index end) { return bernoulli(x.slice(0, begin, end)); });
  same([&](Index begin, Index end) { return normal(x.slice(0, begin, end), x.slice(0, begin, end)); });
  same([&](Index begin, Index end) { return multinomial(x.slice(0, begin, end), 2); });
  same([&](Index begin, Index end) { return multinomial(x.slice(0, begin, end), 4, true); });
  same([&](Index begin, Index end) { return multinomial(x[0], end - begin, true); });
}

TEST_CASE("random operations: what no sample has is the same on all devices") {
  const auto same = [](const auto& draw) {
    const auto all = whole(draw).to_vector();
    CHECK(in(pass(4, 3), draw).to_vector() == all);
    auto empty = pass(7, 0);  // a rank without samples
    empty.is_share = [](std::int64_t) { return true; };
    CHECK(in(empty, draw).to_vector() == all);
  };
  same([] { return randn<double, 2>({5, 2}); });
  same([] { return randn<double, 2>({6, 2}, Cpu{}, {.same_on_all = true}); });
  same([] { return randn<double, 0>({}); });
  same([] { return randperm(6); });
  const Parameter<double, 2, Cpu> weight(Tensor<double, 2>::ones({3, 2}));
  same([&] { return randn_like(weight); });
  same([&] { return bernoulli(weight * 0.5, {.same_on_all = true}); });
  same([] { return multinomial(Tensor<double, 1>::ones({6}), 4); });
}

TEST_CASE("random operations: what could be the samples' or not is refused on several devices") {
  const auto refused = [](RandomContext context, const auto& draw) {
    return message_of<UsageError>([&] { in(context, draw); });
  };
  const auto six = [] { return randn<double, 1>({6}); };
  CHECK_THAT(refused(pass(4, 3), six), Contains("a size of 6: these may be several rows") &&
                                           Contains("{.same_on_all = false} or {.same_on_all = true}"));
  CHECK(whole(six).numel() == 6);
  auto beside_four = pass(4, 3);
  beside_four.is_share = [](std::int64_t n) { return n == 3 || n == 4; };
  CHECK_THAT(refused(beside_four, [] { return randn<double, 1>({4}); }), Contains("another device has that many"));
  CHECK_THAT(refused(pass(4, 3), [] { return randn<double, 1>({4}, Cpu{}, {.same_on_all = false}); }),
             Contains("4 rows along axis 0 of the shape [4] do not belong to 3 samples"));
  CHECK_THAT(refused(pass(4, 3), [] { return randperm(3); }), Contains("an order on one device"));
  CHECK_THAT(refused(pass(4, 3), [] { return multinomial(Tensor<double, 1>::ones({6}), 3); }), Contains("distinct"));
  CHECK_THAT(refused(pass(4, 3), [] { return randn<double, 1>({3}, Cpu{}, {.axis = 1}); }), Contains("got axis 1"));
  // Several rows per sample; and an order per device.
  const auto rows = [](Index count) {
    return [count] { return randn<double, 1>({count}, Cpu{}, {.same_on_all = false}).to_vector(); };
  };
  const auto all = whole(rows(14));
  CHECK(in(pass(4, 3), rows(6)) == std::vector(all.begin() + 8, all.end()));
  const auto own = [] { return randperm(30, Cpu{}, {.same_on_all = false}).to_vector(); };
  CHECK(in(pass(0, 30), own) != in(pass(30, 30), own));
}

TEST_CASE("random operations: samples along another axis") {
  const auto along = [](std::int64_t first, std::int64_t samples, int devices) {
    auto context = pass(first, samples, devices);
    context.dim = 1;
    return context;
  };
  const auto steps = [](Index samples) { return [samples] { return randn<double, 3>({5, samples, 2}); }; };
  const auto all = in(along(0, 7, 1), steps(7));
  CHECK(in(along(4, 3, 2), steps(3)).to_vector() == contiguous(all.slice(1, 4, 7)).to_vector());
  // An explicit axis instead of the policy's `dim`.
  const auto named = [](Index samples) {
    return [samples] { return randn<double, 3>({5, samples, 2}, Cpu{}, {.axis = 1}); };
  };
  CHECK(in(pass(4, 3), named(3)).to_vector() == contiguous(whole(named(7)).slice(1, 4, 7)).to_vector());
  // Samples along the first axis; no axis of samples; ambiguous axes.
  const auto latent = [](Index samples) { return [samples] { return randn<double, 2>({samples, 2}); }; };
  CHECK(in(along(4, 3, 2), latent(3)).to_vector() ==
        contiguous(in(along(0, 7, 1), latent(7)).slice(0, 4, 7)).to_vector());
  const auto shared = [] { return randn<double, 2>({5, 2}); };
  CHECK(in(along(4, 3, 2), shared).to_vector() == in(along(0, 7, 1), shared).to_vector());
  CHECK_THAT(message_of<UsageError>([&] { in(along(4, 3, 2), [] {
                                            return randn<double, 2>({3, 3});
                                          }); }),
             Contains("two axes of the shape [3, 3]"));
}

TEST_CASE("random operations: outside of a pass a rank may draw rows of its own") {
  manual_seed(8);
  const auto all = randn<double, 2>({6, 3});
  manual_seed(8);
  CHECK(randn<double, 2>({2, 3}, Cpu{}, {.first_row = 4}).to_vector() == contiguous(all.slice(0, 4, 6)).to_vector());
}

TEST_CASE("random operations: on the device of the pass, or of the operand") {
  CHECK(randn<float, 1>({2}).device() == Cpu{0});
  auto context = pass(0, 2);
  context.device_slot = chorus::trace_slot(chorus::Cpu{1});
  CHECK(in(context, [] { return randn<float, 1>({2}); }).device() == Cpu{1});
  CHECK(in(context, [] { return randperm(3); }).device() == Cpu{1});
  CHECK(randn_like(Tensor<float, 1>::zeros({2}, Cpu{1})).device() == Cpu{1});
}

}  // namespace random_ops_test
