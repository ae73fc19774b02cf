#pragma once
/// BERT (Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers", 2019), with Hugging
/// Face's names.

#include <chorus/nn/containers.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/models/initialized.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/rows_of_places.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace chorus::nn {

/// Sizes and settings of a BERT, with the names of Hugging Face's `config.json`; by default those of BERT base.
struct BERTOptions {
  Index vocab_size = 30522, hidden_size = 768, num_hidden_layers = 12, num_attention_heads = 12;
  Index intermediate_size = 3072, max_position_embeddings = 512, type_vocab_size = 2;
  double layer_norm_eps = 1e-12;
  /// The probability of dropout after the embeddings, after attention and after the MLP. Attention weights are kept.
  double dropout = 0.1;
  /// The standard deviation of initial weights.
  double initializer_range = 0.02;
  /// Whether there is the layer of `pooled`.
  bool pooler = true;
};

/// tokens, types: [batch, length] -> [batch, length, hidden_size]: the sum of three embeddings, normalised.
template <Device D>
class BERTEmbeddings : public Module {
 public:
  using device_type = D;
  Embedding<D> words, positions, types;
  LayerNorm<D> norm;

  explicit BERTEmbeddings(const BERTOptions& options)
      : words(table(options.vocab_size, options)),
        positions(table(options.max_position_embeddings, options)),
        types(table(options.type_vocab_size, options)),
        norm(options.hidden_size, options.layer_norm_eps),
        dropout_(options.dropout) {}

  /// Without `type`, all tokens have type 0. Throws ShapeError for more positions than the table has.
  template <class Tokens, class... Types>
  auto operator()(const Tokens& tokens, const Types&... type) const {
    return detail::watched(*this, [&] {
      const auto x = words(tokens);
      const Index own = value_of(x).size(1), length = chorus::detail::whole_length(own);
      const Index most = positions.weight.shape()[0];
      check<ShapeError>(length <= most, "BERT: expected at most ", most, " tokens (max_position_embeddings), got ",
                        length);
      const auto placed = x + type_as(chorus::detail::rows_of_places(positions.weight, 0, own), x);
      const auto whole = [&](const auto& of_type) { return dropout(norm(placed + of_type), dropout_, training()); };
      if constexpr (sizeof...(Types) == 0)
        return whole(type_as(slice(types.weight, 0, 0, 1), x));
      else
        return whole(types(type...));
    });
  }
  void visit(Visitor& visitor) override {
    visitor.module("word_embeddings", words);
    visitor.module("position_embeddings", positions);
    visitor.module("token_type_embeddings", types);
    visitor.module("LayerNorm", norm);
  }
  std::string describe() const override { return "BERTEmbeddings"; }

 private:
  static Embedding<D> table(Index entries, const BERTOptions& options) {
    return detail::initialized(Embedding<D>(entries, options.hidden_size), options.initializer_range);
  }
  double dropout_;
};

/// x: [batch, length, hidden_size] -> the same shape: self-attention, then two linear layers, each with dropout, a
/// residual connection and normalisation after it. TensorParallel shards the heads and the intermediate features.
template <Device D>
class BERTLayer : public Module {
 public:
  using device_type = D;
  ColumnParallelLinear<D> query, key, value;
  RowParallelLinear<D> attention_output;
  LayerNorm<D> attention_norm;
  ColumnParallelLinear<D> intermediate;
  RowParallelLinear<D> output;
  LayerNorm<D> output_norm;

  /// Throws ShapeError unless num_attention_heads divides hidden_size.
  explicit BERTLayer(const BERTOptions& options)
      : query(projection(options)),
        key(projection(options)),
        value(projection(options)),
        attention_output(
            made(RowParallelLinear<D>(options.hidden_size, options.hidden_size, {.unit = head(options)}), options)),
        attention_norm(options.hidden_size, options.layer_norm_eps),
        intermediate(made(ColumnParallelLinear<D>(options.hidden_size, options.intermediate_size), options)),
        output(made(RowParallelLinear<D>(options.intermediate_size, options.hidden_size), options)),
        output_norm(options.hidden_size, options.layer_norm_eps),
        head_(head(options)),
        dropout_(options.dropout) {}

  /// `mask`, if given, is true for keys that are seen: see scaled_dot_product_attention.
  template <Operand X, class... Mask>
  auto operator()(const X& x, const Mask&... mask) const {
    return detail::watched(*this, [&] {
      const auto y = attention_norm(x + dropout(attended(x, mask...), dropout_, training()));
      return output_norm(y + dropout(output(gelu(intermediate(y))), dropout_, training()));
    });
  }
  void visit(Visitor& visitor) override {
    visitor.module("attention.self.query", query);
    visitor.module("attention.self.key", key);
    visitor.module("attention.self.value", value);
    visitor.module("attention.output.dense", attention_output);
    visitor.module("attention.output.LayerNorm", attention_norm);
    visitor.module("intermediate.dense", intermediate);
    visitor.module("output.dense", output);
    visitor.module("output.LayerNorm", output_norm);
  }
  std::string describe() const override { return cat("BERTLayer(", attention_output.weight.shape()[0], ")"); }

