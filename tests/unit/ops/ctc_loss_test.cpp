#include <chorus/ops/ctc_loss.hpp>
#include <chorus/ops/softmax.hpp>

#include "check_operator.hpp"

namespace ctc_loss_test {

using Integers = ch::Tensor<std::int64_t, 1>;

// Three samples with scores for 5 steps of 4 classes, and three labels (two equal), two labels, and none.
const auto labels = [] {
  return ch::Tensor<std::int64_t, 2>::from(std::vector<std::int64_t>{1, 2, 2, 3, 1, 0, 0, 0, 0}, {3, 3});
};
const auto steps = [] { return Integers::from({5, 4, 3}, {3}); };
const auto lengths = [] { return Integers::from({3, 2, 0}, {3}); };

Tensor<3> scores() {
  auto out = Tensor<3>::empty({5, 3, 4});
  for (Index t = 0; t < 5; ++t)
    for (Index n = 0; n < 3; ++n)
      for (Index c = 0; c < 4; ++c) out(t, n, c) = -0.3 * static_cast<double>((7 * t + 5 * n + 3 * c) % 11);
  return out;
}

TEST_CASE("ctc_loss has PyTorch's numbers") {
  const Variable<3> x(scores(), true);
  const auto losses = ch::ctc_loss_per_sample(ch::log_softmax(x, 2), labels(), steps(), lengths());
  const double expected[] = {4.702216609900192, 2.8577807632512817, 6.172947114891326};
  for (Index n = 0; n < 3; ++n) CHECK(losses.value()(n) == Approx(expected[n]));
  const auto mean = ch::ctc_loss(ch::log_softmax(x, 2), labels(), steps(), lengths());
  CHECK(mean.item() == Approx(3.056414344383455));
  mean.backward();
  const auto check_row = [&](Index t, Index n, const std::array<double, 4>& row) {
    for (Index c = 0; c < 4; ++c) CHECK(x.grad()(t, n, c) == Approx(row[static_cast<std::size_t>(c)]).margin(1e-12));
  };
  check_row(0, 0, {0.06718053618365488, -0.08294176561704243, 0.011205438226425446, 0.004555791206962097});
  check_row(3, 1, {-0.06571353209937866, -0.031881493290482635, 0.008117241426067583, 0.08947778396379372});
  check_row(2, 2, {-0.23512043531085838, 0.03993038453113579, 0.016234482852135163, 0.17895556792758743});
  check_row(4, 1, {0, 0, 0, 0});
}

TEST_CASE("gradients of ctc_loss") {
  check_operator([](const auto& x) { return ch::ctc_loss_per_sample(x, labels(), steps(), lengths()); },
                 numbers<3>({5, 3, 4}, 1));
  check_operator([](const auto& x) {
    return ch::ctc_loss(x, labels(), steps(), lengths(), {.blank = 0, .reduction = ch::Reduction::sum});
  }, numbers<3>({5, 3, 4}, 2));
}

TEST_CASE("labels that don't fit into the time") {
  const auto few = Integers::from({3, 4, 0}, {3});  // 1 2 2 needs four steps
  const Variable<3> x(scores(), true);
  const auto losses = ch::ctc_loss_per_sample(x, labels(), few, lengths()).value();
  CHECK(std::isinf(losses(0)));
  CHECK(std::isfinite(losses(1)));
  CHECK(losses(2) == 0);
  const auto y = ch::ctc_loss_per_sample(x, labels(), few, lengths(), {.zero_infinity = true});
  CHECK(y.value()(0) == 0);
  ch::sum(y).backward();
  for (Index t = 0; t < 5; ++t) CHECK(x.grad()(t, 0, 1) == 0);
  CHECK(x.grad()(0, 1, 3) != 0);
}

TEST_CASE("messages of ctc_loss") {
  const auto x = scores();
  CHECK(message_of<ch::UsageError>([&] { ch::ctc_loss(x, labels(), steps(), Integers::from({3, 3, 0}, {3})); }) ==
        "ctc_loss: label 0 of sample 1 is not in [0, 4), or is the blank 0");
  CHECK(message_of<ch::UsageError>([&] { ch::ctc_loss(x, labels(), Integers::from({6, 4, 3}, {3}), lengths()); }) ==
        "ctc_loss: sample 0 has 6 of 5 steps and 3 of 3 labels");
  CHECK(message_of<ch::UsageError>([&] { ch::ctc_loss(x, labels(), steps(), lengths(), {.blank = 4}); }) ==
        "ctc_loss: blank 4 is not one of 4 classes");
  CHECK(message_of<ch::ShapeError>([&] { ch::ctc_loss(x, labels(), Integers::from({5}, {1}), lengths()); }) ==
        "ctc_loss: scores of shape [5, 3, 4], expected labels, input_lengths and label_lengths of 3 samples, got [3, "
        "3], [1] and [3]");
}

}  // namespace ctc_loss_test
