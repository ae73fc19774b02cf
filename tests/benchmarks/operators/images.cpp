/// Convolutions, pooling, resizing.
#include <chorus/ops/convolution3d.hpp>
#include <chorus/ops/interpolation.hpp>
#include <chorus/ops/transposed_convolution.hpp>

#include "cases.hpp"
namespace {
struct C {
  const char* name;
  S<4> x, w;
  Index stride = 1, pad = 0, dil = 1, groups = 1;
  bool bias = false, dx = true;
};
const C convs[] = {
    {"conv_dw3x3_s1_b8_32x112", {8, 32, 112, 112}, {32, 1, 3, 3}, 1, 1, 1, 32},
    {"conv_dw3x3_s2_b8_96x112", {8, 96, 112, 112}, {96, 1, 3, 3}, 2, 1, 1, 96},
    {"conv_dw3x3_s1_b8_384x14", {8, 384, 14, 14}, {384, 1, 3, 3}, 1, 1, 1, 384},
    {"conv_dw7x7_b4_96x56", {4, 96, 56, 56}, {96, 1, 7, 7}, 1, 3, 1, 96},
    {"conv_stem7x7_s2_b8_224", {8, 3, 224, 224}, {64, 3, 7, 7}, 2, 3, 1, 1, false, false},
    {"conv_patch16_b8_224", {8, 3, 224, 224}, {192, 3, 16, 16}, 16, 0, 1, 1, true, false},
    {"conv_1x1_b8_256to64x56", {8, 256, 56, 56}, {64, 256, 1, 1}},
    {"conv_1x1_b8_64to256x56", {8, 64, 56, 56}, {256, 64, 1, 1}},
    {"conv_1x1_s2_b8_256to512x56", {8, 256, 56, 56}, {512, 256, 1, 1}, 2},
    {"conv_5x5_b16_48to64x28", {16, 48, 28, 28}, {64, 48, 5, 5}, 1, 2, 1, 1, true},
    {"conv_3x3_dil2_b4_256x28", {4, 256, 28, 28}, {256, 256, 3, 3}, 1, 2, 2},
    {"conv_3x3_dil4_b2_128x64", {2, 128, 64, 64}, {128, 128, 3, 3}, 1, 4, 4},
    {"conv_grouped32_b8_128x56", {8, 128, 56, 56}, {128, 4, 3, 3}, 1, 1, 1, 32},
    {"conv_grouped32_s2_b8_256x56", {8, 256, 56, 56}, {256, 8, 3, 3}, 2, 1, 1, 32},
    {"conv_3x3_b8_64x56", {8, 64, 56, 56}, {64, 64, 3, 3}, 1, 1},
    {"conv_3x3_b8_512x7", {8, 512, 7, 7}, {512, 512, 3, 3}, 1, 1},
    {"conv_3x3_s2_b8_128to256x28", {8, 128, 28, 28}, {256, 128, 3, 3}, 2, 1},
    {"conv_1x7_b8_128x17", {8, 128, 17, 17}, {128, 128, 1, 7}, 1, 0, 1, 1},
};
template <bool bias>
Run conv_run(const C& c) {
  const ch::Conv2dOptions o{.stride = c.stride, .padding = c.pad, .dilation = c.dil, .groups = c.groups};
  const auto w = var<4>(c.w, 2, 0.1);
  const auto b = var<1>({c.w[0]}, 3, 0.1);
  auto f = [o](const auto& images, const auto& weight, const auto&... own) {
    if constexpr (sizeof...(own) == 0)
      return ch::conv2d(images, weight, Ten<1>(), o);
    else
      return ch::conv2d(images, weight, own..., o);
  };
  const auto run = [&](auto x) {
    if constexpr (bias)
      return op(f, x, w, b);
    else
      return op(f, x, w);
  };
  return c.dx ? run(var<4>(c.x, 1)) : run(rnd<4>(c.x, 1));
}
const int registered = [] {
  for (const auto& c : convs) Reg(c.name, [&c] { return c.bias ? conv_run<true>(c) : conv_run<false>(c); });
  return 0;
}();
const Reg all[] = {
    {"conv_3x3_fwd_b1_64x56",
     [] {
       return op([](const auto& x, const auto& w) { return ch::conv2d(x, w, Ten<1>(), {.padding = 1}); },
                 rnd<4>({1, 64, 56, 56}, 1), rnd<4>({64, 64, 3, 3}, 2, 0.1));
     }},
    {"conv_double_3x3_b4_64x28",
     [] {
       return op([](const auto& x, const auto& w) { return ch::conv2d(x, w, Ten<1, double>(), {.padding = 1}); },
                 var<4, double>({4, 64, 28, 28}, 1), var<4, double>({64, 64, 3, 3}, 2, 0.1));
     }},
    {"conv_bf16_3x3_b4_64x28",
     [] {
       return op([](const auto& x, const auto& w) { return ch::conv2d(x, w, Ten<1, ch::bf16>(), {.padding = 1}); },
                 var<4, ch::bf16>({4, 64, 28, 28}, 1), var<4, ch::bf16>({64, 64, 3, 3}, 2, 0.1));
     }},
    {"conv1d_raw_k80_s16_b8",
     [] {
       return op([](const auto& x, const auto& w, const auto& b) { return ch::conv1d(x, w, b, {.stride = 16}); },
                 rnd<3>({8, 1, 16000}, 1), var<3>({64, 1, 80}, 2, 0.1), var<1>({64}, 3));
     }},
    {"conv1d_k3_b8_128x2000",
     [] {
       return op([](const auto& x, const auto& w, const auto& b) { return ch::conv1d(x, w, b, {.padding = 1}); },
                 var<3>({8, 128, 2000}, 1), var<3>({128, 128, 3}, 2, 0.1), var<1>({128}, 3));
     }},
    {"conv1d_dw_k31_b8_256x500",
     [] {
       return op([](const auto& x, const auto& w,
                    const auto& b) { return ch::conv1d(x, w, b, {.padding = 15, .groups = 256}); },
                 var<3>({8, 256, 500}, 1), var<3>({256, 1, 31}, 2, 0.1), var<1>({256}, 3));
     }},
    {"conv3d_3x3x3_b2_16to32_16x56x56",
     [] {
       return op([](const auto& x, const auto& w, const auto& b) { return ch::conv3d(x, w, b, {.padding = 1}); },
                 var<5>({2, 16, 16, 56, 56}, 1), var<5>({32, 16, 3, 3, 3}, 2, 0.1), var<1>({32}, 3));
     }},
    {"convT2d_k2s2_b4_128to64x32",
     [] {
       return op(
           [](const auto& x, const auto& w, const auto& b) { return ch::conv_transpose2d(x, w, b, {.stride = 2}); },
           var<4>({4, 128, 32, 32}, 1), var<4>({128, 64, 2, 2}, 2, 0.1), var<1>({64}, 3));
     }},
    {"convT2d_k4s2_b16_256to128x8",
     [] {
       return op([](const auto& x, const auto& w) { return ch::conv_transpose2d(x, w, {.stride = 2, .padding = 1}); },
                 var<4>({16, 256, 8, 8}, 1), var<4>({256, 128, 4, 4}, 2, 0.1));
     }},
    {"maxpool_3x3s2_b8_64x112",
     [] {
       return op([](const auto& x) { return ch::max_pool2d(x, 3, {.stride = 2, .padding = 1}); },
                 var<4>({8, 64, 112, 112}, 1));
     }},
    {"maxpool_2x2_b32_64x32",
     [] {
       return op([](const auto& x) { return ch::max_pool2d(x, 2); }, var<4>({32, 64, 32, 32}, 1));
     }},
    {"avgpool_2x2_b8_128x56",
     [] {
       return op([](const auto& x) { return ch::avg_pool2d(x, 2); }, var<4>({8, 128, 56, 56}, 1));
     }},
    {"avgpool_3x3s1p1_b8_192x28",
     [] {
       return op(
           [](const auto& x) { return ch::avg_pool2d(x, 3, {.stride = 1, .padding = 1, .count_include_pad = false}); },
           var<4>({8, 192, 28, 28}, 1));
     }},
    {"adaptive_avg_7_b8_512x14",
     [] {
       return op([](const auto& x) { return ch::adaptive_avg_pool2d(x, 7); }, var<4>({8, 512, 14, 14}, 1));
     }},
    {"adaptive_avg_5_b8_64x37",
     [] {
       return op([](const auto& x) { return ch::adaptive_avg_pool2d(x, 5); }, var<4>({8, 64, 37, 37}, 1));
     }},
    {"global_avg_b8_2048x7",
     [] {
       return op([](const auto& x) { return ch::global_avg_pool(x); }, var<4>({8, 2048, 7, 7}, 1));
     }},
    {"adaptive_max_7_b8_512x14",
     [] {
       return op([](const auto& x) { return ch::adaptive_max_pool2d(x, 7); }, var<4>({8, 512, 14, 14}, 1));
     }},
    {"upsample_nearest2_b4_64x64",
     [] {
       return op([](const auto& x) { return ch::upsample_nearest2d(x, 2); }, var<4>({4, 64, 64, 64}, 1));
     }},
    {"upsample_bilinear_b4_64x64to128",
     [] {
       return op([](const auto& x) { return ch::upsample_bilinear2d(x, 128); }, var<4>({4, 64, 64, 64}, 1));
     }},
    {"pad2d_zero1_b8_64x56",
     [] {
       return op(
           [](const auto& x) {
             return ch::pad2d(x, ch::Padding2d{1, 1, 1, 1}, 0.0);
           },
           var<4>({8, 64, 56, 56}, 1));
     }},
};
}  // namespace
