#pragma once
/// The models of train_classifier.

#include <chorus/chorus.hpp>
#include <chorus/nn/models/resnet.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "models/image_facts.hpp"

/// A ResNet's options for such images.
inline chorus::nn::ResNetOptions resnet_options(const ImageFacts& image) {
  return {.channels = image.channels,
          .classes = image.classes,
          .small_images = image.height <= 64 && image.width <= 64};
}

/// A LeNet: two convolutions, three linear layers. Images of 28 x 28 are padded to 32 x 32.
template <class Device>
struct ToyModel : chorus::nn::Module {
  chorus::nn::Conv2d<Device> conv1, conv2;
  chorus::nn::ColumnParallelLinear<Device> fc1;  // under tensor parallelism ranks divide fc1 and fc2
  chorus::nn::RowParallelLinear<Device> fc2;
  chorus::nn::Linear<Device> fc3;
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
  static chorus::Index pooled(chorus::Index size, chorus::Index padding) {
    return ((size + 2 * padding - 4) / 2 - 4) / 2;
  }
};

/// Three linear layers with dropout between them.
template <class Device>
struct Mlp : chorus::nn::Module {
  chorus::nn::ColumnParallelLinear<Device> fc1;  // as above
  chorus::nn::RowParallelLinear<Device> fc2;
  chorus::nn::Linear<Device> fc3;
  chorus::nn::Dropout dropout{0.2};
  CHORUS_MODULE(Mlp, fc1, fc2, fc3, dropout)

  explicit Mlp(const ImageFacts& image)
      : fc1{image.channels * image.height * image.width, 256}, fc2{256, 128}, fc3{128, image.classes} {}

  auto forward(const auto& images) const {
    auto x = dropout(chorus::relu(fc1(chorus::flatten(images))));
    return fc3(dropout(chorus::relu(fc2(x))));
  }
};

/// One of several models, chosen at run time: a single type, so that a program compiles each policy once.
template <class Device, class... Models>
struct OneOf : chorus::nn::Module {
  using device_type = Device;
  std::variant<Models...> model;

  explicit OneOf(std::variant<Models...> chosen) : model{std::move(chosen)} {}

  auto forward(const auto& images) const {
    return std::visit([&](const auto& chosen) { return chosen.forward(images); }, model);
  }
  void visit(chorus::nn::Visitor& visitor) override {
    const auto see = [&](auto& chosen) {
      visitor.inner(chosen);
      chosen.visit(visitor);
    };
    std::visit(see, model);
  }
  std::string describe() const override {
    return std::visit([](const auto& chosen) { return chosen.describe(); }, model);
  }
};

/// One of the models above, by its name.
template <class Device>
struct Classifier : OneOf<Device, ToyModel<Device>, Mlp<Device>, chorus::nn::ResNet18<Device>,
                          chorus::nn::ResNet50<Device>> {
  static constexpr const char* names[] = {"toy", "mlp", "resnet18", "resnet50"};

  Classifier(std::string_view name, const ImageFacts& image) : Classifier::OneOf{make(name, image)} {}

 private:
  static decltype(Classifier::OneOf::model) make(std::string_view name, const ImageFacts& image) {
    if (name == "toy") return ToyModel<Device>(image);
    if (name == "mlp") return Mlp<Device>(image);
    if (name == "resnet18") return chorus::nn::ResNet18<Device>(resnet_options(image));
    chorus::check<chorus::UsageError>(name == "resnet50", "--model: unknown model '", chorus::printable(name), "'");
    return chorus::nn::ResNet50<Device>(resnet_options(image));
  }
};
