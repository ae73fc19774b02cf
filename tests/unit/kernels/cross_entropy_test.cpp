#include <algorithm>
#include <limits>
#include <string>

#include <catch.hpp>
#include <chorus/kernels/cpu/cross_entropy.hpp>

#include "reference.hpp"

namespace cross_entropy_test {

using namespace chorus::kernels;
using chorus::Cpu;
using chorus::CrossEntropyOptions;
using chorus::NllLossOptions;
using chorus::Reduction;

using Labels = std::vector<std::int64_t>;

Labels some_labels(Index batch, Index classes, std::int64_t ignore) {
  Labels labels;
  for (Index i = 0; i < batch; ++i) labels.push_back(i % 4 == 1 ? ignore : (i * 7 + 3) % classes);
  return labels;
}

// The loss of each sample, as the definition has it; 0 for ignored ones.
std::vector<double> sample_losses(const std::vector<double>& x, const Labels& labels, Index classes,
                                  const CrossEntropyOptions& options) {
  std::vector<double> losses;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    double sum = 0, loss = 0;
    for (Index c = 0; c < classes; ++c)
      sum += std::exp(x[i * static_cast<std::size_t>(classes) + static_cast<std::size_t>(c)]);
    for (Index c = 0; c < classes; ++c) {
      const double target =
          (c == labels[i] ? 1 - options.label_smoothing : 0) + options.label_smoothing / static_cast<double>(classes);
      loss -= target * (x[i * static_cast<std::size_t>(classes) + static_cast<std::size_t>(c)] - std::log(sum));
    }
    losses.push_back(labels[i] == options.ignore_index ? 0 : loss);
  }
  return losses;
}

double reduced(const std::vector<double>& losses, const Labels& labels, const CrossEntropyOptions& options) {
  double sum = 0, counted = 0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    sum += losses[i];
    counted += labels[i] != options.ignore_index;
  }
  return options.reduction == Reduction::sum ? sum : sum / counted;
}

template <class Call>
std::string usage_error(Call call) {
  try {
    call();
  } catch (const chorus::UsageError& error) {
    return error.what();
  }
  return "none";
}

TEMPLATE_TEST_CASE("cross entropy agrees with its definition", "", float, double) {
  using T = TestType;
  for (const auto reduction : {Reduction::none, Reduction::mean, Reduction::sum})
    for (const double smoothing : {0.0, 0.1})
      for (const Index classes : {1, 10, 16, 37}) {
        const CrossEntropyOptions options{.ignore_index = 255, .label_smoothing = smoothing, .reduction = reduction};
        CAPTURE(static_cast<int>(reduction), smoothing, classes);
        const Index batch = 9;
        const auto x = numbers<T>(batch * classes, 21);
        const auto labels = some_labels(batch, classes, 255);
        auto expected = sample_losses(std::vector<double>(x.begin(), x.end()), labels, classes, options);
        if (reduction != Reduction::none) expected = {reduced(expected, labels, options)};
        std::vector<T> loss(expected.size()), lse(2 * static_cast<std::size_t>(batch));
        cross_entropy_forward(Cpu{}, batch, classes, x.data(), labels.data(), options, loss.data(), lse.data());
        CHECK(error(loss, expected) < tolerance<T> * 4);
      }
}

TEST_CASE("the gradient of cross entropy agrees with differences, overwritten, added and in place") {
  for (const auto reduction : {Reduction::none, Reduction::mean, Reduction::sum})
    for (const double smoothing : {0.0, 0.3}) {
      const CrossEntropyOptions options{.label_smoothing = smoothing, .reduction = reduction};
      CAPTURE(static_cast<int>(reduction), smoothing);
      const Index batch = 5, classes = 19;
      auto x = numbers<double>(batch * classes, 22);
      const auto labels = some_labels(batch, classes, -100);
      std::vector<double> loss(5), lse(10), dx(x.size(), 77.0), sum(x.size(), 1.0);
      const auto dloss = numbers<double>(reduction == Reduction::none ? batch : 1, 23);
      const auto expected = numeric_gradient(x, [&](const std::vector<double>& at) {
        const auto losses = sample_losses(at, labels, classes, options);
        return reduction == Reduction::none ? dot(losses, dloss) : reduced(losses, labels, options) * dloss[0];
      });
      const auto backward = [&](std::vector<double>& out, bool accumulate) {
        cross_entropy_backward(Cpu{}, batch, classes, x.data(), labels.data(), options, lse.data(), dloss.data(),
                               out.data(), accumulate);
      };
      cross_entropy_forward(Cpu{}, batch, classes, x.data(), labels.data(), options, loss.data(), lse.data());
      backward(dx, false);
      CHECK(error(dx, expected) < 1e-8);
      backward(sum, true);
      for (double& value : sum) value -= 1;
      CHECK(error(sum, dx) < 1e-14);
      backward(x, false);
      CHECK(x == dx);
    }
}

