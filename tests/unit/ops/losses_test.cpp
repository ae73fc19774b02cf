#include <chorus/ops/losses.hpp>

#include "check_operator.hpp"

namespace losses_test {

TEST_CASE("gradients of losses by both operands") {
  const auto x = numbers<2>({3, 5}, 1), target = numbers<2>({3, 5}, 2), probability = numbers<2>({3, 5}, 3, 0.1, 0.9);
  for (const auto reduction : {ch::Reduction::mean, ch::Reduction::sum}) {
    check_operator([&](const auto& a, const auto& t) { return ch::mse_loss(a, t, reduction); }, x, target);
    check_operator([&](const auto& a, const auto& t) { return ch::l1_loss(a, t, reduction); }, x, target);
    check_operator([&](const auto& a, const auto& t) { return ch::bce_with_logits(a, t, reduction); }, x, probability);
    check_operator([&](const auto& a, const auto& t) { return ch::smooth_l1_loss(a, t, 0.7, reduction); }, x, target);
    check_operator([&](const auto& a, const auto& t) { return ch::huber_loss(a, t, 1.3, reduction); }, x, target);
  }
  check_operator([](const auto& a, const auto& t) { return ch::kl_div(a, t); }, x, probability);
  check_operator([](const auto& a, const auto& t) { return ch::mse_loss_per_element(a, t); }, x, target);
}

TEST_CASE("values of losses") {
  const auto x = Tensor<1>::from({0, 2}, {2}), target = Tensor<1>::from({1, -1}, {2});
  CHECK(ch::mse_loss(x, target).item() == 5);
  CHECK(ch::l1_loss(x, target, ch::Reduction::sum).item() == 4);
  CHECK(ch::smooth_l1_loss_per_element(x, target).to_vector() == std::vector<double>{0.5, 2.5});
  CHECK(ch::huber_loss_per_element(x, target, 2).to_vector() == std::vector<double>{0.5, 4});
  CHECK(ch::bce_with_logits(Tensor<1>::full({1}, -1000), Tensor<1>::zeros({1})).item() == 0);
  CHECK(ch::bce_with_logits(Tensor<1>::full({1}, 1000), Tensor<1>::zeros({1})).item() == 1000);
}

TEST_CASE("a target probability of 0 costs nothing") {
  const Variable<2> x(Tensor<2>::from({-1, -2}, {1, 2}), true), target(Tensor<2>::from({0, 1}, {1, 2}), true);
  const auto y = ch::kl_div(x, target);
  CHECK(y.item() == 2);
  y.backward();
  CHECK(x.grad().to_vector() == std::vector<double>{0, -1});
  CHECK(target.grad()(0, 0) == 0);
}

TEST_CASE("bce_with_logits of large and infinite logits is exact") {
  const auto of = [](float x, float target) {
    const ch::Variable<float, 1> logit(ch::Tensor<float, 1>::from({x}, {1}), true);
    const auto loss = ch::bce_with_logits(logit, ch::Tensor<float, 1>::from({target}, {1}));
    loss.backward();
    return std::pair(loss.item(), logit.grad()(0));
  };
  for (const float x : {5.0f, 15.0f, 20.0f, 60.0f}) {
    CHECK(of(x, 1).first == Approx(std::exp(-x)).epsilon(0.01));
    CHECK(of(-x, 0).first == Approx(std::exp(-x)).epsilon(0.01));
    CHECK(of(x, 0).first == Approx(x).epsilon(0.01));
    CHECK(of(-x, 1).first == Approx(x).epsilon(0.01));
  }
  CHECK(of(INFINITY, 1) == std::pair(0.0f, 0.0f));
  CHECK(of(-INFINITY, 0) == std::pair(0.0f, 0.0f));
  CHECK(of(INFINITY, 0) == std::pair(INFINITY, 1.0f));
  CHECK(of(-INFINITY, 1) == std::pair(INFINITY, -1.0f));
  CHECK(of(-INFINITY, 0.25f) == std::pair(INFINITY, -0.25f));
}

TEST_CASE("the mean loss of an empty batch is 0") {
  const Variable<2> x(Tensor<2>::empty({0, 3}), true);
  const auto y = ch::mse_loss(x, Tensor<2>::empty({0, 3}));
  CHECK(y.item() == 0);
  y.backward();
  CHECK(ch::kl_div(x, Tensor<2>::empty({0, 3})).item() == 0);
}

TEST_CASE("messages of losses") {
  const auto x = Tensor<1>::ones({2});
  CHECK(message_of<ch::UsageError>([&] { ch::mse_loss(x, x, ch::Reduction::none); }) ==
        "mse_loss: for one loss per element call mse_loss_per_element");
  CHECK(message_of<ch::UsageError>([&] { ch::smooth_l1_loss(x, x, 0); }) ==
        "smooth_l1_loss: expected a positive beta, got 0");
  CHECK(message_of<ch::UsageError>([&] { ch::huber_loss(x, x, -1); }) ==
        "huber_loss: expected a positive delta, got -1");
  CHECK(message_of<ch::ShapeError>([&] { ch::l1_loss(x, Tensor<1>::ones({3})); }) ==
        "l1_loss: shapes [2] and [3] do not broadcast");
}

}  // namespace losses_test