 private:
  static Index head(const BERTOptions& options) {
    check<ShapeError>(options.num_attention_heads > 0 && options.hidden_size % options.num_attention_heads == 0,
                      "BERT: ", options.num_attention_heads, " heads do not divide ", options.hidden_size, " features");
    return options.hidden_size / options.num_attention_heads;
  }
  template <class Layer>
  static Layer made(Layer layer, const BERTOptions& options) {
    return detail::initialized(std::move(layer), options.initializer_range);
  }
  static ColumnParallelLinear<D> projection(const BERTOptions& options) {
    return made(ColumnParallelLinear<D>(options.hidden_size, options.hidden_size, {.unit = head(options)}), options);
  }
  template <Operand X, class... Mask>
  auto attended(const X& x, const Mask&... mask) const {
    const auto heads = [&](const auto& columns) {
      const auto shape = value_of(columns.part()).shape();
      return permute(reshape(columns.part(), Shape<4>{shape[0], shape[1], shape[2] / head_, head_}),
                     Shape<4>{0, 2, 1, 3});
    };
    const auto q = query(x);
    const auto seen = scaled_dot_product_attention(heads(q), heads(key(x)), heads(value(x)), mask...);
    return attention_output(q.with(reshape(permute(seen, Shape<4>{0, 2, 1, 3}), value_of(q.part()).shape())));
  }

  Index head_;
  double dropout_;
};

/// tokens: [batch, length] -> the last layer's output: [batch, length, hidden_size]. Names are those of Hugging Face's
/// BertModel.
template <Device D>
class BERT : public Module {
 public:
  using device_type = D;
  BERTEmbeddings<D> embeddings;
  ModuleList<BERTLayer<D>> layer;
  std::optional<Linear<D>> pooler;

  explicit BERT(const BERTOptions& options = {}) : embeddings(options) {
    for (Index i = 0; i < options.num_hidden_layers; ++i) layer.push_back(BERTLayer<D>(options));
    if (options.pooler)
      pooler = detail::initialized(Linear<D>(options.hidden_size, options.hidden_size), options.initializer_range);
  }

  /// `types`: the type of each token, [batch, length]; without it, 0. `mask`: true for tokens that are read, false for
  /// padding, [batch, length].
  auto operator()(const auto& tokens) const {
    return detail::watched(*this, [&] { return layers(embeddings(tokens)); });
  }
  template <class Tokens>
  auto operator()(const Tokens& tokens, const Tensor<std::int64_t, 2, D>& types) const {
    return detail::watched(*this, [&] { return layers(embeddings(tokens, types)); });
  }
  template <class Tokens>
  auto operator()(const Tokens& tokens, const Tensor<std::int64_t, 2, D>& types, const Tensor<bool, 2, D>& mask) const {
    return detail::watched(*this, [&] {
      return layers(embeddings(tokens, types), contiguous(mask).view(Shape<4>{mask.size(0), 1, 1, mask.size(1)}));
    });
  }
  auto forward(const auto&... inputs) const { return (*this)(inputs...); }

  /// hidden: [batch, length, hidden_size], the result of this model -> tanh of a linear layer of the first token:
  /// [batch, hidden_size]. Throws UsageError without a pooler.
  template <Operand X>
  auto pooled(const X& hidden) const {
    check<UsageError>(pooler.has_value(), "BERT: expected .pooler = true in BERTOptions for pooled()");
    const auto& shape = value_of(hidden).shape();
    return tanh((*pooler)(reshape(slice(hidden, 1, 0, 1), Shape<2>{shape[0], shape[2]})));
  }

  void visit(Visitor& visitor) override {
    visitor.module("embeddings", embeddings);
    visitor.module("encoder.layer", layer);
    if (pooler) visitor.module("pooler.dense", *pooler);
  }
  std::string describe() const override { return "BERT"; }

 private:
  auto layers(auto x, const auto&... mask) const {
    for (const auto& each : layer) x = each(x, mask...);
    return x;
  }
};

/// A BERT that guesses words: tokens (and types, mask) -> scores: [batch, length, vocab_size]. Names are those of
/// Hugging Face's BertForMaskedLM.
template <Device D>
class BERTForMaskedLM : public Module {
 public:
  using device_type = D;
  BERT<D> bert;
  Linear<D> dense;
  LayerNorm<D> norm;
  Linear<D> decoder;

  explicit BERTForMaskedLM(BERTOptions options = {})
      : bert(without_pooler(options)),
        dense(detail::initialized(Linear<D>(options.hidden_size, options.hidden_size), options.initializer_range)),
        norm(options.hidden_size, options.layer_norm_eps),
        decoder(detail::initialized(Linear<D>(options.hidden_size, options.vocab_size), 0)) {
    decoder.weight = bert.embeddings.words.weight;
  }

  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return detail::watched(*this, [&] { return decoder(norm(gelu(dense(bert(inputs...))))); });
  }
  auto forward(const auto&... inputs) const { return (*this)(inputs...); }

  void visit(Visitor& visitor) override {
    visitor.module("bert", bert);
    visitor.module("cls.predictions.transform.dense", dense);
    visitor.module("cls.predictions.transform.LayerNorm", norm);
    visitor.parameter("cls.predictions.decoder.weight", decoder.weight);
    visitor.parameter("cls.predictions.bias", decoder.bias);
    visitor.parameter("cls.predictions.decoder.bias", decoder.bias);
  }
  std::string describe() const override { return "BERTForMaskedLM"; }

 private:
  static BERTOptions without_pooler(BERTOptions options) {
    options.pooler = false;
    return options;
  }
};

}  // namespace chorus::nn
