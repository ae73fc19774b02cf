#pragma once
/// Small float models for the tests of quantisation-aware training, and comparisons of them.

#include <catch.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/resize.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/quantization/conv_bn_relu.hpp>
#include <chorus/quantization/quantization_aware.hpp>
#include <cstring>
#include <string>

#include <unit/parallel/ranks.hpp>

namespace qat {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu, ch::Index;

/// A residual block with synchronised norms between a convolution and a linear layer; its input is [batch, 48].
struct Cnn : nn::Module {
  nn::ConvBnReLU<Cpu> conv1{3, 4, {.kernel = 3, .padding = 1}};
  nn::Conv2d<Cpu> conv2{4, 4, {.kernel = 3, .padding = 1, .bias = false}};
  nn::BatchNormReLU2d<Cpu> bn2{4};
  nn::Linear<Cpu> fc{4, 3};
  CHORUS_MODULE(Cnn, conv1, conv2, bn2, fc)
  auto forward(const auto& x) const {
    const auto h = conv1(ch::reshape(x, std::array<Index, 4>{-1, 3, 4, 4}));
    return fc(ch::global_avg_pool(ch::max_pool2d(bn2(conv2(h), h), 2)));
  }
};
/// Two linear layers with a ReLU.
struct Mlp : nn::Module {
  nn::Linear<Cpu> fc1{48, 12}, fc2{12, 3};
  CHORUS_MODULE(Mlp, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::relu(fc1(x))); }
};

template <class Model>
Model filled(Model model) {
  std::uint32_t key = 100;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    if (named.name.find("bn") != std::string::npos) continue;
    const auto values = test::numbers(1, named.parameter->count(), key++);
    for (Index i = 0; i < values.numel(); ++i)
      static_cast<float*>(named.parameter->value_data())[i] = static_cast<float>(0.5 * values.data()[i]);
  }
  return model;
}
template <class Model>
using Quantized = nn::QuantizationAware<Model>;
/// The same model wherever it is made, with synchronised norms.
template <class Model>
Quantized<Model> make() {
  return Quantized<Model>{nn::convert_sync_batch_norm(filled(Model{}))};
}

inline ch::Tensor<float, 2> images(Index batch, std::uint32_t key) {
  return ch::to<float>(test::numbers(batch, 48, key));
}

/// The bits of all range buffers of a model, as text.
inline std::string ranges_of(nn::Module& model) {
  std::string text;
  for (const auto& named : nn::named_buffers<Cpu>(model)) {
    if (!named.name.starts_with("quantization.")) continue;
    const auto* const bytes = static_cast<const unsigned char*>(named.buffer->data());
    for (std::size_t i = 0; i < named.buffer->size_bytes(); ++i) text += ch::cat(static_cast<int>(bytes[i]), " ");
  }
  return text;
}

}  // namespace qat
