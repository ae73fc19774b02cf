#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/softmax.hpp>

#include "check_operator.hpp"

namespace cross_entropy_test {

using Labels = ch::Tensor<std::int64_t, 1>;
const auto labels = Labels::from({2, 0, 4, -100, 1}, {5});

TEST_CASE("gradients of cross_entropy and nll_loss") {
  const auto x = numbers<2>({5, 5}, 1);
  for (const double smoothing : {0.0, 0.2})
    for (const auto reduction : {ch::Reduction::mean, ch::Reduction::sum}) {
      const ch::CrossEntropyOptions options{.label_smoothing = smoothing, .reduction = reduction};
      check_operator([&](const auto& a) { return ch::cross_entropy(a, labels, options); }, x);
      check_operator([&](const auto& a) { return ch::cross_entropy_per_sample(a, labels, options); }, x);
    }
  check_operator([](const auto& a) { return ch::nll_loss(a, labels); }, x);
  check_operator([](const auto& a) { return ch::nll_loss_per_sample(a, labels); }, x);
}

TEST_CASE("cross_entropy is nll_loss of log_softmax") {
  const auto x = numbers<2>({5, 5}, 2);
  CHECK(ch::cross_entropy(x, labels).item() == Approx(ch::nll_loss(ch::log_softmax(x, 1), labels).item()));
  double sum = 0;
  for (const double loss : ch::cross_entropy_per_sample(x, labels).to_vector()) sum += loss;
  CHECK(ch::cross_entropy(x, labels).item() == Approx(sum / 4));
}

TEST_CASE("an empty batch has a loss of 0") {
  const Variable<2> x(Tensor<2>::empty({0, 5}), true);
  const auto loss = ch::cross_entropy(x, Labels::empty({0}));
  CHECK(loss.item() == 0);
  loss.backward();
  CHECK(x.grad().numel() == 0);
}

TEST_CASE("messages of cross_entropy") {
  const auto x = Tensor<2>::ones({2, 3});
  CHECK(message_of<ch::ShapeError>([&] { ch::cross_entropy(x, labels); }) ==
        "cross_entropy: scores of shape [2, 3] need 2 labels, got 5");
  CHECK(message_of<ch::UsageError>([&] {
          ch::cross_entropy(x, Labels::from({0, 3}, {2}));
        }) == "cross_entropy: label 3 of sample 1 is not in [0, 3), nor is it ignore_index -100");
  CHECK(message_of<ch::UsageError>([&] {
          ch::nll_loss(x, Labels::from({0, 1}, {2}), {.reduction = ch::Reduction::none});
        }) == "nll_loss: one loss a sample has a function of its own: nll_loss_per_sample");
}

}  // namespace cross_entropy_test
