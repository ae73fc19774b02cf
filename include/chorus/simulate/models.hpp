#pragma once
/// What a simulation has to know of a model: how large its parameters are, and how its time falls to them.

#include <charconv>
#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::simulated {

/// A parameter, in the order of the forward pass. Its gradient takes its part of backward's time by its operations.
struct ParameterSize {
  std::size_t count = 0;
  double operations = 0;
  bool begins_layer = true;  ///< else it belongs to the layer of the one before
};
struct ModelSizes {
  std::string name = {};
  std::vector<ParameterSize> parameters = {};
  std::vector<std::size_t> buffers = {};  ///< bytes of each
  std::size_t sample = 0, output = 0;     ///< bytes of a sample's input, and of what the model makes of it; 0: a loss
  int layers = 0;                         ///< a transformer's, of which each has `of_layer` parameters, from `first` on
  std::size_t first = 0, of_layer = 0;
  std::size_t activation = 0;             ///< bytes of a sample between them; 0: they differ from place to place

  std::size_t count() const {
    std::size_t sum = 0;
    for (const auto& parameter : parameters) sum += parameter.count;
    return sum;
  }

  /// Bytes that its parameters take together, as nn::FlatParameters lays them out in the host's memory: the last first.
  std::size_t flat_bytes() const {
    std::size_t end = 0;
    for (std::size_t i = parameters.size(); i-- > 0;) {
      const auto count = parameters[i].count;
      end = parameter_place<Cpu>(end, count, sizeof(float)) + padded_count<Cpu>(count, sizeof(float));
    }
    return end * sizeof(float);
  }

  /// A weight that is used `uses` times for each sample, and a bias of as many numbers as it has outputs.
  void add(std::size_t weight, std::size_t bias, double uses) {
    parameters.push_back({weight, static_cast<double>(weight) * uses});
    if (bias > 0) parameters.push_back({bias, static_cast<double>(bias) * uses, false});
  }
};

/// An image of 224 x 224, and what is said of 1000 classes.
inline constexpr std::size_t image_bytes = 3 * 224 * 224 * sizeof(float), class_bytes = 1000 * sizeof(float);

/// ResNet of bottlenecks (He et al., CVPR 2016) for 224 x 224 images and 1000 classes: 50, 101 or 152 layers.
[[gnu::cold]] inline ModelSizes resnet_sizes(std::string_view name, const std::vector<std::size_t>& blocks) {
  ModelSizes model{.name = std::string(name), .sample = image_bytes, .output = class_bytes};
  const auto convolution = [&](std::size_t in, std::size_t out, std::size_t kernel, double side) {
    model.add(in * out * kernel * kernel, 0, side * side);
    model.add(out, out, side * side);  // batch norm, with its mean, variance and count
    for (const std::size_t bytes : {out * sizeof(float), out * sizeof(float), sizeof(std::int64_t)})
      model.buffers.push_back(bytes);
  };
  convolution(3, 64, 7, 112);
  std::size_t in = 64;
  double side = 56;
  for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
    const auto width = std::size_t{64} << stage;
    for (std::size_t block = 0; block < blocks[stage]; ++block) {
      const bool halves = block == 0 && stage > 0;
      convolution(in, width, 1, halves ? 2 * side : side);
      convolution(width, width, 3, side);
      convolution(width, 4 * width, 1, side);
      if (block == 0) convolution(in, 4 * width, 1, side);
      in = 4 * width;
    }
    side /= 2;
  }
  model.add(in * 1000, 1000, 1);
  return model;
}
/// VGG-16 (Simonyan and Zisserman, ICLR 2015).
[[gnu::cold]] inline ModelSizes vgg16_sizes() {
  ModelSizes model{.name = "vgg16", .sample = image_bytes, .output = class_bytes};
  std::size_t in = 3;
  double side = 224;
  for (const auto& [width, layers] : {std::pair<std::size_t, int>{64, 2}, {128, 2}, {256, 3}, {512, 3}, {512, 3}}) {
    for (int layer = 0; layer < layers; ++layer) {
      model.add(in * width * 9, width, side * side);
      in = width;
    }
    side /= 2;
  }
  model.add(in * 49 * 4096, 4096, 1);
  model.add(std::size_t{4096} * 4096, 4096, 1);
  model.add(std::size_t{4096} * 1000, 1000, 1);
  return model;
}
/// BERT (Devlin et al., NAACL 2019): encoder and pooler. Embeddings are looked up, which takes no operations. A sample
/// is 512 tokens, each with its segment and mask.
[[gnu::cold]] inline ModelSizes bert_sizes(std::string_view name, std::size_t layers, std::size_t width) {
  ModelSizes model{.name = std::string(name),
                   .sample = 3 * 512 * sizeof(std::int64_t),
                   .output = width * sizeof(float),
                   .layers = static_cast<int>(layers),
                   .activation = 512 * width * sizeof(float)};
  for (const std::size_t rows : {std::size_t{30522}, std::size_t{512}, std::size_t{2}}) model.add(rows * width, 0, 0);
  model.add(width, width, 1);
  model.first = model.parameters.size();
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (int projection = 0; projection < 4; ++projection) model.add(width * width, width, 1);
    model.add(width, width, 1);
    model.add(4 * width * width, 4 * width, 1);
    model.add(4 * width * width, width, 1);
    model.add(width, width, 1);
  }
  model.of_layer = (model.parameters.size() - model.first) / layers;
  model.add(width * width, width, 0);
  return model;
}

