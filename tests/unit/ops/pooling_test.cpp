#include <chorus/ops/pooling.hpp>
#include <chorus/ops/resize.hpp>

#include "check_operator.hpp"

namespace pooling_test {

TEST_CASE("gradients of pooling") {
  const auto x = numbers<4>({2, 3, 6, 7}, 1);
  const auto check_both = [&](ch::Size2d window, const ch::PoolOptions& options) {
    check_operator([&](const auto& a) { return ch::max_pool2d(a, window, options); }, x);
    check_operator([&](const auto& a) { return ch::avg_pool2d(a, window, options); }, x);
  };
  check_both(2, {});
  check_both(3, {.stride = 2, .padding = 1});
  check_both({1, 3}, {.stride = 1});
  check_both({3, 2}, {.stride = {1, 2}, .padding = {1, 0}});
  check_both({3, 2}, {.stride = {2, 2}, .ceil_mode = true});
  check_both(3, {.stride = 3, .padding = 1, .count_include_pad = false, .ceil_mode = true});
  check_operator([](const auto& a) { return ch::max_pool2d(a, {2, 3}, {.stride = 2, .padding = 1, .dilation = 2}); },
                 x);
  check_operator([](const auto& a) { return ch::max_pool2d(a, 2, {.ceil_mode = true, .dilation = {3, 1}}); }, x);
}

TEST_CASE("windows over the end, and windows with gaps") {
  // PyTorch 1.13's values.
  const auto x = Tensor<4>::from({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {1, 1, 3, 5});
  CHECK(ch::max_pool2d(x, 2, {.ceil_mode = true}).to_vector() == std::vector<double>{7, 9, 10, 12, 14, 15});
  CHECK(ch::avg_pool2d(x, 2, {.ceil_mode = true}).to_vector() == std::vector<double>{4, 6, 7.5, 11.5, 13.5, 15});
  const ch::PoolOptions padded{.stride = 3, .padding = 1, .ceil_mode = true};
  const double means[] = {16.0 / 9, 39.0 / 9, 23.0 / 6, 7};
  for (ch::Index i = 0; i < 4; ++i)
    CHECK(ch::avg_pool2d(x, 3, padded)(0, 0, i / 2, i % 2) == Approx(means[i]));
  CHECK(ch::avg_pool2d(x, 3, {.stride = 3, .padding = 1, .count_include_pad = false, .ceil_mode = true}).to_vector() ==
        std::vector<double>{4, 6.5, 11.5, 14});
  CHECK(ch::max_pool2d(x, 2, {.stride = 1, .dilation = {1, 3}}).to_vector() == std::vector<double>{9, 10, 14, 15});
  CHECK(ch::max_pool2d(x, 2, {.stride = 2, .padding = 1, .dilation = 2}).to_vector() ==
        std::vector<double>{7, 9, 9, 7, 9, 9});
  // A third window would start beyond the end.
  CHECK(ch::max_pool2d(x, 2, {.stride = 3, .padding = 1, .ceil_mode = true}).shape() == Shape<4>{1, 1, 2, 2});
}

TEST_CASE("gradients of pooling to a size, and of enlarging") {
  const auto x = numbers<4>({2, 3, 5, 7}, 1);
  for (const auto size : {ch::Size2d(1), ch::Size2d(2, 3), ch::Size2d(5, 7), ch::Size2d(6, 9)})
    check_operator([size](const auto& a) { return ch::adaptive_avg_pool2d(a, size); }, x);
  check_operator([](const auto& a) { return ch::global_avg_pool(a); }, x);
  check_operator([](const auto& a) { return ch::upsample_nearest2d(a, {2, 3}); }, x);
  CHECK(ch::upsample_nearest2d(Tensor<4>::from({1, 2}, {1, 1, 1, 2}), 2).to_vector() ==
        std::vector<double>{1, 1, 2, 2, 1, 1, 2, 2});
  // Halves of [0, 3): the middle element belongs to both.
  CHECK(ch::adaptive_avg_pool2d(Tensor<4>::from({1, 2, 4}, {1, 1, 1, 3}), {1, 2}).to_vector() ==
        std::vector<double>{1.5, 3});
}

TEST_CASE("pooling of an empty batch") {
  const Variable<4> x(Tensor<4>::empty({0, 3, 4, 4}), true);
  const auto y = ch::max_pool2d(x, 2);
  CHECK(y.shape() == Shape<4>{0, 3, 2, 2});
  y.backward(Tensor<4>::empty(y.shape()));
  CHECK(x.grad().shape() == x.shape());
  CHECK(ch::global_avg_pool(x).shape() == Shape<2>{0, 3});
}

TEST_CASE("messages of pooling") {
  const auto x = Tensor<4>::ones({1, 1, 3, 3});
  CHECK(message_of<ch::ShapeError>([&] { ch::max_pool2d(x, 4); }) ==
        "max_pool2d: a window of 4 x 4 does not fit an input of shape [1, 1, 3, 3]");
  CHECK(message_of<ch::UsageError>([&] { ch::avg_pool2d(x, 0); }) ==
        "avg_pool2d: expected window, stride and dilation of at least 1, got 0");
  CHECK(message_of<ch::UsageError>([&] { ch::avg_pool2d(x, 2, {.padding = 2}); }) ==
        "avg_pool2d: expected 0 <= padding <= window / 2, got 2 x 2");
  CHECK(message_of<ch::UsageError>([&] { ch::avg_pool2d(x, 2, {.dilation = 2}); }) ==
        "avg_pool2d: expected no dilation");
  CHECK(message_of<ch::ShapeError>([&] { ch::max_pool2d(x, 2, {.padding = 1, .dilation = 4}); }) ==
        "max_pool2d: with a dilation of 4 a window may miss an image of 3 rows");
  CHECK(message_of<ch::UsageError>([&] { ch::upsample_nearest2d(x, 0); }) ==
        "upsample_nearest2d: expected a scale of at least 1, got 0 x 0");
  CHECK(message_of<ch::UsageError>([&] { ch::adaptive_avg_pool2d(x, 0); }) ==
        "adaptive_avg_pool2d: expected a size of at least 1, got 0 x 0");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::adaptive_avg_pool2d(Tensor<4>::ones({1, 1, 0, 3}), 1);
        }) == "adaptive_avg_pool2d: an image of shape [1, 1, 0, 3] has no pixels");
}

}  // namespace pooling_test
