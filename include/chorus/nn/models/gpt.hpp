#pragma once
/// GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), with Hugging Face's names.

#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/kv_cache.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/lora.hpp>
#include <chorus/nn/models/initialized.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/attention_packed.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/rows_of_places.hpp>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

namespace chorus::nn {

/// Sizes and settings of a GPT, with the names of Hugging Face's `config.json`; by default those of GPT-2 small.
struct GPTOptions {
  Index vocab_size = 50257, n_positions = 1024, n_embd = 768, n_layer = 12, n_head = 12;
  /// Features between the two linear layers of a block; 0: four times n_embd.
  Index n_inner = 0;
  double layer_norm_epsilon = 1e-5;
  /// The probability of dropout after the embeddings, after attention and after the MLP. Attention weights are kept.
  double dropout = 0.1;
  /// The standard deviation of initial weights.
  double initializer_range = 0.02;
  /// Whether lm_head.weight is wte.weight.
  bool tie_word_embeddings = true;
  /// Compute each block again in backward, to use less memory.
  bool checkpoint = false;
  /// The rank of a trained change of each c_attn (see LoRA), and its alpha; 0: none.
  Index lora_rank = 0;
  double lora_alpha = 16;
};

/// The projections of query, key and value as one Linear of weight [3 n_embd, n_embd] (Hugging Face keeps the
/// transposed matrix), and LoRA's change of it. TensorParallel shards each of the three by heads.
template <Device D>
class GPTProjection : public Linear<D> {
 public:
  std::optional<LoRA<D>> lora;

  GPTProjection(const GPTOptions& options, Index head)
      : Linear<D>(detail::initialized(Linear<D>(options.n_embd, 3 * options.n_embd), options.initializer_range)),
        by_heads_{.axis = 0, .blocks = 3, .unit = head} {
    if (options.lora_rank > 0)
      lora.emplace(options.n_embd, 3 * options.n_embd, options.lora_rank, options.lora_alpha, by_heads_);
  }
  void visit(Visitor& visitor) override {
    visitor.split_parameter("weight", this->weight, by_heads_);
    visitor.split_parameter("bias", this->bias, by_heads_);
    if (lora) lora->visit(visitor);
  }

 private:
  Split by_heads_;
};

/// x: [batch, length, n_embd] -> the same shape: causal self-attention, with a KvCache after the positions in it.
/// TensorParallel shards whole heads. QuantizationAware rounds for its linear layers, not for attention's products.
template <Device D>
class GPTAttention : public Module {
 public:
  using device_type = D;
  GPTProjection<D> c_attn;
  RowParallelLinear<D> c_proj;

  /// Throws ShapeError unless n_head divides n_embd.
  explicit GPTAttention(const GPTOptions& options)
      : c_attn(options, head_size(options)),
        c_proj(detail::initialized(RowParallelLinear<D>(options.n_embd, options.n_embd, {.unit = head_size(options)}),
                                   options.initializer_range / std::sqrt(2.0 * static_cast<double>(options.n_layer)))),
        head_(head_size(options)) {}

  template <Operand X, class... Cache>
  auto operator()(const X& x, const Cache&... cache) const {
    return detail::watched(*this, [&] {
      const ReadsParts parts;
      const Index mine = c_attn.weight.shape()[0] / 3, features = c_attn.weight.shape()[1];
      const auto& shape = value_of(x).shape();
      auto group = detail::group_of_part("GPTAttention", mine, features, head_);
      auto all = detail::with_leaf_cut(group, {"GPTAttention", features, head_, 3, /*of_inputs=*/false},
                                       [&] { return c_attn(enter_tensor_region(x, group)); });
      if (c_attn.lora) all = all + (*c_attn.lora)(x, group ? tensor_group() : nullptr);
      auto joined = reshape(seen(reshape(all, Shape<5>{shape[0], shape[1], 3, mine / head_, head_}), cache...),
                            Shape<3>{shape[0], shape[1], mine});
      return c_proj(Columns<decltype(joined)>(std::move(joined), features, head_, std::move(group)));
    });
  }

  void visit(Visitor& visitor) override {
    visitor.module("c_attn", c_attn);
    visitor.module("c_proj", c_proj);
  }
  std::string describe() const override {
    return cat("GPTAttention(", c_attn.weight.shape()[1], ", ", c_attn.weight.shape()[1] / head_, " heads)");
  }

 private:
  static Index head_size(const GPTOptions& options) {
    check<ShapeError>(options.n_head > 0 && options.n_embd % options.n_head == 0, "GPT: ", options.n_head,
                      " heads do not divide ", options.n_embd, " features");
    return options.n_embd / options.n_head;
  }
  // qkv: [batch, length, 3, heads, features] -> [batch, length, heads, features].
  template <Operand X>
  auto seen(const X& qkv) const {
    return scaled_dot_product_attention_packed(qkv, {.causal = true});
  }
  template <Operand X>
  auto seen(const X& qkv, const KvCache& cache) const {
    const auto parts = permute(qkv, Shape<5>{2, 0, 3, 1, 4});
    const auto& shape = value_of(parts).shape();
    const auto part = [&](Index i) {
      return reshape(slice(parts, 0, i, i + 1), Shape<4>{shape[1], shape[2], shape[3], shape[4]});
    };
    return permute(detail::attention_of_layer(this, part(0), part(1), part(2), cache), Shape<4>{0, 2, 1, 3});
  }

