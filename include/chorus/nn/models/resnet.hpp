#pragma once
/// ResNet (He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015), with torchvision's names and
/// structure, so that its weights can be loaded: the 3 x 3 convolution of a bottleneck has the stride.

#include <array>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/init.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/pooling.hpp>
#include <cmath>
#include <optional>

namespace chorus::nn {

/// The images of a ResNet and the number of classes.
struct ResNetOptions {
  Index channels = 3, classes = 1000;
  /// Channels of the first stage.
  Index width = 64;
  /// Whether images enter through a 3 x 3 convolution alone (the form for CIFAR), not through a 7 x 7 convolution and
  /// pooling that leave a quarter of each side.
  bool small_images = false;
};

namespace detail {

/// A convolution without bias: batch norm comes after it. N(0, 2 / fan_out), as in torchvision.
template <class D>
Conv2d<D> resnet_convolution(Index in, Index out, Index kernel, Index stride = 1) {
  Conv2d<D> layer{in, out, {.kernel = kernel, .stride = stride, .padding = kernel / 2, .bias = false}};
  const double deviation = std::sqrt(2.0 / static_cast<double>(out * kernel * kernel));
  layer.weight.assign(init::normal<float, D, 4>(layer.weight.shape(), 0, deviation));
  return layer;
}

template <class D>
using ResNetShortcut = Sequential<Conv2d<D>, BatchNorm2d<D>>;

/// The shortcut around a block whose output has another shape than its input.
template <class D>
std::optional<ResNetShortcut<D>> resnet_shortcut(Index in, Index out, Index stride) {
  if (in == out && stride == 1) return std::nullopt;
  return ResNetShortcut<D>{resnet_convolution<D>(in, out, 1, stride), BatchNorm2d<D>{out}};
}

}  // namespace detail

/// Two 3 x 3 convolutions; the input is added to their result. x: [batch, in, height, width].
template <class D>
struct ResNetBasicBlock : Module {
  static constexpr Index expansion = 1;
  Conv2d<D> conv1, conv2;
  BatchNormReLU2d<D> bn1, bn2;
  std::optional<detail::ResNetShortcut<D>> downsample;
  CHORUS_MODULE(BasicBlock, conv1, bn1, conv2, bn2, downsample)

  ResNetBasicBlock(Index in, Index width, Index stride)
      : conv1{detail::resnet_convolution<D>(in, width, 3, stride)},
        conv2{detail::resnet_convolution<D>(width, width, 3)},
        bn1{width},
        bn2{width},
        downsample{detail::resnet_shortcut<D>(in, width, stride)} {}

  auto forward(const auto& x) const {
    const auto y = conv2(bn1(conv1(x)));
    return downsample ? bn2(y, (*downsample)(x)) : bn2(y, x);
  }
};

/// 1 x 1 to fewer channels, 3 x 3, 1 x 1 to four times as many. x: [batch, in, height, width].
template <class D>
struct ResNetBottleneck : Module {
  static constexpr Index expansion = 4;
  Conv2d<D> conv1, conv2, conv3;
  BatchNormReLU2d<D> bn1, bn2, bn3;
  std::optional<detail::ResNetShortcut<D>> downsample;
  CHORUS_MODULE(Bottleneck, conv1, bn1, conv2, bn2, conv3, bn3, downsample)

  ResNetBottleneck(Index in, Index width, Index stride)
      : conv1{detail::resnet_convolution<D>(in, width, 1)},
        conv2{detail::resnet_convolution<D>(width, width, 3, stride)},
        conv3{detail::resnet_convolution<D>(width, expansion * width, 1)},
        bn1{width},
        bn2{width},
        bn3{expansion * width},
        downsample{detail::resnet_shortcut<D>(in, expansion * width, stride)} {}

  auto forward(const auto& x) const {
    const auto y = conv3(bn2(conv2(bn1(conv1(x)))));
    return downsample ? bn3(y, (*downsample)(x)) : bn3(y, x);
  }
};

/// images: [batch, channels, height, width] -> scores: [batch, classes]. Four stages of blocks; each but the first
/// halves the image.
template <class D, class Block>
struct ResNet : Module {
  Conv2d<D> conv1;
  BatchNormReLU2d<D> bn1;
  ModuleList<Block> layer1, layer2, layer3, layer4;
  Linear<D> fc;
  CHORUS_MODULE(ResNet, conv1, bn1, layer1, layer2, layer3, layer4, fc)

  /// `blocks`: the number of blocks of each stage.
  explicit ResNet(const std::array<int, 4>& blocks, const ResNetOptions& options = {})
      : conv1{options.small_images ? detail::resnet_convolution<D>(options.channels, options.width, 3)
                                   : detail::resnet_convolution<D>(options.channels, options.width, 7, 2)},
        bn1{options.width},
        layer1{stage(options.width, options.width, blocks[0], 1)},
        layer2{stage(options.width * Block::expansion, 2 * options.width, blocks[1], 2)},
        layer3{stage(2 * options.width * Block::expansion, 4 * options.width, blocks[2], 2)},
        layer4{stage(4 * options.width * Block::expansion, 8 * options.width, blocks[3], 2)},
        fc{8 * options.width * Block::expansion, options.classes},
        small_{options.small_images} {}

  auto forward(const auto& images) const {
    auto x = bn1(conv1(images));
    if (!small_) x = max_pool2d(x, 3, {.stride = 2, .padding = 1});
    for (const auto* layer : {&layer1, &layer2, &layer3, &layer4})
      for (const auto& block : *layer) x = block(x);
    return fc(global_avg_pool(x));
  }

 private:
  static ModuleList<Block> stage(Index in, Index width, int count, Index stride) {
    ModuleList<Block> blocks;
    for (int i = 0; i < count; ++i)
      blocks.push_back(i == 0 ? Block(in, width, stride) : Block(width * Block::expansion, width, 1));
    return blocks;
  }

  bool small_;
};

/// torchvision's resnet18.
template <class D>
struct ResNet18 : ResNet<D, ResNetBasicBlock<D>> {
  explicit ResNet18(const ResNetOptions& options = {}) : ResNet18::ResNet({2, 2, 2, 2}, options) {}
};
/// torchvision's resnet50.
template <class D>
struct ResNet50 : ResNet<D, ResNetBottleneck<D>> {
  explicit ResNet50(const ResNetOptions& options = {}) : ResNet50::ResNet({3, 4, 6, 3}, options) {}
};

}  // namespace chorus::nn