/// GPT-2 (Radford et al., 2019) and GPT-3 (Brown et al., NeurIPS 2020): a decoder of that many layers, whose last one
/// is the table of tokens again. A sample is its tokens; the model returns its loss.
[[gnu::cold]] inline ModelSizes gpt_sizes(std::string_view name, std::size_t layers, std::size_t width,
                                          std::size_t tokens) {
  ModelSizes model{.name = std::string(name),
                   .sample = tokens * sizeof(std::int64_t),
                   .layers = static_cast<int>(layers),
                   .activation = tokens * width * sizeof(float)};
  const auto uses = static_cast<double>(tokens);
  model.add(50257 * width, 0, uses);
  model.add(tokens * width, 0, 0);
  model.first = model.parameters.size();
  for (std::size_t layer = 0; layer < layers; ++layer) {
    model.add(width, width, uses);
    model.add(3 * width * width, 3 * width, uses);
    model.add(width * width, width, uses);
    model.add(width, width, uses);
    model.add(4 * width * width, 4 * width, uses);
    model.add(4 * width * width, width, uses);
  }
  model.of_layer = (model.parameters.size() - model.first) / layers;
  model.add(width, width, uses);
  return model;
}

/// `resnet50`, `resnet101`, `resnet152`, `vgg16`, `bert_base`, `bert_large`, `gpt2`, `gpt2_medium`, `gpt2_large`,
/// `gpt2_xl`, `gpt3_6.7b`, `gpt3_175b`; or a number of bytes of f32, as 64 parameters of one size, without inputs, that
/// make a loss. Throws UsageError for other names.
[[gnu::cold]] inline ModelSizes model_named(std::string_view name) {
  if (name == "resnet50") return resnet_sizes(name, {3, 4, 6, 3});
  if (name == "resnet101") return resnet_sizes(name, {3, 4, 23, 3});
  if (name == "resnet152") return resnet_sizes(name, {3, 8, 36, 3});
  if (name == "vgg16") return vgg16_sizes();
  if (name == "bert_base") return bert_sizes(name, 12, 768);
  if (name == "bert_large") return bert_sizes(name, 24, 1024);
  if (name == "gpt2") return gpt_sizes(name, 12, 768, 1024);
  if (name == "gpt2_medium") return gpt_sizes(name, 24, 1024, 1024);
  if (name == "gpt2_large") return gpt_sizes(name, 36, 1280, 1024);
  if (name == "gpt2_xl") return gpt_sizes(name, 48, 1600, 1024);
  if (name == "gpt3_6.7b") return gpt_sizes(name, 32, 4096, 2048);
  if (name == "gpt3_175b") return gpt_sizes(name, 96, 12288, 2048);
  std::size_t bytes = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), bytes);
  check<UsageError>(
      error == std::errc() && end == name.data() + name.size() && bytes >= 256 && bytes <= 1'000'000'000'000,
      "model: got ", printable(name),
      ": expected resnet50, resnet101, resnet152, vgg16, bert_base, bert_large, gpt2, gpt2_medium, gpt2_large, "
      "gpt2_xl, gpt3_6.7b, gpt3_175b, or bytes from 256 to 1e12");
  ModelSizes model{.name = cat(bytes, " bytes")};
  const auto numbers = bytes / 4;
  for (std::size_t i = 0; i < 64; ++i) model.add(numbers * (i + 1) / 64 - numbers * i / 64, 0, 1);
  return model;
}

}  // namespace chorus::simulated
