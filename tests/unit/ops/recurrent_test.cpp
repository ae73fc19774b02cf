#include <algorithm>
#include <chorus/autograd/operation_watch.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/ops/recurrent.hpp>
#include <cmath>
#include <vector>

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

// Follows single operations, so that the LSTM is made of them.
struct Watch final : ch::detail::OperationWatch {
  void ended(const ch::detail::WatchedOperation&) override { ++operations; }
  int operations = 0;
};

// Outputs and gradients.
template <class T>
std::vector<T> lstm_numbers(Index batch, Index hidden, bool reverse, bool with_lengths) {
  constexpr Index time = 5, features = 3;
  const auto leaf = [](const auto& shape, double from) {
    auto values = ch::Tensor<T, static_cast<int>(std::tuple_size_v<std::remove_cvref_t<decltype(shape)>>)>::empty(shape);
    for (Index i = 0; i < values.numel(); ++i)
      values.data()[i] = static_cast<T>(std::sin(0.7 * static_cast<double>(i) + from) / 4);
    return ch::Variable(values, true);
  };
  const auto x = leaf(ch::Shape<3>{batch, time, features}, 0);
  const auto ih = leaf(ch::Shape<2>{4 * hidden, features}, 1), hh = leaf(ch::Shape<2>{4 * hidden, hidden}, 2);
  const auto bias_ih = leaf(ch::Shape<1>{4 * hidden}, 3), bias_hh = leaf(ch::Shape<1>{4 * hidden}, 4);
  const auto h0 = leaf(ch::Shape<2>{batch, hidden}, 5), c0 = leaf(ch::Shape<2>{batch, hidden}, 6);
  ch::Tensor<std::int64_t, 1> lengths;
  if (with_lengths) {
    lengths = ch::Tensor<std::int64_t, 1>::empty({batch});
    for (Index i = 0; i < batch; ++i) lengths(i) = i % (time + 1);
  }
  const auto made = ch::lstm(x, ih, hh, bias_ih, bias_hh, h0, c0, reverse, lengths);
  (ch::sum(made.output * made.output) + ch::sum(made.hidden * made.cell)).backward();
  std::vector<T> all;
  const auto add = [&](const auto&... tensors) {
    const auto append = [&](const auto& numbers) { all.insert(all.end(), numbers.begin(), numbers.end()); };
    (append(ch::contiguous(tensors).to_vector()), ...);
  };
  add(value_of(made.output), value_of(made.hidden), value_of(made.cell), x.grad(), ih.grad(), hh.grad(),
      bias_ih.grad(), bias_hh.grad(), h0.grad(), c0.grad());
  return all;
}

TEST_CASE("lstm as one operation is lstm as single operations, to rounding") {
  const auto compare = []<class T>(T tolerance, Index batch, Index hidden, bool reverse, bool lengths) {
    const auto one = lstm_numbers<T>(batch, hidden, reverse, lengths);
    Watch watch;
    const ch::detail::Replaced<ch::detail::OperationWatch*> watched(ch::detail::operation_watch, &watch);
    const auto single = lstm_numbers<T>(batch, hidden, reverse, lengths);
    CHECK(watch.operations > 10);
    REQUIRE(one.size() == single.size());
    T furthest = 0;
    for (std::size_t i = 0; i < one.size(); ++i)
      furthest = std::max(furthest, std::abs(one[i] - single[i]) / (1 + std::abs(single[i])));
    INFO(batch << ", " << hidden << ", " << reverse << ", " << lengths);
    CHECK(furthest <= tolerance);
  };
  for (const bool reverse : {false, true})
    for (const bool lengths : {false, true}) {
      for (const Index batch : {1, 2, 7, 21})
        for (const Index hidden : {1, 16, 37, 300}) compare(2e-5f, batch, hidden, reverse, lengths);
      compare(1e-13, 9, 21, reverse, lengths);
    }
}

}  // namespace recurrent_test
