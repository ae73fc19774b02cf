#include <chorus/core/threads.hpp>
#include <chorus/ops/attention.hpp>

#include "check_operator.hpp"

namespace attention_test {

// Sizes that are not multiples of the block size 64.
constexpr Index queries = 70, keys = 131;

/// The reference: operations that store all scores.
template <class Mask>
auto reference(const Variable<4>& q, const Variable<4>& k, const Variable<4>& v, const Mask& mask, double p) {
  const auto scores = ch::matmul(q, ch::transpose(k, -2, -1)) * (1 / std::sqrt(static_cast<double>(q.size(-1)))) + mask;
  return ch::matmul(ch::dropout(ch::softmax(scores, -1), p, p > 0), v);
}

double difference(const auto& a, const auto& b) {
  const auto x = values(a), y = values(b);
  double worst = x.size() == y.size() ? 0 : 1e9;
  for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(x[i] - y[i]));
  return worst;
}

/// Compares `attention(q, k, v)` and its gradients with the reference.
template <class Attention, class Mask>
void compare(const Attention& attention, const Mask& mask, double p = 0) {
  const auto leaf = [](const ch::Shape<4>& shape, std::uint32_t seed) {
    return Variable<4>(numbers<4>(shape, seed), true);
  };
  const auto run = [&](const auto& function) {
    ch::RandomContext random{.seed = 5, .step = 3, .next_operation = 0, .first_sample = [] { return 11; }};
    const ch::RandomScope scope(random);
    const auto q = leaf({2, 3, queries, 5}, 1), k = leaf({2, 3, keys, 5}, 2), v = leaf({2, 3, keys, 4}, 3);
    const auto y = function(q, k, v);
    y.backward(numbers<4>({2, 3, queries, 4}, 4));
    return std::array{y.value(), q.grad(), k.grad(), v.grad()};
  };
  const auto got = run(attention);
  const auto expected = run([&](const auto& q, const auto& k, const auto& v) { return reference(q, k, v, mask, p); });
  for (std::size_t i = 0; i < 4; ++i) CHECK(difference(got[i], expected[i]) < 1e-12);
}

ch::Tensor<double, 2> causal_mask() {
  auto mask = ch::Tensor<double, 2>::zeros({queries, keys});
  for (Index i = 0; i < queries; ++i)
    for (Index j = i + 1; j < keys; ++j) mask(i, j) = -INFINITY;
  return mask;
}

TEST_CASE("attention by blocks is what its definition says") {
  const auto none = ch::Tensor<double, 2>::zeros({1, 1});
  compare([](const auto&... in) { return ch::scaled_dot_product_attention(in...); }, none);
  compare([](const auto&... in) { return ch::scaled_dot_product_attention(in..., true); }, causal_mask());
  for (const bool causal : {false, true}) {
    const auto mask = causal ? causal_mask() : none;
    compare(
        [&](const auto&... in) { return ch::scaled_dot_product_attention(in..., {.causal = causal, .dropout = 0.3}); },
        mask, 0.3);
  }
}

TEST_CASE("attention by blocks with masks, for all matrices and for each") {
  const auto one = numbers<2>({queries, keys}, 7);
  compare([&](const auto&... in) { return ch::scaled_dot_product_attention(in..., one); }, one);
  const auto each = numbers<4>({2, 1, queries, keys}, 8);
  compare([&](const auto&... in) { return ch::scaled_dot_product_attention(in..., each); }, each);
  auto seen = ch::Tensor<bool, 2>::empty({queries, keys});
  auto added = ch::Tensor<double, 2>::zeros({queries, keys});
  for (Index i = 0; i < seen.numel(); ++i) {
    seen.data()[i] = i % 7 < 3;
    added.data()[i] = seen.data()[i] ? 0 : -INFINITY;
  }
  compare([&](const auto&... in) { return ch::scaled_dot_product_attention(in..., seen); }, added);
}

TEST_CASE("gradients of attention with dropout") {
  ch::RandomContext random{.seed = 3, .first_sample = {}};
  check_operator(
      [&](const auto&... in) {
        random.next_operation = 0;
        const ch::RandomScope scope(random);
        return ch::scaled_dot_product_attention(in..., {.causal = true, .dropout = 0.4});
      },
      numbers<3>({2, 5, 3}, 1), numbers<3>({2, 5, 3}, 2), numbers<3>({2, 5, 2}, 3));
}

