#include <chorus/ops/attention.hpp>
#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/scatter.hpp>

#include "higher_order.hpp"

namespace higher_order_reduction_test {

TEST_CASE("second derivatives of reductions") {
  const auto x = numbers<3>({2, 3, 2}, 1);
  check_second([](const auto& a) { return ch::square(ch::sum(a, 1)); }, x);
  check_second([](const auto& a) { return ch::square(ch::mean(a, 0)) + ch::square(ch::mean(a)); }, x);
  check_second([](const auto& a) { return ch::square(ch::var(a, 1)) + ch::var(a, 1, 0); }, x);
  check_second([](const auto& a) { return ch::square(ch::amax(a, 2)) * ch::amin(a, 2); }, x);
  check_second([](const auto& a) { return ch::cumsum(ch::square(ch::cumsum(a, 1)), 0); }, x);
  check_second([](const auto& a) { return ch::cumprod(a, 1); }, x);
  check_second([](const auto& a) { return ch::prod(a * ch::slice(a, 1, 1, 2) - a * 0.2, 0); }, x);
}

TEST_CASE("a product with zeros has second derivatives") {
  check_second([](const auto& a) { return ch::cumprod(a, 0); }, Tensor<1>::from({2, 0, 3, 0, 5}, {5}));
  check_second([](const auto& a) { return ch::cumprod(a, 0); }, Tensor<1>::from({2}, {1}));
}

TEST_CASE("third derivatives of reductions, softmax and products") {
  const auto f = [](const auto& a) {
    return ch::softmax(a, 1) * ch::var(a, 0) + ch::cumprod(a, 1) * ch::reshape(ch::logsumexp(a, 1), Shape<2>{2, 1});
  };
  CHECK(ch::gradient_error(gradient_of(gradient_of(f)), numbers<2>({2, 3}, 1)) < 1e-5);
}

TEST_CASE("second derivatives of softmax and of losses over classes") {
  const auto x = numbers<2>({3, 4}, 1);
  check_second([](const auto& a) { return ch::softmax(a, 1); }, x);
  check_second([](const auto& a) { return ch::log_softmax(a, 0); }, x);
  check_second([](const auto& a) { return ch::square(ch::logsumexp(a, 1)); }, x);
  auto labels = ch::Tensor<std::int64_t, 1>::empty({3});
  labels.data()[0] = 2, labels.data()[1] = -100, labels.data()[2] = 0;
  for (const auto reduction : {ch::Reduction::mean, ch::Reduction::sum}) {
    check_second(
        [&](const auto& a) {
          return ch::square(ch::cross_entropy(a, labels, {.label_smoothing = 0.2, .reduction = reduction}));
        },
        x);
    check_second([&](const auto& a) { return ch::square(ch::nll_loss(a, labels, {.reduction = reduction})); }, x);
  }
  check_second([&](const auto& a) { return ch::square(ch::cross_entropy_per_sample(a, labels)); }, x);
  check_second([&](const auto& a) { return ch::square(ch::nll_loss_per_sample(ch::square(a), labels)); }, x);
}

TEST_CASE("second derivatives of attention") {
  check_second(
      [](const auto& q, const auto& k, const auto& v) { return ch::scaled_dot_product_attention(q, k, v, true); },
      numbers<3>({1, 3, 2}, 1), numbers<3>({1, 3, 2}, 2), numbers<3>({1, 3, 2}, 3));
}

TEST_CASE("second derivatives of picking and pooling") {
  auto index = ch::Tensor<std::int64_t, 2>::empty({2, 2});
  index.data()[0] = 1, index.data()[1] = 0, index.data()[2] = 1, index.data()[3] = 1;
  check_second([&](const auto& w) { return ch::square(ch::embedding(w, index)); }, numbers<2>({3, 2}, 1));
  check_second([&](const auto& x) { return ch::exp(ch::gather(ch::square(x), 0, index)); }, numbers<2>({3, 3}, 1));
  const auto put = [&](const auto& x, const auto& source) {
    return ch::exp(ch::scatter(x, 1, index, source)) * ch::scatter_add(x, 1, index, ch::square(source));
  };
  index.data()[2] = 0;
  check_second(put, numbers<2>({2, 3}, 1), numbers<2>({2, 2}, 2));
  const auto images = numbers<4>({1, 2, 4, 4}, 1);
  check_second([](const auto& x) { return ch::square(ch::max_pool2d(ch::exp(x), 3, {.stride = 1, .padding = 1})); },
               images);
  check_second([](const auto& x) { return ch::square(ch::avg_pool2d(ch::exp(x), 3, {.stride = 2, .padding = 1})); },
               images);
}

TEST_CASE("second derivatives of dropout: the elements that were dropped, again") {
  ch::RandomContext random{.seed = 3, .first_sample = {}};
  check_second(
      [&](const auto& x) {
        random.next_operation = 0;
        const ch::RandomScope scope(random);
        return ch::square(ch::dropout(x, 0.5));
      },
      numbers<2>({3, 6}, 1));
  check_second([&](const auto& x) { return ch::square(ch::dropout(x, 0.5, false)); }, numbers<2>({3, 6}, 1));
}

}  // namespace higher_order_reduction_test
