#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/more_losses.hpp>

#include "check_operator.hpp"

namespace more_losses_test {

// Away from the kinks, where numeric gradients are wrong.
Tensor<1> signs() { return Tensor<1>::from({1, -1, 1, -1, 1}, {5}); }

TEST_CASE("gradients of losses of distances and rankings") {
  const auto a = numbers<2>({5, 3}, 1), b = numbers<2>({5, 3}, 2), c = numbers<2>({5, 3}, 3);
  check_operator([](const auto& x, const auto& y,
                    const auto& z) { return ch::triplet_margin_loss_per_sample(x, y, z, {.margin = 5}); },
                 a, b, c);
  check_operator([](const auto& x, const auto& y,
                    const auto& z) { return ch::triplet_margin_loss(x, y, z, {.margin = 5, .swap = true}); },
                 a, b, c);
  check_operator([](const auto& x, const auto& y) { return ch::cosine_similarity(x, y); }, a, b);
  const auto target = signs();
  check_operator([&](const auto& x, const auto& y) { return ch::cosine_embedding_loss(x, y, target, -0.9); }, a, b);
  const auto u = numbers<1>({5}, 4), v = numbers<1>({5}, 5);
  check_operator([&](const auto& x, const auto& y) { return ch::margin_ranking_loss(x, y, target, 0.3); }, u, v);
  check_operator([&](const auto& x) { return ch::hinge_embedding_loss_per_element(x, target); }, u);
  check_operator([&](const auto& x) { return ch::soft_margin_loss(x, target, ch::Reduction::sum); }, u);
}

TEST_CASE("gradients of likelihoods") {
  const auto x = numbers<2>({4, 3}, 1), target = numbers<2>({4, 3}, 2), positive = numbers<2>({4, 3}, 3, 0.3, 3);
  check_operator(
      [](const auto& a, const auto& t, const auto& v) { return ch::gaussian_nll_loss(a, t, v, {.full = true}); }, x,
      target, positive);
  check_operator([&](const auto& a) { return ch::poisson_nll_loss(a, positive); }, x);
  check_operator([&](const auto& a) { return ch::poisson_nll_loss(a, target, {.log_input = false, .full = true}); },
                 positive);
  check_operator(
      [&](const auto& a, const auto& t) { return ch::bce_with_logits(a, t, positive, numbers<1>({3}, 4, 1, 2)); }, x,
      numbers<2>({4, 3}, 5, 0, 1));
}

TEST_CASE("gradients of class losses with weights, images and probabilities") {
  const auto labels = ch::Tensor<std::int64_t, 1>::from({0, 2, -100, 1}, {4});
  const auto weight = numbers<1>({3}, 2, 0.5, 2);
  const auto x = numbers<2>({4, 3}, 1);
  check_operator([&](const auto& a) { return ch::cross_entropy(a, labels, weight, {.label_smoothing = 0.2}); }, x);
  check_operator([&](const auto& a) { return ch::cross_entropy_per_sample(a, labels, weight); }, x);
  check_operator([&](const auto& a) { return ch::nll_loss(a, labels, weight); }, x);
  const auto pixels = ch::Tensor<std::int64_t, 3>::from({0, 2, 1, 1}, {2, 1, 2});
  check_operator([&](const auto& a) { return ch::cross_entropy(a, pixels); }, numbers<4>({2, 3, 1, 2}, 3));
  check_operator([&](const auto& a) { return ch::nll_loss_per_sample(a, pixels, weight); },
                 numbers<4>({2, 3, 1, 2}, 3));
  check_operator([](const auto& a,
                    const auto& t) { return ch::cross_entropy(a, t, ch::CrossEntropyOptions{.label_smoothing = 0.1}); },
                 x, numbers<2>({4, 3}, 4, 0, 1));
}

TEST_CASE("cross entropy of images is that of their pixels, ignored ones and NaN in them left out") {
  using ch::cross_entropy;
  auto values = numbers<4>({2, 70, 3, 5}, 1);
  auto pixels = ch::Tensor<std::int64_t, 3>::empty({2, 3, 5});
  for (Index i = 0; i < 30; ++i) pixels.data()[i] = i % 7 == 0 ? -100 : i * 37 % 70;
  const auto flat = pixels.view(Shape<1>{30});
  for (const double smoothing : {0.0, 0.2})
    for (const auto reduction : {ch::Reduction::mean, ch::Reduction::sum}) {
      const ch::CrossEntropyOptions options{.label_smoothing = smoothing, .reduction = reduction};
      const Variable<4> images(values, true), others(values, true);
      const auto rows = ch::reshape(ch::permute(others, Shape<4>{0, 2, 3, 1}), Shape<2>{30, 70});
      const auto loss = cross_entropy(images, pixels, options), expected = cross_entropy(rows, flat, options);
      CHECK(loss.item() == Approx(expected.item()));
      loss.backward();
      expected.backward();
      CHECK(distance(images.grad().to_vector(), others.grad().to_vector()) < 1e-14);
      const auto each = ch::cross_entropy_per_sample(images, pixels, options);
      CHECK(distance(ch::contiguous(each.value()).to_vector(),
                     ch::cross_entropy_per_sample(rows, flat, options).value().to_vector()) < 1e-13);
    }
  values.data()[0] = std::nan("");
  const Variable<4> images(values, true);
  cross_entropy(images, pixels).backward();
  CHECK(images.grad().to_vector()[0] == 0);
  CHECK(message_of<ch::UsageError>([&] { cross_entropy(images, pixels, {.reduction = ch::Reduction::none}); }) ==
        "cross_entropy: for one loss per sample call cross_entropy_per_sample");
  CHECK(message_of<ch::UsageError>([&] { cross_entropy(images, pixels, {.label_smoothing = 2}); }) ==
        "cross_entropy: label_smoothing must be in [0, 1], got 2");
}

TEST_CASE("a weighted mean over no samples is 0") {
  const auto none = ch::Tensor<std::int64_t, 1>::zeros({0});
  CHECK(ch::cross_entropy(Tensor<2>::zeros({0, 3}), none, Tensor<1>::ones({3})).item() == 0);
  const auto ignored = ch::Tensor<std::int64_t, 1>::full({2}, -100);
  CHECK(ch::nll_loss(Tensor<2>::ones({2, 3}), ignored, Tensor<1>::ones({3})).item() == 0);
}

TEST_CASE("bad class losses are refused with both shapes") {
  const auto labels = ch::Tensor<std::int64_t, 2>::zeros({2, 5});
  CHECK(message_of<ch::ShapeError>([&] {
          ch::cross_entropy(Tensor<3>::zeros({2, 3, 4}), labels);
        }) == "cross_entropy: scores of shape [2, 3, 4] do not fit labels of shape [2, 5]");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::nll_loss(Tensor<2>::zeros({1, 3}), ch::Tensor<std::int64_t, 1>::zeros({1}), Tensor<1>::ones({2}));
        }) == "loss over classes: 2 weights for 3 classes");
  CHECK_THROWS_AS(ch::hinge_embedding_loss(signs(), signs(), 1, ch::Reduction::none), ch::UsageError);
}

}  // namespace more_losses_test
