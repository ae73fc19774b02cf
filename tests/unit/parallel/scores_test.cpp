#include <catch.hpp>
#include <chorus/parallel/scores.hpp>
#include <cmath>
#include <span>
#include <string>

namespace scores_test {

using chorus::ShapeError;
using chorus::UsageError;
using namespace chorus::scores;
using Labels = chorus::Tensor<std::int64_t, 1>;

template <class Kind, class Action>
std::string scores_message(Action action) {
  try {
    action();
  } catch (const Kind& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Two ranks with the same counts.
struct Twice {
  void sum(std::span<double> values) const {
    for (double& value : values) value *= 2;
  }
};

TEST_CASE("a confusion matrix and its scores") {
  ConfusionMatrix matrix(3);
  matrix.add(chorus::Tensor<float, 2>::from({1, 0, 0, 0, 2, 2}, {2, 3}), Labels::from({0, 2}, {2}));
  matrix.add(Labels::from({0, 1, 0}, {3}), Labels::from({0, 1, 1}, {3}));
  const Twice net;
  matrix.sum(net);
  // Labels 0 0 1 1 2, predictions 0 0 1 0 1; expected values from scikit-learn.
  CHECK(matrix.samples() == 10);
  CHECK(matrix.count(2, 1) == 2);
  CHECK(matrix.accuracy() == Approx(0.6));
  CHECK(matrix.precision(0) == Approx(2.0 / 3));
  CHECK(matrix.recall(1) == Approx(0.5));
  CHECK(matrix.f1(2) == 0);
  CHECK(matrix.f1_macro() == Approx((0.8 + 0.5) / 3));
  CHECK(matrix.f1_micro() == Approx(0.6));
  CHECK(scores_message<UsageError>([&] { matrix.add(Labels::from({3}, {1}), Labels::from({0}, {1})); }) ==
        "ConfusionMatrix: class 3 is not in [0, 3)");
  CHECK(scores_message<ShapeError>([&] { matrix.add(Labels::from({1, 2}, {2}), Labels::from({0}, {1})); }) ==
        "ConfusionMatrix: expected guesses of shape [1], as the labels, got [2]");
  CHECK(scores_message<ShapeError>([&] {
          matrix.add(chorus::Tensor<float, 2>::ones({1, 2}), Labels::from({0}, {1}));
        }) == "ConfusionMatrix: expected logits of shape [1, 3], got [1, 2]");
  CHECK(scores_message<UsageError>([] { ConfusionMatrix{0}; }) == "ConfusionMatrix: expected at least 1 class, got 0");
}

TEST_CASE("the area under the curve, and perplexity") {
  Auc auc;
  auc.add(chorus::Tensor<float, 1>::from({0.1f, 0.4f, 0.35f, 0.8f, 1.0f}, {5}), Labels::from({0, 0, 1, 1, 1}, {5}));
  const Twice net;
  auc.sum(net);
  CHECK(auc.value() == Approx(5.0 / 6));
  CHECK(std::isnan(Auc{}.value()));
  const auto one = [](float score, std::int64_t label) {
    Auc{}.add(chorus::Tensor<float, 1>::from({score}, {1}), Labels::from({label}, {1}));
  };
  CHECK(scores_message<UsageError>([&] { one(1.5f, 0); }) == "Auc: expected scores in [0, 1], got 1.5");
  CHECK(scores_message<UsageError>([&] { one(0, 2); }) == "Auc: expected labels 0 and 1, got 2");
  CHECK(scores_message<UsageError>([] { Auc{1}; }) == "Auc: expected at least 2 bins, got 1");
  CHECK(scores_message<ShapeError>([&] { auc.add(chorus::Tensor<float, 1>::ones({2}), Labels::from({0}, {1})); }) ==
        "Auc: expected scores of shape [1], as the labels, got [2]");

  Perplexity perplexity;
  perplexity.add(std::log(2.0), 30);
  perplexity.add(std::nan(""), 0);
  perplexity.add(std::log(4.0), 30);
  perplexity.sum(net);
  CHECK(perplexity.value() == Approx(std::sqrt(8.0)));
}

}  // namespace scores_test
