// Samples of distributions: moments, keys, borders, errors. Densities, entropies and divergences are golden cases.
#include <chorus/distributions.hpp>
#include <chorus/ops/truth.hpp>

#include "check_operator.hpp"

namespace distributions_test {

namespace d = ch::distributions;

Tensor<1> row(std::initializer_list<double> numbers) {
  return Tensor<1>::from(numbers, {static_cast<Index>(numbers.size())});
}
Tensor<1> many(double value) { return Tensor<1>::full({20000}, value); }

struct Moments {
  double mean, variance;
};
template <class X>
Moments moments(const X& x) {
  return {ch::mean(x).item(), ch::var(x, 0).item()};
}

TEST_CASE("samples have the mean and the variance of their distribution") {
  const auto normal = moments(d::Normal{many(2), many(0.5)}.sample());
  CHECK(std::abs(normal.mean - 2) < 0.02);
  CHECK(std::abs(normal.variance - 0.25) < 0.01);
  CHECK(std::abs(moments(d::Bernoulli{d::Probs{many(0.3)}}.sample()).mean - 0.3) < 0.02);
  for (const auto& [a, b] : {std::pair{2.0, 3.0}, {0.4, 0.7}, {30.0, 1.0}}) {
    const auto beta = moments(d::Beta{many(a), many(b)}.sample());
    CHECK(std::abs(beta.mean - a / (a + b)) < 0.015);
    CHECK(std::abs(beta.variance - a * b / ((a + b) * (a + b) * (a + b + 1))) < 0.01);
  }
  const auto rows = d::Categorical{d::Probs{ch::expand(row({1, 2, 5}), {20000, 3})}}.sample();
  CHECK(rows.shape() == Shape<1>{20000});
  CHECK(std::abs(ch::mean(ch::to<double>(rows == 2)).item() - 0.625) < 0.02);
  // Tiny concentrations have nearly all of their mass beyond the nearest numbers to 0 and 1.
  const auto border = d::Beta{many(1e-3), many(1e-3)}.sample();
  CHECK(ch::all((border > 0) & (border < 1)).item());
}

TEST_CASE("a sample is a function of its key, and rsample has gradients") {
  const d::Beta beta{many(2), many(3)};
  const auto draw = [&](std::uint64_t seed) {
    ch::manual_seed(seed);
    return beta.sample().to_vector();
  };
  CHECK(draw(5) == draw(5));
  CHECK(draw(5) != draw(6));
  const Variable<1> mean(row({1, 2}), true), deviation(row({3, 4}), true);
  const auto x = d::Normal{mean, deviation}.rsample();
  const auto noise = (x.value() - mean.value()) / deviation.value();
  x.backward(Tensor<1>::ones({2}));
  CHECK(mean.grad().to_vector() == std::vector<double>{1, 1});
  for (Index i = 0; i < 2; ++i) CHECK(deviation.grad()(i) == Approx(noise(i)));
}

TEST_CASE("gradients of densities, entropies and divergences, in double") {
  using d::Beta, d::Bernoulli, d::Categorical, d::Logits, d::Normal, d::Probs;
  const auto x = numbers<1>({4}, 1, 0.1, 0.9), a = numbers<1>({4}, 2, 0.3, 3), b = numbers<1>({4}, 3, 0.3, 3);
  check_operator([](const auto& y, const auto& p, const auto& q) { return Normal{p, q}.log_prob(y); }, x, a, b);
  check_operator([](const auto& p, const auto& q) { return kl_divergence(Normal{p, q}, Normal{q, p}); }, a, b);
  check_operator([](const auto& y, const auto& p, const auto& q) { return Beta{p, q}.log_prob(y); }, x, a, b);
  check_operator([](const auto& p, const auto& q) { return Beta{p, q}.entropy(); }, a, b);
  check_operator([](const auto& p, const auto& q) { return kl_divergence(Beta{p, q}, Beta{q, p}); }, a, b);
  check_operator([](const auto& p) { return Bernoulli{Probs{p}}.entropy(); }, x);
  check_operator([](const auto& p, const auto& q) { return kl_divergence(Bernoulli{Logits{p}}, Bernoulli{Logits{q}}); },
                 a, b);
  check_operator(
      [](const auto& p, const auto& q) {
        return kl_divergence(Categorical{Logits{p}}, Categorical{Logits{q}}) + Categorical{Logits{p}}.entropy();
      },
      numbers<2>({2, 3}, 4, 0.1, 2), numbers<2>({2, 3}, 5, 0.1, 2));
}

TEST_CASE("densities and entropies at the edge") {
  const auto ends = row({0, 1});
  CHECK(d::Beta{row({1, 1}), row({1, 1})}.log_prob(ends).to_vector() == std::vector<double>{0, 0});
  CHECK(d::Categorical{d::Logits{row({0, -INFINITY})}}.entropy().item() == 0);
  CHECK(d::Bernoulli{d::Logits{row({1000, -1000})}}.log_prob(ends).to_vector() == std::vector<double>{-1000, -1000});
}

TEST_CASE("distributions refuse what is none") {
  CHECK(message_of<ch::UsageError>([] {
          d::Normal{row({0, 0}), row({1, 0})};
        }).find("Normal: expected a positive scale") == 0);
  CHECK(message_of<ch::ShapeError>([] {
          d::Beta{row({1, 2}), row({1})};
        }) == "Beta: expected parameters of one shape, got [2] and [1]");
  CHECK_THROWS_AS((d::Beta{row({1}), row({-1})}), ch::UsageError);
  CHECK_THROWS_AS(d::Bernoulli{d::Probs{row({1.5})}}, ch::UsageError);
  CHECK_THROWS_AS(d::Categorical{d::Probs{row({0.5, -0.5})}}, ch::UsageError);
  CHECK(message_of<ch::ShapeError>([] {
          d::Categorical{d::Logits{Tensor<2>::ones({4, 3})}}.log_prob(ch::Tensor<std::int64_t, 1>::zeros({5}));
        }) == "Categorical: expected categories of shape [4], got [5]");
}

}  // namespace distributions_test