TEST_CASE("negative log likelihood picks the labels, and its gradient") {
  const std::vector<float> x{-1, -2, -3, -4, -5, -6, -7, -8, -9};
  const Labels labels{2, -100, 0};
  std::vector<float> loss(3), dx(9, 77.0f);
  nll_loss_forward(Cpu{}, 3, 3, x.data(), labels.data(), {.reduction = Reduction::none}, loss.data());
  CHECK(loss == std::vector<float>{3, 0, 7});
  nll_loss_forward(Cpu{}, 3, 3, x.data(), labels.data(), {}, loss.data());
  CHECK(loss[0] == 5);
  nll_loss_forward(Cpu{}, 3, 3, x.data(), labels.data(), {.reduction = Reduction::sum}, loss.data());
  CHECK(loss[0] == 10);
  const std::vector<float> one{6}, each{1, 2, 3};
  nll_loss_backward(Cpu{}, 3, 3, labels.data(), {}, one.data(), dx.data(), false);
  CHECK(dx == std::vector<float>{0, 0, -3, 0, 0, 0, -3, 0, 0});
  nll_loss_backward(Cpu{}, 3, 3, labels.data(), {.reduction = Reduction::none}, each.data(), dx.data(), true);
  CHECK(dx == std::vector<float>{0, 0, -4, 0, 0, 0, -6, 0, 0});
}

TEST_CASE("a bad label is refused by sample and label, and nothing is written") {
  const auto x = numbers<float>(12, 24);
  for (const std::int64_t bad : {std::int64_t{4}, std::int64_t{-1}}) {
    const Labels labels{0, 3, bad};
    std::vector<float> loss{5}, lse(6, 5.0f), dx(12, 5.0f);
    const std::string place = chorus::cat("label ", bad, " of sample 2 is not in [0, 4) and is not ignore_index -100");
    const float one = 1;
    CHECK(usage_error([&] {
            cross_entropy_forward(Cpu{}, 3, 4, x.data(), labels.data(), {}, loss.data(), lse.data());
          }) == "cross_entropy: " + place);
    CHECK(usage_error([&] {
            cross_entropy_backward(Cpu{}, 3, 4, x.data(), labels.data(), {}, lse.data(), &one, dx.data(), false);
          }) == "cross_entropy: " + place);
    CHECK(usage_error([&] { nll_loss_forward(Cpu{}, 3, 4, x.data(), labels.data(), {}, loss.data()); }) ==
          "nll_loss: " + place);
    CHECK(usage_error([&] { nll_loss_backward(Cpu{}, 3, 4, labels.data(), {}, &one, dx.data(), false); }) ==
          "nll_loss: " + place);
    CHECK(loss == std::vector<float>{5});
    CHECK(lse == std::vector<float>(6, 5.0f));
    CHECK(dx == std::vector<float>(12, 5.0f));
  }
}

TEST_CASE("a label smoothing outside of [0, 1] is refused") {
  const float x = 0;
  const std::int64_t label = 0;
  float loss = 5, lse = 5;
  for (const double smoothing : {-0.5, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    const auto message = usage_error(
        [&] { cross_entropy_forward(Cpu{}, 1, 1, &x, &label, {.label_smoothing = smoothing}, &loss, &lse); });
    CHECK(message == chorus::cat("cross_entropy: label_smoothing must be in [0, 1], got ", smoothing));
  }
  CHECK(loss == 5);
}

TEST_CASE("the mean over no samples is 0 and has no gradient") {
  const auto x = numbers<float>(6, 25);
  const Labels ignored{-100, -100};
  std::vector<float> loss{5}, lse(4), dx(6, 5.0f);
  const float one = 1;
  cross_entropy_forward(Cpu{}, 2, 3, x.data(), ignored.data(), {}, loss.data(), lse.data());
  CHECK(loss[0] == 0);
  cross_entropy_backward(Cpu{}, 2, 3, x.data(), ignored.data(), {}, lse.data(), &one, dx.data(), false);
  CHECK(dx == std::vector<float>(6, 0.0f));
  loss = {5};
  cross_entropy_forward<float>(Cpu{}, 0, 3, nullptr, nullptr, {}, loss.data(), nullptr);
  CHECK(loss[0] == 0);
}

TEST_CASE("cross entropy of large, masked and NaN logits") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x{1000, 0, -infinity, 0, -infinity, 0, 0, 0, std::numeric_limits<float>::quiet_NaN()};
  const Labels labels{0, 0, 0};
  std::vector<float> loss(3), lse(6), dx(9);
  const std::vector<float> one(3, 1.0f);
  const CrossEntropyOptions options{.reduction = Reduction::none};
  cross_entropy_forward(Cpu{}, 3, 3, x.data(), labels.data(), options, loss.data(), lse.data());
  CHECK(loss[0] == 0);
  CHECK(loss[1] == Approx(std::log(2.0)));
  CHECK(std::isnan(loss[2]));
  cross_entropy_backward(Cpu{}, 3, 3, x.data(), labels.data(), options, lse.data(), one.data(), dx.data(), false);
  CHECK(std::vector<float>(dx.begin(), dx.begin() + 3) == std::vector<float>{0, 0, 0});
  CHECK(dx[3] == Approx(-0.5));
  CHECK(dx[4] == 0);
  CHECK(dx[5] == Approx(0.5));
}

}  // namespace cross_entropy_test
