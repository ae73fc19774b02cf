#include <catch.hpp>
#include <chorus/autograd/anomaly.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/reduction.hpp>
#include <limits>

#include "../message_of.hpp"

namespace hooks_test {

namespace ch = chorus;
using Number = ch::Variable<double, 0>;
using Scalar = ch::Tensor<double, 0>;

Number leaf(double value) { return Number(Scalar::full({}, value), true); }

TEST_CASE("a hook sees the whole gradient by a value in between") {
  const auto x = leaf(3);
  const auto square = x * x;
  std::vector<double> seen;
  square.register_hook([&](const Scalar& grad) { seen.push_back(grad.item()); });
  (square * 2 + square * 5).backward();
  CHECK(seen == std::vector<double>{7});
  CHECK(x.grad().item() == 42);
}

TEST_CASE("what a hook returns goes on in the gradient's place, hook after hook") {
  const auto x = leaf(3);
  const auto square = x * x;
  square.register_hook([](const Scalar& grad) { return grad * 10; });
  square.register_hook([](const Scalar& grad) { return grad + 1; });
  (square * 2).backward();
  CHECK(x.grad().item() == 21 * 6);
}

TEST_CASE("a leaf's hook replaces its gradient before those that only wait for it run") {
  const ch::Parameter<double, 1> w(ch::Tensor<double, 1>::full({2}, 3));
  double final_sum = 0;
  w.register_hook([&] { final_sum = ch::sum(w.grad()).item(); });
  w.register_hook([](const auto& grad) { return ch::clamp(grad, -1, 1); });
  (ch::sum(w * w)).backward();
  CHECK(w.grad().to_vector() == std::vector<double>{1, 1});
  CHECK(final_sum == 2);
}

TEST_CASE("a backward pass inside of another leaves that one's counts: a leaf's hook runs for its part of each") {
  ch::Parameter<double, 0> p(Scalar::full({}, 3));
  std::vector<double> seen;
  p.on<ch::Cpu>().on_grad([&] { seen.push_back(p.grad().item()); });
  const auto square = p * p;
  const auto again = ch::record(
      "again", square.value(),
      [&](const auto& dy, auto dx) {
        const ch::GradMode recording(true);
        (p * 5).backward();
        dx->add(dy);
      },
      square);
  (again + again * p).backward();  // p^2 + p^3 here, 5 p in the nested run
  CHECK(seen == std::vector<double>{9 + 5, 9 + 5 + 6 + 18});
}

TEST_CASE("what hooks refuse") {
  const auto x = leaf(3);
  x.register_hook([](const Scalar&) { return Scalar(); });
  CHECK(message_of<ch::ShapeError>([&] { (x * x).backward(); }).find("register_hook: the hook of a gradient") == 0);
  CHECK(message_of<ch::UsageError>([&] { x.detach().register_hook([](const Scalar&) {}); }) ==
        "register_hook: the value does not require a gradient");
}

TEST_CASE("anomaly detection names the operation that made the first NaN or infinity") {
  const auto x = leaf(-1);
  CHECK(std::isnan((ch::log(x) * 2).item()));
  const ch::DetectAnomaly detect;
  CHECK(message_of<ch::NonFiniteError>([&] { ch::log(x) * 2; }) ==
        "anomaly: a NaN or an infinity in the output of 'log', of shape []");
  // sqrt has an infinite slope at 0, and 0 times it is NaN.
  const auto zero = leaf(0);
  const auto root = ch::sqrt(ch::square(zero)) + 1;
  CHECK(message_of<ch::NonFiniteError>([&] { root.backward(); }) ==
        "anomaly: backward of 'sqrt' made a NaN or an infinity in the gradient of the output of 'square'");
  const auto fine = leaf(2);
  CHECK(message_of<ch::NonFiniteError>([&] {
          (fine * fine).backward(Scalar::full({}, std::numeric_limits<double>::infinity()));
        }).find("the seed of backward") != std::string::npos);
  // Attention's mask is infinite on purpose.
  const ch::Variable<double, 1> scores(ch::Tensor<double, 1>::ones({2}), true);
  const auto mask = ch::Tensor<bool, 1>::full({2}, true);
  CHECK(ch::masked_fill(scores, mask, -std::numeric_limits<double>::infinity()).requires_grad());
  fine.zero_grad();
  (fine * fine).backward();
  CHECK(fine.grad().item() == 4);
}

TEST_CASE("anomaly detection ends with its scope") {
  { const ch::DetectAnomaly detect; }
  CHECK(std::isnan(ch::log(leaf(-1)).item()));
}

}  // namespace hooks_test