  Index head_;
};

/// The two linear layers of a block, with the tanh approximation of GELU between them.
template <Device D>
struct GPTMLP : Module {
  ColumnParallelLinear<D> c_fc;
  RowParallelLinear<D> c_proj;
  CHORUS_MODULE(GPTMLP, c_fc, c_proj)

  explicit GPTMLP(const GPTOptions& options)
      : c_fc(detail::initialized(ColumnParallelLinear<D>(options.n_embd, inner(options)), options.initializer_range)),
        c_proj(detail::initialized(RowParallelLinear<D>(inner(options), options.n_embd),
                                   options.initializer_range / std::sqrt(2.0 * static_cast<double>(options.n_layer)))) {
  }

  auto forward(const auto& x) const { return c_proj(gelu_tanh(c_fc(x))); }

 private:
  static Index inner(const GPTOptions& options) { return options.n_inner > 0 ? options.n_inner : 4 * options.n_embd; }
};

/// x: [batch, length, n_embd] -> the same shape.
template <Device D>
struct GPTBlock : Module {
  LayerNorm<D> ln_1;
  GPTAttention<D> attn;
  LayerNorm<D> ln_2;
  GPTMLP<D> mlp;
  CHORUS_MODULE(GPTBlock, ln_1, attn, ln_2, mlp)

  explicit GPTBlock(const GPTOptions& options)
      : ln_1(options.n_embd, options.layer_norm_epsilon),
        attn(options),
        ln_2(options.n_embd, options.layer_norm_epsilon),
        mlp(options),
        dropout_(options.dropout),
        checkpoint_(options.checkpoint) {}

  auto forward(const auto& x, const auto&... cache) const {
    const auto block = [&](const auto& in) {
      const auto seen = in + dropout(attn(ln_1(in), cache...), dropout_, training());
      return seen + dropout(mlp(ln_2(seen)), dropout_, training());
    };
    return checkpoint_ ? chorus::checkpoint(block, x) : block(x);
  }

 private:
  double dropout_;
  bool checkpoint_;
};

/// x: [batch, length, n_embd] -> x + `length` rows of weight, with dropout.
template <Device D>
class GPTPositions : public Embedding<D> {
 public:
  explicit GPTPositions(const GPTOptions& options)
      : Embedding<D>(detail::initialized(Embedding<D>(options.n_positions, options.n_embd), options.initializer_range)),
        dropout_(options.dropout) {}

  /// The first token is at position `begin`. Throws ShapeError for more positions than weight has.
  template <Operand X>
  auto operator()(const X& x, Index begin = 0) const {
    return detail::watched(*this, [&] {
      const Index own = value_of(x).size(1), end = begin + chorus::detail::whole_length(own);
      const Index most = this->weight.shape()[0];
      check<ShapeError>(end <= most, "GPT: expected at most ", most, " tokens (n_positions), got ", end);
      return dropout(x + type_as(chorus::detail::rows_of_places(this->weight, begin, own), x), dropout_,
                     this->training());
    });
  }

 private:
  double dropout_;
};

/// tokens: [batch, length] -> the scores of the token after each: [batch, length, vocab_size]. A chain that a pipeline
/// may cut anywhere; TensorParallel shards the blocks.
template <Device D>
struct GPT : Module {
  Embedding<D> wte;
  GPTPositions<D> wpe;
  ModuleList<GPTBlock<D>> h;
  LayerNorm<D> ln_f;
  Linear<D> lm_head;
  CHORUS_MODULE(GPT, wte, wpe, h, ln_f, lm_head)
  CHORUS_PIPELINE(wte, wpe, h, ln_f, lm_head)

  explicit GPT(const GPTOptions& options = {})
      : wte(detail::initialized(Embedding<D>(options.vocab_size, options.n_embd), options.initializer_range)),
        wpe(options),
        ln_f(options.n_embd, options.layer_norm_epsilon),
        lm_head(detail::initialized(Linear<D>(options.n_embd, options.vocab_size, {.bias = false}),
                                    options.initializer_range)) {
    for (Index i = 0; i < options.n_layer; ++i) h.push_back(GPTBlock<D>(options));
    if (options.tie_word_embeddings) lm_head.weight = wte.weight;
  }

  /// The same for tokens that follow those in `cache`, which keeps these, too: see generate.
  auto forward(const auto& tokens, const KvCache& cache) const {
    auto x = wpe(wte(tokens), cache.length());
    for (const auto& block : h) x = block(x, cache);
    return lm_head(ln_f(x));
  }
};

}  // namespace chorus::nn
