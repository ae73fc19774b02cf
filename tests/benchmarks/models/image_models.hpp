#pragma once
/// Models of images, with the layers and the parameter order of models/torch_models.py.

#include <array>
#include <chorus/chorus.hpp>
#include <chorus/nn/convolutions.hpp>
#include <optional>

namespace bench {

using D = ch::Cpu;
namespace nn = ch::nn;

inline nn::Conv2d<D> conv(ch::Index in, ch::Index out, ch::Index kernel, ch::Index stride = 1, ch::Index groups = 1) {
  return {in, out, {.kernel = kernel, .stride = stride, .padding = kernel / 2, .groups = groups, .bias = false}};
}

/// A block of MobileNetV2 (Sandler et al. 2018): 1 x 1 to more channels, 3 x 3 of each channel, 1 x 1 back.
struct InvertedResidual : nn::Module {
  std::optional<nn::Conv2d<D>> expand;
  std::optional<nn::BatchNorm2d<D>> bn0;
  nn::Conv2d<D> depthwise;
  nn::BatchNorm2d<D> bn1;
  nn::Conv2d<D> project;
  nn::BatchNorm2d<D> bn2;
  bool skip;
  CHORUS_MODULE(InvertedResidual, expand, bn0, depthwise, bn1, project, bn2)
  InvertedResidual(ch::Index in, ch::Index out, ch::Index stride, ch::Index times)
      : depthwise{conv(in * times, in * times, 3, stride, in * times)},
        bn1{in * times},
        project{conv(in * times, out, 1)},
        bn2{out},
        skip{stride == 1 && in == out} {
    if (times == 1) return;
    expand.emplace(conv(in, in * times, 1));
    bn0.emplace(in * times);
  }
  auto forward(const auto& x) const {
    auto y = x;
    if (expand) y = ch::relu6((*bn0)((*expand)(y)));
    y = bn2(project(ch::relu6(bn1(depthwise(y)))));
    return skip ? decltype(y)(x + y) : y;
  }
};

struct MobileNetV2 : nn::Module {
  nn::Conv2d<D> stem{conv(3, 32, 3, 2)};
  nn::BatchNorm2d<D> bn{32};
  nn::ModuleList<InvertedResidual> blocks;
  nn::Conv2d<D> last{conv(320, 1280, 1)};
  nn::BatchNorm2d<D> bn2{1280};
  nn::Linear<D> fc{1280, 1000};
  CHORUS_MODULE(MobileNetV2, stem, bn, blocks, last, bn2, fc)
  MobileNetV2() {
    struct Stage {
      ch::Index times, channels, blocks, stride;
    };
    constexpr Stage stages[] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                                {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};
    ch::Index in = 32;
    for (const auto& stage : stages)
      for (ch::Index i = 0; i < stage.blocks; ++i) {
        blocks.push_back(InvertedResidual(in, stage.channels, i == 0 ? stage.stride : 1, stage.times));
        in = stage.channels;
      }
  }
  auto forward(const auto& images) const {
    auto x = ch::relu6(bn(stem(images)));
    for (const auto& block : blocks) x = block(x);
    return fc(ch::global_avg_pool(ch::relu6(bn2(last(x)))));
  }
};

struct TwoConvolutions : nn::Module {
  nn::Conv2d<D> c1;
  nn::BatchNormReLU2d<D> b1;
  nn::Conv2d<D> c2;
  nn::BatchNormReLU2d<D> b2;
  CHORUS_MODULE(TwoConvolutions, c1, b1, c2, b2)
  TwoConvolutions(ch::Index in, ch::Index out) : c1{conv(in, out, 3)}, b1{out}, c2{conv(out, out, 3)}, b2{out} {}
  auto forward(const auto& x) const { return b2(c2(b1(c1(x)))); }
};

/// Four scales, 32 to 256 channels, 5 classes of pixels (Ronneberger et al. 2015).
struct UNet : nn::Module {
  TwoConvolutions d1{3, 32}, d2{32, 64}, d3{64, 128}, d4{128, 256};
  nn::ConvTranspose2d<D> u3{256, 128, {.kernel = 2, .stride = 2}}, u2{128, 64, {.kernel = 2, .stride = 2}},
      u1{64, 32, {.kernel = 2, .stride = 2}};
  TwoConvolutions e3{256, 128}, e2{128, 64}, e1{64, 32};
  nn::Conv2d<D> out{32, 5, {.kernel = 1}};
  CHORUS_MODULE(UNet, d1, d2, d3, d4, u3, u2, u1, e3, e2, e1, out)
  auto forward(const auto& x) const {
    const auto a = d1(x), b = d2(ch::max_pool2d(a, 2)), c = d3(ch::max_pool2d(b, 2)), d = d4(ch::max_pool2d(c, 2));
    const auto p = e3(ch::concat(1, c, u3(d))), q = e2(ch::concat(1, b, u2(p)));
    return out(e1(ch::concat(1, a, u1(q))));
  }
};

inline nn::ConvTranspose2d<D> twice_as_large(ch::Index in, ch::Index out) {
  return {in, out, {.kernel = 4, .stride = 2, .padding = 1, .bias = false}};
}
inline nn::Conv2d<D> half_as_large(ch::Index in, ch::Index out) {
  return {in, out, {.kernel = 4, .stride = 2, .padding = 1, .bias = false}};
}

/// DCGAN (Radford et al. 2016) of images of 64 x 64.
struct Generator : nn::Module {
  nn::ConvTranspose2d<D> c0{100, 512, {.kernel = 4, .bias = false}};
  nn::BatchNormReLU2d<D> b0{512};
  nn::ConvTranspose2d<D> c1{twice_as_large(512, 256)};
  nn::BatchNormReLU2d<D> b1{256};
  nn::ConvTranspose2d<D> c2{twice_as_large(256, 128)};
  nn::BatchNormReLU2d<D> b2{128};
  nn::ConvTranspose2d<D> c3{twice_as_large(128, 64)};
  nn::BatchNormReLU2d<D> b3{64};
  nn::ConvTranspose2d<D> c4{twice_as_large(64, 3)};
  CHORUS_MODULE(Generator, c0, b0, c1, b1, c2, b2, c3, b3, c4)
  auto forward(const auto& z) const { return ch::tanh(c4(b3(c3(b2(c2(b1(c1(b0(c0(z)))))))))); }
};
struct Discriminator : nn::Module {
  nn::Conv2d<D> c0{half_as_large(3, 64)}, c1{half_as_large(64, 128)};
  nn::BatchNorm2d<D> b1{128};
  nn::Conv2d<D> c2{half_as_large(128, 256)};
  nn::BatchNorm2d<D> b2{256};
  nn::Conv2d<D> c3{half_as_large(256, 512)};
  nn::BatchNorm2d<D> b3{512};
  nn::Conv2d<D> c4{512, 1, {.kernel = 4, .bias = false}};
  CHORUS_MODULE(Discriminator, c0, c1, b1, c2, b2, c3, b3, c4)
  auto forward(const auto& x) const {
    auto y = ch::leaky_relu(c0(x), 0.2);
    y = ch::leaky_relu(b1(c1(y)), 0.2);
    y = ch::leaky_relu(b2(c2(y)), 0.2);
    y = ch::leaky_relu(b3(c3(y)), 0.2);
    return ch::flatten<0>(c4(y));
  }
};

}  // namespace bench
