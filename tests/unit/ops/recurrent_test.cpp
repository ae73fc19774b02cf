#include <chorus/ops/recurrent.hpp>

#include "check_operator.hpp"

namespace recurrent_test {

TEST_CASE("gradients of lstm and gru by input, weights and biases") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  check_operator<false>([](const auto&... in) { return ch::lstm(in...).output; }, x, numbers<2>({12, 4}, 2, -1, 1),
                        numbers<2>({12, 3}, 3, -1, 1), numbers<1>({12}, 4), numbers<1>({12}, 5));
  check_operator<false>([](const auto&... in) { return ch::gru(in...).output; }, x, numbers<2>({9, 4}, 2, -1, 1),
                        numbers<2>({9, 3}, 3, -1, 1), numbers<1>({9}, 4), numbers<1>({9}, 5));
}

TEST_CASE("the last state is the last output") {
  const auto result = ch::gru(numbers<3>({2, 3, 4}, 1), numbers<2>({9, 4}, 2), numbers<2>({9, 3}, 3),
                              numbers<1>({9}, 4), numbers<1>({9}, 5));
  CHECK(values(result.output.select(1, 2)) == values(result.hidden));
}

TEST_CASE("messages of recurrent layers") {
  const auto bias = Tensor<1>::ones({12});
  CHECK(message_of<ch::ShapeError>([&] {
          ch::lstm(Tensor<3>::ones({1, 2, 5}), Tensor<2>::ones({12, 4}), Tensor<2>::ones({12, 3}), bias, bias);
        }) ==
        "lstm: an input of shape [1, 2, 5] and weights of shapes [12, 4] and [12, 3] do not fit: expected [4 hidden, "
        "features] and [4 hidden, hidden]");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::lstm(Tensor<3>::ones({1, 0, 4}), Tensor<2>::ones({12, 4}), Tensor<2>::ones({12, 3}), bias, bias);
        }) == "lstm: an input of shape [1, 0, 4] has no time steps");
}

}  // namespace recurrent_test
