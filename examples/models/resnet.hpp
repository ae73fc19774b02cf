#pragma once
/// ResNet-18 and ResNet-50 (He, Zhang, Ren, Sun 2015), with torchvision's names and structure, so that its weights can
/// be loaded: the 3 x 3 convolution of a bottleneck has the stride.

#include <array>
#include <chorus/chorus.hpp>
#include <cmath>
#include <optional>

#include "image_facts.hpp"

namespace resnet {

namespace ch = chorus;

/// A convolution without bias: batch norm comes after it. N(0, 2 / fan_out), as in torchvision.
template <class Device>
ch::nn::Conv2d<Device> conv(ch::Index in, ch::Index out, ch::Index kernel, ch::Index stride = 1) {
  ch::nn::Conv2d<Device> layer{in, out, {.kernel = kernel, .stride = stride, .padding = kernel / 2, .bias = false}};
  const double deviation = std::sqrt(2.0 / static_cast<double>(out * kernel * kernel));
  layer.weight.assign(ch::nn::init::normal<float, Device, 4>(layer.weight.shape(), 0, deviation));
  return layer;
}

template <class Device>
using Shortcut = ch::nn::Sequential<ch::nn::Conv2d<Device>, ch::nn::BatchNorm2d<Device>>;

/// The shortcut around a block whose output has another shape than its input.
template <class Device>
std::optional<Shortcut<Device>> shortcut(ch::Index in, ch::Index out, ch::Index stride) {
  if (in == out && stride == 1) return std::nullopt;
  return Shortcut<Device>{conv<Device>(in, out, 1, stride), ch::nn::BatchNorm2d<Device>{out}};
}

/// Two 3 x 3 convolutions; the input is added to their result.
template <class Device>
struct BasicBlock : ch::nn::Module {
  static constexpr ch::Index expansion = 1;
  ch::nn::Conv2d<Device> conv1, conv2;
  ch::nn::BatchNormReLU2d<Device> bn1, bn2;
  std::optional<Shortcut<Device>> downsample;
  CHORUS_MODULE(BasicBlock, conv1, bn1, conv2, bn2, downsample)

  BasicBlock(ch::Index in, ch::Index width, ch::Index stride)
      : conv1{conv<Device>(in, width, 3, stride)},
        conv2{conv<Device>(width, width, 3)},
        bn1{width},
        bn2{width},
        downsample{shortcut<Device>(in, width, stride)} {}

  auto forward(const auto& x) const {
    const auto y = conv2(bn1(conv1(x)));
    return downsample ? bn2(y, (*downsample)(x)) : bn2(y, x);
  }
};

/// 1 x 1 to fewer channels, 3 x 3, 1 x 1 to four times as many.
template <class Device>
struct Bottleneck : ch::nn::Module {
  static constexpr ch::Index expansion = 4;
  ch::nn::Conv2d<Device> conv1, conv2, conv3;
  ch::nn::BatchNormReLU2d<Device> bn1, bn2, bn3;
  std::optional<Shortcut<Device>> downsample;
  CHORUS_MODULE(Bottleneck, conv1, bn1, conv2, bn2, conv3, bn3, downsample)

  Bottleneck(ch::Index in, ch::Index width, ch::Index stride)
      : conv1{conv<Device>(in, width, 1)},
        conv2{conv<Device>(width, width, 3, stride)},
        conv3{conv<Device>(width, expansion * width, 1)},
        bn1{width},
        bn2{width},
        bn3{expansion * width},
        downsample{shortcut<Device>(in, expansion * width, stride)} {}

  auto forward(const auto& x) const {
    const auto y = conv3(bn2(conv2(bn1(conv1(x)))));
    return downsample ? bn3(y, (*downsample)(x)) : bn3(y, x);
  }
};

/// Four stages of blocks; each but the first halves the image. Images up to 64 x 64 enter directly (the form for
/// CIFAR), larger ones through a 7 x 7 convolution and pooling that leave a quarter of each side.
template <class Device, class Block>
struct ResNet : ch::nn::Module {
  ch::nn::Conv2d<Device> conv1;
  ch::nn::BatchNormReLU2d<Device> bn1{64};
  ch::nn::ModuleList<Block> layer1, layer2, layer3, layer4;
  ch::nn::Linear<Device> fc;
  CHORUS_MODULE(ResNet, conv1, bn1, layer1, layer2, layer3, layer4, fc)

  ResNet(const std::array<int, 4>& blocks, const ImageFacts& image)
      : conv1{is_small(image) ? conv<Device>(image.channels, 64, 3) : conv<Device>(image.channels, 64, 7, 2)},
        layer1{stage(64, 64, blocks[0], 1)},
        layer2{stage(64 * Block::expansion, 128, blocks[1], 2)},
        layer3{stage(128 * Block::expansion, 256, blocks[2], 2)},
        layer4{stage(256 * Block::expansion, 512, blocks[3], 2)},
        fc{512 * Block::expansion, image.classes},
        small_{is_small(image)} {}

  auto forward(const auto& images) const {
    auto x = bn1(conv1(images));
    if (!small_) x = ch::max_pool2d(x, 3, {.stride = 2, .padding = 1});
    for (const auto* layer : {&layer1, &layer2, &layer3, &layer4})
      for (const auto& block : *layer) x = block(x);
    return fc(ch::global_avg_pool(x));
  }

 private:
  static bool is_small(const ImageFacts& image) { return image.height <= 64 && image.width <= 64; }
  static ch::nn::ModuleList<Block> stage(ch::Index in, ch::Index width, int count, ch::Index stride) {
    ch::nn::ModuleList<Block> blocks;
    for (int i = 0; i < count; ++i)
      blocks.push_back(i == 0 ? Block(in, width, stride) : Block(width * Block::expansion, width, 1));
    return blocks;
  }

  bool small_;
};

}  // namespace resnet

template <class Device>
struct ResNet18 : resnet::ResNet<Device, resnet::BasicBlock<Device>> {
  explicit ResNet18(const ImageFacts& image) : ResNet18::ResNet({2, 2, 2, 2}, image) {}
};
template <class Device>
struct ResNet50 : resnet::ResNet<Device, resnet::Bottleneck<Device>> {
  explicit ResNet50(const ImageFacts& image) : ResNet50::ResNet({3, 4, 6, 3}, image) {}
};