TEST_CASE("a query that sees no key gives zeros, and no gradient: with any mask, by blocks and as a whole") {
  // The first four queries see no key.
  auto seen = ch::Tensor<bool, 2>::full({queries, keys}, true);
  auto added = Tensor<2>::zeros({queries, keys});
  for (Index i = 0; i < 4; ++i)
    for (Index j = 0; j < keys; ++j) {
      seen(i, j) = false;
      added(i, j) = -INFINITY;
    }
  const auto k = numbers<3>({2, keys, 4}, 2), v = numbers<3>({2, keys, 3}, 3);
  const auto check = [&](const auto& attend) {
    const Variable<3> q(numbers<3>({2, queries, 4}, 1), true), keyed(k, true), valued(v, true);
    const auto y = attend(q, keyed, valued);
    const auto all = values(y.value());
    CHECK(std::all_of(all.begin(), all.end(), [](double value) { return std::isfinite(value); }));
    CHECK((y.value()(0, 3, 0) == 0 && y.value()(1, 0, 2) == 0 && y.value()(1, 4, 0) != 0));
    // The other results and gradients are those of attention without these queries.
    y.backward(numbers<3>({2, queries, 3}, 4));
    const Variable<3> rest(q.value().slice(1, 4, queries), true), keys_of_rest(k, true), values_of_rest(v, true);
    ch::scaled_dot_product_attention(rest, keys_of_rest, values_of_rest)
        .backward(ch::contiguous(numbers<3>({2, queries, 3}, 4).slice(1, 4, queries)));
    CHECK(distance(values(keyed.grad()), values(keys_of_rest.grad())) < 1e-12);
    CHECK(distance(values(valued.grad()), values(values_of_rest.grad())) < 1e-12);
    CHECK(distance(values(q.grad().slice(1, 4, queries)), values(rest.grad())) < 1e-12);
    CHECK(values(q.grad().slice(1, 0, 4)) == std::vector<double>(2 * 4 * 4, 0.0));
  };
  check([&](const auto&... in) { return ch::scaled_dot_product_attention(in..., seen); });
  check([&](const auto&... in) { return ch::scaled_dot_product_attention(in..., added); });
  check([&](const auto&... in) {
    return ch::detail::unblocked_attention(in..., [&](const auto& scores) { return scores + added; }, {});
  });
}

TEST_CASE("a query that sees no key gives zeros in bf16") {
  auto seen = ch::Tensor<bool, 2>::full({2, 3}, true);
  for (Index j = 0; j < 3; ++j) seen(1, j) = false;
  const ch::Variable<ch::bf16, 2> x(ch::to<ch::bf16>(numbers<2>({3, 4}, 1)), true);
  const auto y = ch::scaled_dot_product_attention(ch::slice(x, 0, 0, 2), x, x, seen);
  CHECK(static_cast<float>(y.value()(1, 0)) == 0);
  y.backward(ch::to<ch::bf16>(Tensor<2>::ones({2, 4})));
  for (const auto g : x.grad().to_vector()) CHECK(std::isfinite(static_cast<float>(g)));
}

TEST_CASE("the memory of attention grows with the length, not with its square") {
  // Uses a separate device each, since a device's peak is never reset.
  const auto peak = [](Index length, int device) {
    const auto q = ch::Tensor<double, 3>::ones({1, length, 8}, ch::Cpu{device});
    const Variable<3> x(q, true);
    ch::scaled_dot_product_attention(x, x, x, true).backward(q);
    return static_cast<double>(ch::trace::memory(device).peak);
  };
  const double small = peak(512, 11), large = peak(2048, 12);
  CHECK(large < 4.2 * small);
  CHECK(large < 2048 * 2048 * 8 / 4.0);
}

TEST_CASE("attention gives the same bits on any number of threads") {
  const auto run = [](int threads) {
    ch::set_num_threads(threads);
    const Variable<4> x(numbers<4>({2, 2, 150, 8}, 1), true);
    const auto y = ch::scaled_dot_product_attention(x, x, x, true);
    y.backward(numbers<4>({2, 2, 150, 8}, 2));
    ch::set_num_threads(1);
    return std::pair(values(y.value()), values(x.grad()));
  };
  CHECK(run(2) == run(1));
  CHECK(run(3) == run(1));
}

TEST_CASE("messages of attention") {
  const auto q = numbers<3>({2, 4, 3}, 1), k = numbers<3>({2, 5, 3}, 2), v = numbers<3>({2, 6, 3}, 3);
  CHECK(message_of<ch::ShapeError>([&] { ch::scaled_dot_product_attention(q, k, v); }) ==
        "scaled_dot_product_attention: queries of shape [2, 4, 3], keys of shape [2, 5, 3] and values of shape [2, 6, "
        "3] do "
        "not fit");
  CHECK(message_of<ch::UsageError>([&] { ch::scaled_dot_product_attention(q, q, q, {.dropout = 1}); }) ==
        "scaled_dot_product_attention: expected a dropout probability in [0, 1), got 1");
  CHECK_THROWS_AS(ch::scaled_dot_product_attention(q, k, k, numbers<2>({4, 4}, 1)), ch::ShapeError);
}

}  // namespace attention_test
