#pragma once
/// The models of train_classifier.

#include <chorus/chorus.hpp>

/// What a model has to know of its images.
struct ImageFacts {
  chorus::Index channels, height, width, classes;
};

/// LeNet's form: two convolutions, three linear layers. Images of 28 x 28 are padded to its 32 x 32.
template <class Device>
struct ToyModel : chorus::nn::Module {
  chorus::nn::Conv2d<Device> conv1, conv2;
  chorus::nn::Linear<Device> fc1, fc2, fc3;
  CHORUS_MODULE(ToyModel, conv1, conv2, fc1, fc2, fc3)

  explicit ToyModel(const ImageFacts& image)
      : conv1{image.channels, 6, {.kernel = 5, .padding = padding(image)}},
        conv2{6, 16, {.kernel = 5}},
        fc1{16 * pooled(image.height, padding(image)) * pooled(image.width, padding(image)), 120},
        fc2{120, 84},
        fc3{84, image.classes} {}

  auto forward(const auto& images) const {
    auto x = chorus::max_pool2d(chorus::relu(conv1(images)), 2);
    x = chorus::max_pool2d(chorus::relu(conv2(x)), 2);
    return fc3(chorus::relu(fc2(chorus::relu(fc1(chorus::flatten(x))))));
  }

 private:
  static chorus::Index padding(const ImageFacts& image) { return image.height < 32 ? 2 : 0; }
  static chorus::Index pooled(chorus::Index size, chorus::Index padding) { return ((size + 2 * padding - 4) / 2 - 4) / 2; }
};

/// Three linear layers with dropout between them.
template <class Device>
struct Mlp : chorus::nn::Module {
  chorus::nn::Linear<Device> fc1, fc2, fc3;
  chorus::nn::Dropout dropout{0.2};
  CHORUS_MODULE(Mlp, fc1, fc2, fc3, dropout)

  explicit Mlp(const ImageFacts& image)
      : fc1{image.channels * image.height * image.width, 256}, fc2{256, 128}, fc3{128, image.classes} {}

  auto forward(const auto& images) const {
    auto x = dropout(chorus::relu(fc1(chorus::flatten(images))));
    return fc3(dropout(chorus::relu(fc2(x))));
  }
};
