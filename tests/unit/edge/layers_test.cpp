#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/convolution1d.hpp>
#include <chorus/ops/convolution3d.hpp>
#include <chorus/ops/interpolation.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/padding_modes.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/recurrent.hpp>
#include <chorus/ops/resize.hpp>
#include <chorus/ops/transposed_convolution.hpp>

#include "edge.hpp"

namespace layers_test {
using namespace edge;

template <class X>
using Row = Tensor<typename ch::tensor_of<std::decay_t<X>>::value_type, 1>;

TEST_CASE("functions of images at the edge are PyTorch's") {
  Group group("images");
  const auto is_right = [&](const char* name, const auto& f) {
    operator_is_right<4>(group, name, f, Rounding::absolute);
  };
  const ch::PoolOptions padded{.stride = 2, .padding = 1},
      image_alone{.stride = 2, .padding = 1, .count_include_pad = false}, dilated{.stride = 1, .dilation = 2};
  is_right("max_pool2d", [](const auto& x) { return ch::max_pool2d(x, 2); });
  is_right("max_pool2d padded", [&](const auto& x) { return ch::max_pool2d(x, 3, padded); });
  is_right("max_pool2d dilated", [&](const auto& x) { return ch::max_pool2d(x, 2, dilated); });
  is_right("avg_pool2d", [](const auto& x) { return ch::avg_pool2d(x, 2); });
  is_right("avg_pool2d padded", [&](const auto& x) { return ch::avg_pool2d(x, 3, padded); });
  is_right("avg_pool2d without padding", [&](const auto& x) { return ch::avg_pool2d(x, 3, image_alone); });
  is_right("adaptive_avg_pool2d", [](const auto& x) { return ch::adaptive_avg_pool2d(x, {3, 2}); });
  is_right("adaptive_max_pool2d", [](const auto& x) { return ch::adaptive_max_pool2d(x, {3, 2}); });
  is_right("global_avg_pool", [](const auto& x) { return ch::global_avg_pool(x); });
  is_right("upsample_nearest2d", [](const auto& x) { return ch::upsample_nearest2d(x, 2); });
  is_right("upsample_bilinear2d", [](const auto& x) { return ch::upsample_bilinear2d(x, {5, 7}); });
  is_right("upsample_bilinear2d corners", [](const auto& x) { return ch::upsample_bilinear2d(x, {5, 7}, true); });
  is_right("upsample_bilinear2d same", [](const auto& x) { return ch::upsample_bilinear2d(x, {4, 4}); });
  const ch::Padding2d around{.left = 1, .right = 2, .bottom = 1};
  is_right("pad2d", [=](const auto& x) { return ch::pad2d(x, around, -INFINITY); });
  is_right("pad2d reflect", [=](const auto& x) { return ch::pad2d(x, around, ch::PaddingMode::reflect); });
  is_right("pad2d replicate", [=](const auto& x) { return ch::pad2d(x, around, ch::PaddingMode::replicate); });
  is_right("pad2d circular", [=](const auto& x) { return ch::pad2d(x, around, ch::PaddingMode::circular); });
  group_is_whole(group);
}

TEST_CASE("normalisations of images at the edge are PyTorch's") {
  Group group("normalisations");
  const auto is_right = [&](const char* name, const auto& f) {
    operator_is_right<4, 1, 1>(group, name, f, Rounding::absolute);
  };
  const auto plain = [&](const char* name, const auto& f) { operator_is_right<4>(group, name, f, Rounding::absolute); };
  is_right("group_norm", [](const auto& x, const auto& w, const auto& b) { return ch::group_norm(x, 2, w, b); });
  is_right("group_norm 1", [](const auto& x, const auto& w, const auto& b) { return ch::group_norm(x, 1, w, b); });
  is_right("instance_norm", [](const auto& x, const auto& w, const auto& b) { return ch::instance_norm(x, w, b); });
  is_right("batch_norm", [](const auto& x, const auto& w, const auto& b) {
    return ch::batch_norm(x, w, b, Row<decltype(x)>{}, Row<decltype(x)>{}, true);
  });
  is_right("batch_norm_relu", [](const auto& x, const auto& w, const auto& b) {
    return ch::batch_norm_relu(x, w, b, Row<decltype(x)>{}, Row<decltype(x)>{}, true);
  });
  is_right("batch_norm in evaluation", [](const auto& x, const auto& w, const auto& b) {
    const auto mean = Row<decltype(x)>::zeros({2}, Device{}), var = Row<decltype(x)>::from({0, 4}, {2}, Device{});
    return ch::batch_norm(x, w, b, mean, var, false);
  });
  const auto none = [](const auto& x) { return Row<decltype(x)>{}; };
  plain("group_norm of points", [=](const auto& x) { return ch::group_norm(x, 3, none(x), none(x)); });
  plain("group_norm of channels", [=](const auto& x) { return ch::group_norm(x, 1, none(x), none(x)); });
  plain("instance_norm of points", [=](const auto& x) { return ch::instance_norm(x, none(x), none(x)); });
  plain("batch_norm of points",
        [=](const auto& x) { return ch::batch_norm(x, none(x), none(x), none(x), none(x), true); });
  operator_is_right<3>(
      group, "instance_norm of lines", [=](const auto& x) { return ch::instance_norm(x, none(x), none(x)); },
      Rounding::absolute);
  operator_is_right<2>(
      group, "group_norm of rows", [=](const auto& x) { return ch::group_norm(x, 4, none(x), none(x)); },
      Rounding::absolute);
  group_is_whole(group);
}

TEST_CASE("convolutions and recurrent layers at the edge are PyTorch's") {
  Group group("convolutions");
  const auto is_right = [&](const char* name, const auto& f) {
    operator_is_right<4, 4, 1>(group, name, f, Rounding::absolute);
  };
  const auto of_lines = [&](const char* name, const auto& f) {
    operator_is_right<3, 3, 1>(group, name, f, Rounding::absolute);
  };
  is_right("conv2d", [](const auto& x, const auto& w, const auto& b) { return ch::conv2d(x, w, b); });
  is_right("conv2d padded",
           [](const auto& x, const auto& w, const auto& b) { return ch::conv2d(x, w, b, {.padding = 1}); });
  is_right("conv2d strided", [](const auto& x, const auto& w, const auto& b) {
    return ch::conv2d(x, w, b, {.stride = 2, .padding = 1});
  });
  is_right("conv2d 1x1", [](const auto& x, const auto& w, const auto& b) { return ch::conv2d(x, w, b); });
  is_right("conv_transpose2d",
           [](const auto& x, const auto& w, const auto& b) { return ch::conv_transpose2d(x, w, b, {.stride = 2}); });
  of_lines("conv1d", [](const auto& x, const auto& w, const auto& b) { return ch::conv1d(x, w, b, {.padding = 1}); });
  of_lines("conv_transpose1d",
           [](const auto& x, const auto& w, const auto& b) { return ch::conv_transpose1d(x, w, b, {.stride = 2}); });
  operator_is_right<5, 5, 1>(
      group, "conv3d", [](const auto& x, const auto& w, const auto& b) { return ch::conv3d(x, w, b); },
      Rounding::absolute);
  operator_is_right<3, 2, 2, 1, 1>(
      group, "lstm", [](const auto&... x) { return ch::lstm(x...).output; }, Rounding::absolute);
  operator_is_right<3, 2, 2, 1, 1>(
      group, "gru", [](const auto&... x) { return ch::gru(x...).output; }, Rounding::absolute);
  group_is_whole(group);
}

}  // namespace layers_test
