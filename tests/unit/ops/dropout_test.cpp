#include <chorus/ops/dropout.hpp>

#include "check_operator.hpp"

namespace dropout_test {

ch::RandomContext pass(std::uint32_t step, std::int64_t first_sample = 0) {
  return {.seed = 7, .step = step, .first_sample = [first_sample] { return first_sample; }};
}
/// Dropout of ones in the given pass.
std::vector<double> masks(ch::RandomContext context, Index samples) {
  const ch::RandomScope scope(context);
  return values(ch::dropout(Tensor<2>::ones({samples, 50}), 0.5));
}

TEST_CASE("the gradient passes where the forward pass kept the element") {
  check_operator(
      [](const auto& x) {
        auto context = pass(3);
        const ch::RandomScope scope(context);
        return ch::dropout(x, 0.4);
      },
      numbers<3>({4, 5, 3}, 1, 0.5, 2));
}

TEST_CASE("kept elements are scaled, about p of them go") {
  const auto y = masks(pass(0), 40);
  const auto kept = std::count(y.begin(), y.end(), 2.0), gone = std::count(y.begin(), y.end(), 0.0);
  CHECK(kept + gone == 2000);
  CHECK(std::abs(static_cast<double>(kept) - 1000) < 120);
}

TEST_CASE("a sample's mask depends on its place in the global batch, not on the device that holds it") {
  const auto whole = masks(pass(1), 6), front = masks(pass(1), 2), back = masks(pass(1, 2), 4);
  auto joined = front;
  joined.insert(joined.end(), back.begin(), back.end());
  CHECK(joined == whole);
  CHECK(masks(pass(2), 6) != whole);
}

TEST_CASE("two dropouts of one pass differ, and evaluation keeps the count of them") {
  auto context = pass(1);
  const ch::RandomScope scope(context);
  const auto x = Tensor<2>::ones({2, 50});
  const auto first = values(ch::dropout(x, 0.5)), second = values(ch::dropout(x, 0.5));
  CHECK(first != second);
  CHECK(values(ch::dropout(x, 0.5, false)) == values(x));
  CHECK(context.next_operation == 3);
}

TEST_CASE("dropout of an empty batch, and its message") {
  const Variable<2> x(Tensor<2>::empty({0, 3}), true);
  const auto y = ch::dropout(x, 0.5);
  y.backward(Tensor<2>::empty({0, 3}));
  CHECK(x.grad().shape() == Shape<2>{0, 3});
  CHECK(message_of<ch::UsageError>([&] { ch::dropout(x, 1); }) == "dropout: expected a probability in [0, 1), got 1");
  CHECK(message_of<ch::UsageError>([&] { ch::dropout(x, NAN); }) ==
        "dropout: expected a probability in [0, 1), got nan");
}

}  // namespace dropout_test
