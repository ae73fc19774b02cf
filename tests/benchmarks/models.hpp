#pragma once
/// The reference models of the step benchmarks, on any kind of device.

#include <chorus/chorus.hpp>
#include <chorus/nn/models/resnet.hpp>
#include <chorus/ops/attention_packed.hpp>

namespace bench {

namespace ch = chorus;

template <class D>
struct Toy : ch::nn::Module {
  ch::nn::Conv2d<D> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  ch::nn::Linear<D> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(Toy, conv1, conv2, fc1, fc2, fc3)
  auto forward(const auto& images) const {
    auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    x = ch::max_pool2d(ch::relu(conv2(x)), 2);
    return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(x))))));
  }
};

template <class D>
struct Mlp : ch::nn::Module {
  ch::nn::Linear<D> fc1{784, 512}, fc2{512, 512}, fc3{512, 10};
  CHORUS_MODULE(Mlp, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(ch::relu(fc2(ch::relu(fc1(x))))); }
};

/// The CIFAR form, 10 classes.
template <class D>
struct ResNet18 : ch::nn::ResNet18<D> {
  ResNet18() : ch::nn::ResNet18<D>({.classes = 10, .small_images = true}) {}
};

template <class D>
struct GptBlock : ch::nn::Module {
  ch::nn::LayerNorm<D> norm1, norm2;
  ch::nn::Linear<D> qkv, proj, fc1, fc2;
  CHORUS_MODULE(GptBlock, norm1, qkv, proj, norm2, fc1, fc2)
  explicit GptBlock(ch::Index width, ch::Index head_count = 4)
      : norm1{width},
        norm2{width},
        qkv{width, 3 * width},
        proj{width, width},
        fc1{width, 4 * width},
        fc2{4 * width, width},
        heads{head_count} {}
  auto forward(const auto& x) const {
    const auto [batch, context, width] = x.shape();
    const auto parts = ch::reshape(qkv(norm1(x)), ch::Shape<5>{batch, context, 3, heads, width / heads});
    const auto seen = ch::scaled_dot_product_attention_packed(parts, {.causal = true});
    const auto y = x + proj(ch::reshape(seen, ch::Shape<3>{batch, context, width}));
    return y + fc2(ch::gelu(fc1(norm2(y))));
  }

 private:
  ch::Index heads;
};

/// 65 tokens, width 128, 4 heads, 4 blocks, context 128.
template <class D>
struct Gpt : ch::nn::Module {
  ch::nn::Embedding<D> tokens{65, 128}, places{128, 128};
  ch::nn::ModuleList<GptBlock<D>> blocks;
  ch::nn::LayerNorm<D> norm{128};
  ch::nn::Linear<D> head{128, 65};
  CHORUS_MODULE(Gpt, tokens, places, blocks, norm, head)
  Gpt() {
    for (int i = 0; i < 4; ++i) blocks.push_back(GptBlock<D>(128));
  }
  auto forward(const auto& text) const {
    const auto [batch, context] = text.shape();
    auto x = tokens(text) + ch::slice(places.weight, 0, 0, context);
    for (const auto& block : blocks) x = block(x);
    return ch::reshape(head(norm(x)), ch::Shape<2>{batch * context, 65});
  }
};

}  // namespace bench
