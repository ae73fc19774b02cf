#pragma once
/// GPT-2 small (Radford et al. 2019): 124 M parameters, with a vocabulary padded to a multiple of 128.

#include <chorus/ops/narrow_indices.hpp>

#include "models.hpp"

namespace bench {

struct Gpt2Sizes {
  ch::Index vocabulary = 50304, width = 768, heads = 12, blocks = 12, context = 1024;
};

/// tokens: [batch, context] -> scores of the next one: [batch * context, vocabulary]. The last layer's weight is the
/// table of tokens.
template <class D>
struct Gpt2 : ch::nn::Module {
  ch::nn::Embedding<D> tokens, places;
  ch::nn::ModuleList<GptBlock<D>> blocks;
  ch::nn::LayerNorm<D> norm;
  ch::nn::Linear<D> head;
  CHORUS_MODULE(Gpt2, tokens, places, blocks, norm, head)
  explicit Gpt2(const Gpt2Sizes& sizes)
      : tokens{sizes.vocabulary, sizes.width},
        places{sizes.context, sizes.width},
        norm{sizes.width},
        head{sizes.width, sizes.vocabulary, {.bias = false}} {
    for (ch::Index i = 0; i < sizes.blocks; ++i) blocks.push_back(GptBlock<D>(sizes.width, sizes.heads));
    head.weight = tokens.weight;
  }
  auto forward(const auto& text) const {
    const auto [batch, context] = text.shape();
    const auto words = tokens(text);
    auto x = words + ch::type_as(ch::slice(places.weight, 0, 0, context), words);
    for (const auto& block : blocks) x = block(x);
    return ch::reshape(head(norm(x)), ch::Shape<2>{batch * context, tokens.weight.shape()[0]});
  }
};

}  // namespace bench
