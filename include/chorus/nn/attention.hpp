#pragma once
/// Multi-head attention (Vaswani et al. 2017), with PyTorch's parameter names and initialisation.

#include <chorus/nn/elsewhere.hpp>
#include <chorus/nn/kv_cache.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/nn/intercepted.hpp>
#include <chorus/ops/attention_packed.hpp>
#include <chorus/ops/dropout.hpp>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>

namespace chorus::nn {

/// Options of MultiheadAttention.
struct MultiheadAttentionOptions {
  bool bias = true;
};

/// query: [batch, queries, features], key, value: [batch, keys, features] -> [batch, queries, features], with features
/// / heads per head. in_proj_weight: [3 features, features], the stacked projections of query, key and value. The batch
/// axis comes first (PyTorch's batch_first = True). TensorParallel shards whole heads over ranks. QuantizationAware
/// also rounds the operands of both products.
template <Device D, Real T>
class MultiheadAttention : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> in_proj_weight;
  Parameter<T, 1, D> in_proj_bias;
  RowParallelLinear<D, T> out_proj;

  /// Throws ShapeError unless `heads` divides the features.
  MultiheadAttention(Index features, Index heads, const MultiheadAttentionOptions& options = {})
      : out_proj(features, features, {options.bias, checked_head(features, heads)}), heads_(heads) {
    // Xavier's bound (Glorot, Bengio 2010) for the three stacked projections.
    const double bound = std::sqrt(6.0 / static_cast<double>(4 * features));
    in_proj_weight = Parameter(init::uniform<T, D, 2>({3 * features, features}, bound));
    if (!options.bias) return;
    in_proj_bias = Parameter(init::constant<T, D, 1>({3 * features}, T{0}));
    out_proj.bias = Parameter(init::constant<T, D, 1>({features}, T{0}));
  }

  /// With `causal`, query i attends to keys 0 to i only.
  template <Operand Q, Operand K, Operand V>
  auto operator()(const Q& query, const K& key, const V& value, bool causal = false) const {
    return detail::watched(*this, [&] { return attend(query, key, value, causal); });
  }
  /// `mask` is true for keys that the query attends to: [queries, keys], or with leading axes [batch, heads].
  template <Operand Q, Operand K, Operand V, int Rank>
  auto operator()(const Q& query, const K& key, const V& value, const Tensor<bool, Rank, D>& mask) const {
    return detail::watched(*this, [&] { return attend(query, key, value, mask); });
  }
  /// Self-attention after the positions in `cache`, which keeps these, too; causal, also without a capacity.
  template <Operand Q, Operand K, Operand V>
  auto operator()(const Q& query, const K& key, const V& value, const KvCache& cache) const {
    return detail::watched(*this, [&] { return attend(query, key, value, cache); });
  }

  /// The same for sharded sequences, with a sharded result: each query attends to keys of all positions.
  template <class Q, class K, class V, class Seen = bool>
  auto operator()(const SequencePart<Q>& query, const K& key, const V& value, const Seen& seen = Seen{}) const {
    return detail::watched(
        *this, [&] { return out_proj.to_sequence(attended(query, key, value, seen), query.group()); });
  }

  void visit(Visitor& visitor) override {
    const Split by_heads{.axis = 0, .blocks = 3, .unit = in_proj_weight.shape()[1] / heads_};
    visitor.split_parameter("in_proj_weight", in_proj_weight, by_heads);
    if (in_proj_bias) visitor.split_parameter("in_proj_bias", in_proj_bias, by_heads);
    visitor.module("out_proj", out_proj);
  }
  std::string describe() const override {
    return cat("MultiheadAttention(", in_proj_weight.shape()[1], ", ", heads_, " heads)");
  }

 private:
  static Index checked_head(Index features, Index heads) {
    check<ShapeError>(heads > 0 && features % heads == 0, "MultiheadAttention: ", heads, " heads do not divide ",
                      features, " features");
    return features / heads;
  }

