#pragma once
/// Transformer layers (Vaswani et al. 2017) as in PyTorch: TransformerEncoderLayer, TransformerDecoderLayer.

#include <chorus/nn/attention.hpp>
#include <chorus/nn/elsewhere.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/sequence_part.hpp>

namespace chorus::nn {

/// The activation between the two linear layers of a transformer layer.
enum class FeedForwardActivation : std::uint8_t { relu, gelu };

/// Options of transformer layers.
struct TransformerOptions {
  Index heads = 8;
  /// Features between the two linear layers; 0 means 4 times the model's.
  Index feed_forward = 0;
  double dropout = 0.1;
  FeedForwardActivation activation = FeedForwardActivation::relu;
  /// Normalise before attention and feed-forward instead of after them.
  bool norm_first = false;
};

namespace detail {
template <class X>
auto feed_forward(const X& x, FeedForwardActivation activation) {
  return activation == FeedForwardActivation::relu ? relu(x) : gelu(x);
}
inline Index inner_features(Index features, const TransformerOptions& options) {
  return options.feed_forward > 0 ? options.feed_forward : 4 * features;
}
}  // namespace detail

/// x: [batch, length, features] -> the same shape: self-attention, then two linear layers at each position, each with
/// dropout, a residual connection and layer normalisation. TensorParallel shards the heads and the features between the
/// two linear layers.
template <Device D, Real T>
class TransformerEncoderLayer : public Module {
 public:
  using device_type = D;
  MultiheadAttention<D, T> self_attn;
  ColumnParallelLinear<D, T> linear1;
  RowParallelLinear<D, T> linear2;
  LayerNorm<D, T> norm1, norm2;

  explicit TransformerEncoderLayer(Index features, const TransformerOptions& options = {})
      : self_attn(features, options.heads),
        linear1(features, detail::inner_features(features, options)),
        linear2(detail::inner_features(features, options), features),
        norm1(features),
        norm2(features),
        options_(options) {}

  /// `seen`: whether attention is causal, a mask that is true for visible keys, or a KvCache.
  template <Operand X, class Seen = bool>
  auto operator()(const X& x, const Seen& seen = Seen{}) const {
    return detail::watched(*this, [&] { return gather_sequence(forward(split_sequence(x), seen)); });
  }
  /// The same for a sharded sequence: see split_sequence.
  template <class X, class Seen = bool>
  auto operator()(const SequencePart<X>& x, const Seen& seen = Seen{}) const {
    return detail::watched(*this, [&] { return forward(x, seen); });
  }

  void visit(Visitor& visitor) override {
    visitor.module("self_attn", self_attn);
    visitor.module("linear1", linear1);
    visitor.module("linear2", linear2);
    visitor.module("norm1", norm1);
    visitor.module("norm2", norm2);
  }
  std::string describe() const override { return cat("TransformerEncoderLayer(", linear1.weight.shape()[1], ")"); }

 private:
  template <class X, class Seen>
  auto forward(const SequencePart<X>& x, const Seen& seen) const {
    if (options_.norm_first) {
      const auto y = x + attended(norm1(x), seen);
      return y + transformed(norm2(y));
    }
    const auto y = norm1(x + attended(x, seen));
    return norm2(y + transformed(y));
  }
  template <class X, class Seen>
  auto attended(const X& x, const Seen& seen) const {
    return dropout(self_attn(x, x, x, seen), options_.dropout, training());
  }
  template <class X>
  auto transformed(const X& x) const {
    const auto inner = dropout(detail::feed_forward(linear1(x), options_.activation), options_.dropout, training());
    return dropout(linear2.to_sequence(inner, x.group()), options_.dropout, training());
  }

  TransformerOptions options_;
};

/// x: [batch, length, features], memory: [batch, keys, features] (the encoder's output) -> x's shape: causal
/// self-attention, attention to the memory, then two linear layers at each position.
template <Device D, Real T>
class TransformerDecoderLayer : public Module {
 public:
  using device_type = D;
  MultiheadAttention<D, T> self_attn, multihead_attn;
  ColumnParallelLinear<D, T> linear1;
  RowParallelLinear<D, T> linear2;
  LayerNorm<D, T> norm1, norm2, norm3;

  explicit TransformerDecoderLayer(Index features, const TransformerOptions& options = {})
      : self_attn(features, options.heads),
        multihead_attn(features, options.heads),
        linear1(features, detail::inner_features(features, options)),
        linear2(detail::inner_features(features, options), features),
        norm1(features),
        norm2(features),
        norm3(features),
        options_(options) {}

  /// `seen`: whether self-attention is causal, or a KvCache for it.
  template <Operand X, class M, class Seen = bool>
  auto operator()(const X& x, const M& memory, const Seen& seen = true) const {
    return detail::watched(*this, [&] { return gather_sequence(forward(split_sequence(x), memory, seen)); });
  }
  /// The same for a sharded sequence: see split_sequence. The memory may be whole or sharded.
  template <class X, class M, class Seen = bool>
  auto operator()(const SequencePart<X>& x, const M& memory, const Seen& seen = true) const {
    return detail::watched(*this, [&] { return forward(x, memory, seen); });
  }

  void visit(Visitor& visitor) override {
    visitor.module("self_attn", self_attn);
    visitor.module("multihead_attn", multihead_attn);
    visitor.module("linear1", linear1);
    visitor.module("linear2", linear2);
    visitor.module("norm1", norm1);
    visitor.module("norm2", norm2);
    visitor.module("norm3", norm3);
  }
  std::string describe() const override { return cat("TransformerDecoderLayer(", linear1.weight.shape()[1], ")"); }

 private:
  template <class X, class M, class Seen>
  auto forward(const SequencePart<X>& x, const M& memory, const Seen& seen) const {
    if (options_.norm_first) {
      const auto own = norm1(x);
      const auto y = x + dropped(self_attn(own, own, own, seen));
      const auto z = y + dropped(multihead_attn(norm2(y), memory, memory));
      return z + transformed(norm3(z));
    }
    const auto y = norm1(x + dropped(self_attn(x, x, x, seen)));
    const auto z = norm2(y + dropped(multihead_attn(y, memory, memory)));
    return norm3(z + transformed(z));
  }
  template <class X>
  auto dropped(const X& x) const {
    return dropout(x, options_.dropout, training());
  }
  template <class X>
  auto transformed(const X& x) const {
    return dropped(linear2.to_sequence(dropped(detail::feed_forward(linear1(x), options_.activation)), x.group()));
  }

  TransformerOptions options_;
};

}  // namespace chorus::nn
