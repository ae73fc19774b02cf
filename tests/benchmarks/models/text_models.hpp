#pragma once
/// Models of text, with the layers and the parameter order of models/torch_models.py.

#include <chorus/chorus.hpp>
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

struct Gpt2Block : nn::Module {
  nn::LayerNorm<D> ln_1{768};
  nn::Linear<D> c_attn{768, 2304}, c_proj{768, 768};
  nn::LayerNorm<D> ln_2{768};
  nn::Linear<D> c_fc{768, 3072}, m_proj{3072, 768};
  CHORUS_MODULE(Gpt2Block, ln_1, c_attn, c_proj, ln_2, c_fc, m_proj)
  auto forward(const auto& in) const {
    const auto [n, t, w] = in.shape();
    const auto all = c_attn(ln_1(in));
    const auto part = [&, shape = ch::Shape<4>{n, t, 12, w / 12}, w = w](ch::Index i) {
      return ch::transpose(ch::reshape(ch::slice(all, 2, i * w, (i + 1) * w), shape), 1, 2);
    };
    const auto seen = ch::scaled_dot_product_attention(part(0), part(1), part(2), true);
    const auto x = in + c_proj(ch::reshape(ch::transpose(seen, 1, 2), in.shape()));
    return x + m_proj(ch::gelu(c_fc(ln_2(x))));
  }
};

/// GPT-2's width and vocabulary, four of its twelve blocks.
struct Gpt2 : nn::Module {
  nn::Embedding<D> wte{50257, 768}, wpe{256, 768};
  nn::ModuleList<Gpt2Block> h;
  nn::LayerNorm<D> ln_f{768};
  nn::Linear<D> lm_head{768, 50257, {.bias = false}};
  CHORUS_MODULE(Gpt2, wte, wpe, h, ln_f, lm_head)
  Gpt2() {
    for (int i = 0; i < 4; ++i) h.push_back(Gpt2Block());
  }
  auto forward(const auto& text) const {
    auto x = wte(text) + ch::slice(wpe.weight, 0, 0, text.size(1));
    for (const auto& block : h) x = block(x);
    return lm_head(ln_f(x));
  }
};

}  // namespace bench