  template <Operand Q, Operand K, Operand V, class Seen>
  auto attend(const Q& query, const K& key, const V& value, const Seen& seen) const {
    return out_proj(attended(query, key, value, seen));
  }
  // [batch, queries, features], before the output projection.
  template <class Q, class K, class V, class Seen>
  auto attended(const Q& query, const K& key, const V& value, const Seen& seen) const {
    const ReadsParts parts;
    const Index features = in_proj_weight.shape()[1], head = features / heads_;
    auto group = detail::group_of_part("MultiheadAttention", in_proj_weight.shape()[0] / 3, features, head);
    const auto q = detail::entered(query, group);
    const auto k = entered_once(key, group, query, q), v = entered_once(value, group, key, k);
    const auto& shape = value_of(q).shape();
    check<ShapeError>(shape[2] == features, "MultiheadAttention: a query of shape ", shape, " does not have ", features,
                      " features");
    auto joined = reshape(
        detail::with_leaf_cut(group, {"MultiheadAttention", features, head, 1, /*of_inputs=*/false},
                              [&] { return seen_by_heads(q, k, v, seen, head, group); }),
        Shape<3>{shape[0], shape[1], in_proj_weight.shape()[0] / 3});
    return Columns<decltype(joined)>(std::move(joined), features, head, std::move(group));
  }
  // [batch, queries, this rank's heads, features / heads]
  template <Operand Q, Operand K, Operand V, class Seen>
  auto seen_by_heads(const Q& q, const K& k, const V& v, const Seen& seen, Index head,
                     const TensorGroupRef& group) const {
    if constexpr (chorus::detail::has_stacked_attention<Q, K, V> && !std::is_same_v<Seen, KvCache>) {
      if constexpr (AnyTensor<Seen>)
        return seen_in_place(q, k, v, head, {}, of_heads(seen, group));
      else
        return seen_in_place(q, k, v, head, {.causal = seen});
    } else {
      return permute(seen_in_order(q, k, v, seen, head, group), Shape<4>{0, 2, 1, 3});
    }
  }
  // On GPUs with strided kernels: one product if query, key and value are the same, whose result is used in place.
  template <Operand Q, Operand K, Operand V, class... Mask>
  auto seen_in_place(const Q& q, const K& k, const V& v, Index head, const AttentionOptions& options,
                     const Mask&... mask) const {
    if constexpr (std::is_same_v<Q, K> && std::is_same_v<K, V>)
      if (one_value(q, k) && one_value(k, v)) {
        const auto& shape = value_of(q).shape();
        const auto all = linear(q, in_proj_weight, in_proj_bias);
        const Index heads = in_proj_weight.shape()[0] / 3 / head;
        return chorus::detail::attention_packed(reshape(all, Shape<5>{shape[0], shape[1], 3, heads, head}), options,
                                                mask...);
      }
    return chorus::detail::attention_of_places(project(q, in_proj_weight, 0, head), project(k, in_proj_weight, 1, head),
                                               project(v, in_proj_weight, 2, head), options, mask...);
  }
  template <Operand X>
  static bool one_value(const X& a, const X& b) {
    return node_of(a) == node_of(b) && value_of(a).data() == value_of(b).data() &&
           value_of(a).shape() == value_of(b).shape() && value_of(a).strides() == value_of(b).strides();
  }
  // [batch, this rank's heads, queries, features / heads]
  template <Operand Q, Operand K, Operand V, class Seen>
  auto seen_in_order(const Q& q, const K& k, const V& v, const Seen& seen, Index head,
                     const TensorGroupRef& group) const {
    return detail::attended(
        this, in_proj_weight, value_of(q).numel() > 0, [&](const auto& own, const auto& input, const auto& operand) {
          const auto& of_q = input(q);
          const auto& of_k = input(k);
          const auto& of_v = input(v);
          const auto& weight = own();
          const auto heads_first = [&](const auto& x, Index part) {
            return permute(project(x, weight, part, head), Shape<4>{0, 2, 1, 3});
          };
          const auto queries = heads_first(of_q, 0), keys = heads_first(of_k, 1), values = heads_first(of_v, 2);
          const auto &a = operand(0, queries), &b = operand(1, keys), &c = operand(2, values);
          return detail::attention_of_layer(this, a, b, c, of_heads(seen, group));
        });
  }
  template <Operand X>
  static auto node_in(const X& x) {
    return node_of(x);
  }
  template <class X>
  static auto node_in(const SequencePart<X>& x) {
    return node_of(x.part());
  }
  // A value that is used several times enters once, so that its gradients are summed in one message. In leaves, each
  // gradient is a sum of its own.
  template <class X, class Known, class Entered>
  static Entered entered_once(const X& x, const TensorGroupRef& group, const Known& known, const Entered& known_entered)
    requires std::is_same_v<X, Known>
  {
    if constexpr (!chorus::detail::is_graph_variable<Entered>)
      if (group != nullptr && group->products() == nullptr && node_in(x) && node_in(x) == node_in(known))
        return known_entered;
    return detail::entered(x, group);
  }
  template <class X, class Known, class Entered>
  static auto entered_once(const X& x, const TensorGroupRef& group, const Known&, const Entered&) {
    return detail::entered(x, group);
  }
  // For a mask with an axis of heads: this rank's heads.
  template <class Seen>
  Seen of_heads(const Seen& seen, const TensorGroupRef& group) const {
    if constexpr (AnyTensor<Seen>)
      if constexpr (Seen::rank > 2)
        if (group != nullptr && seen.size(-3) == heads_) {
          const auto part = group->part(heads_, 1);
          return contiguous(seen.slice(-3, part.begin, part.begin + part.count));
        }
    return seen;
  }
  // [batch, length, features] -> [batch, length, this rank's heads, features / heads]
  template <Operand X, Operand W>
  auto project(const X& x, const W& whole, Index part, Index head) const {
    static_assert(tensor_of<X>::rank == 3, "MultiheadAttention: expected inputs [batch, length, features]");
    const Index columns = in_proj_weight.shape()[0] / 3;
    const auto weight = slice(whole, 0, part * columns, (part + 1) * columns);
    const auto lines = [&] {
      return linear(x, weight, slice(in_proj_bias, 0, part * columns, (part + 1) * columns));
    };
    const auto y = in_proj_bias ? lines() : decltype(lines())(linear(x, weight));
    const auto& shape = value_of(x).shape();
    return reshape(y, Shape<4>{shape[0], shape[1], columns / head, head});
  }

  Index heads_;
};

}  // namespace chorus::nn
