#pragma once
/// Models of text, with the layers and the parameter order of models/torch_models.py.

#include <chorus/chorus.hpp>
#include <chorus/nn/models/gpt.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/nn/transformer.hpp>

#include "image_models.hpp"

namespace bench {

/// Four encoder layers of width 512 that classify a text.
struct Bert : nn::Module {
  nn::Embedding<D> tokens{30522, 512}, places{128, 512};
  nn::LayerNorm<D> norm{512};
  nn::ModuleList<nn::TransformerEncoderLayer<D>> layers;
  nn::Linear<D> head{512, 2};
  CHORUS_MODULE(Bert, tokens, places, norm, layers, head)
  explicit Bert(double dropout) {
    for (int i = 0; i < 4; ++i)
      layers.push_back(nn::TransformerEncoderLayer<D>(512, {.heads = 8,
                                                            .feed_forward = 2048,
                                                            .dropout = dropout,
                                                            .activation = nn::FeedForwardActivation::gelu}));
  }
  auto forward(const auto& text) const {
    auto x = norm(tokens(text) + ch::slice(places.weight, 0, 0, text.size(1)));
    for (const auto& layer : layers) x = layer(x);
    return head(ch::mean(x, 1));
  }
};

struct LstmLanguageModel : nn::Module {
  nn::Embedding<D> encoder{10000, 256};
  nn::LSTM<D> lstm{256, 512, {.num_layers = 2, .batch_first = true}};
  nn::Linear<D> decoder{512, 10000};
  CHORUS_MODULE(LstmLanguageModel, encoder, lstm, decoder)
  auto forward(const auto& text) const { return decoder(lstm(encoder(text)).output); }
};

}  // namespace bench
