#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/matmul.hpp>
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

TEST_CASE("micro-batches that are divided by the whole batch's count have its gradient together") {
  const auto x = numbers<2>({5, 4}, 1), target = ch::softmax(numbers<2>({5, 5}, 2), 1);
  const auto weight = ch::Tensor<double, 1>::from({1, 5, 0.5, 3, 2}, {5});
  // `loss(scores, labels, targets, over)`: whole if `over` is unset, else in parts of 2 and 3 samples.
  const auto check = [&](const char* name, double over, const auto& loss) {
    CAPTURE(name);
    const auto gradient = [&](bool cut) {
      const Variable<2> w(numbers<2>({4, 5}, 3), true);
      double value = 0;
      const auto part = [&](ch::Index begin, ch::Index end, std::optional<double> mean_over) {
        const auto made = loss(ch::matmul(x.slice(0, begin, end), w), labels.slice(0, begin, end),
                               target.slice(0, begin, end), mean_over);
        CHECK(made.node()->is_loss() == !mean_over);
        value += made.item();
        made.backward();
      };
      if (cut) {
        part(0, 2, over);
        part(2, 5, over);
      } else {
        part(0, 5, {});
      }
      auto out = w.grad().to_vector();
      out.push_back(value);
      return out;
    };
    const auto whole = gradient(false), cut = gradient(true);
    for (std::size_t i = 0; i < whole.size(); ++i) CHECK(cut[i] == Approx(whole[i]));
  };
  using Scores = Variable<2>;
  using Targets = Tensor<2>;
  using Over = std::optional<double>;
  check("cross_entropy", 4, [](const Scores& s, const Labels& y, const Targets&, Over over) {
    return ch::cross_entropy(s, y, {.label_smoothing = 0.1, .mean_over = over});
  });
  check("nll_loss", 4, [](const Scores& s, const Labels& y, const Targets&, Over over) {
    return ch::nll_loss(ch::log_softmax(s, 1), y, {.mean_over = over});
  });
  check("weighted cross_entropy", 0.5 + 1 + 2 + 5, [&](const Scores& s, const Labels& y, const Targets&, Over over) {
    return ch::cross_entropy(s, y, weight, {.mean_over = over});
  });
  check("weighted nll_loss", 0.5 + 1 + 2 + 5, [&](const Scores& s, const Labels& y, const Targets&, Over over) {
    return ch::nll_loss(ch::log_softmax(s, 1), y, weight, {.mean_over = over});
  });
  check("cross_entropy of probabilities", 5, [](const Scores& s, const Labels&, const Targets& t, Over over) {
    return ch::cross_entropy(s, t, {.mean_over = over});
  });
}

TEST_CASE("what a sum cannot be divided by") {
  const auto x = Tensor<2>::ones({5, 5});
  for (const double bad : {0.0, -3.0, std::nan("")})
    CHECK(message_of<ch::UsageError>([&] {
            ch::cross_entropy(x, labels, {.mean_over = bad});
          }).starts_with("cross_entropy: expected a positive mean_over, got "));
  const std::string none = ": mean_over needs Reduction::mean";
  CHECK(message_of<ch::UsageError>(
            [&] { ch::nll_loss(x, labels, {.reduction = ch::Reduction::sum, .mean_over = 4}); }) == "nll_loss" + none);
  CHECK(message_of<ch::UsageError>([&] {
          ch::cross_entropy(x, x, {.reduction = ch::Reduction::sum, .mean_over = 4});
        }) == "cross_entropy" + none);
  CHECK(message_of<ch::UsageError>([&] { ch::cross_entropy_per_sample(x, labels, {.mean_over = 4}); }) ==
        "cross_entropy_per_sample" + none);
  CHECK(message_of<ch::UsageError>([&] { ch::nll_loss_per_sample(x, labels, {.mean_over = 4}); }) ==
        "nll_loss_per_sample" + none);
}

TEST_CASE("messages of cross_entropy") {
  const auto x = Tensor<2>::ones({2, 3});
  CHECK(message_of<ch::ShapeError>([&] { ch::cross_entropy(x, labels); }) ==
        "cross_entropy: expected 2 labels for scores of shape [2, 3], got 5");
  CHECK(message_of<ch::UsageError>([&] {
          ch::cross_entropy(x, Labels::from({0, 3}, {2}));
        }) == "cross_entropy: label 3 of sample 1 is not in [0, 3) and is not ignore_index -100");
  CHECK(message_of<ch::UsageError>([&] {
          ch::nll_loss(x, Labels::from({0, 1}, {2}), {.reduction = ch::Reduction::none});
        }) == "nll_loss: for one loss per sample call nll_loss_per_sample");
}

}  // namespace cross_entropy_test
