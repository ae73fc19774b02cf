#pragma once
/// Attention on queries, keys and values as layers produce them: the heads of a position are adjacent. On GPUs, if the
/// scores don't fit into the limit, products and kernels read them without a copy.

#include <chorus/ops/attention.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus {

namespace detail {

/// The additive mask for scores of this shape; undefined without a mask.
template <Operand Q, class... Mask>
AttentionMask<Q> mask_of_scores(const Shape<4>& scores, const Mask&... mask) {
  static_assert(sizeof...(mask) <= 1);
  if constexpr (sizeof...(mask) == 1)
    return attention_mask<typename tensor_of<Q>::value_type>(mask..., scores);
  else
    return {};
}

/// Whether attention with scores [batch, heads, queries, keys] uses strided kernels.
template <class Q, class K, class V>
bool can_stride(const Shape<4>& scores) {
  if constexpr (has_stacked_attention<Q, K, V>)
    return numel(scores) > 0 && kernels::above_scores_limit<typename tensor_of<Q>::value_type>(numel(scores)) &&
           !takes_attention_weights<Q>();
  return false;
}

/// Blockwise attention; the three gradients are one array, too. `mask` is undefined, or has the shape of the scores or
/// of one score matrix.
template <Operand X>
auto attention_in_packed_blocks(const X& qkv, const AttentionMask<X>& mask, const AttentionOptions& options) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto numbers = contiguous(value_of(qkv));
  const auto device = numbers.device();
  const auto [batch, length, three, heads, features] = numbers.shape();
  const Index width = heads * features;
  kernels::AttentionShape s{.samples = batch,
                            .heads = heads,
                            .queries = length,
                            .keys = length,
                            .features = features,
                            .values = features,
                            .scale = 1 / std::sqrt(static_cast<double>(features)),
                            .causal = options.causal,
                            .dropout = options.dropout,
                            .mask_pitch = mask.defined() && mask.size(0) != 1 ? length * length : 0};
  if (s.dropout > 0) s.key = next_random_key(batch);
  const kernels::AttentionPitch packed{length * three * width, features, three * width};
  const kernels::AttentionPitches at{packed, packed, packed, {length * width, features, width}};
  auto log_sums = Tensor<compute_type<T>, 1, D>::empty({batch * heads * length}, device);
  auto out = Tensor<T, 4, D>::empty({batch, length, heads, features}, device);
  count_multiply_adds(2 * batch * heads * length * length * features);
  const T *const q = numbers.data(), *const added = mask.data();
  kernels::attention_forward(device, s, at, q, q + width, q + 2 * width, added, out.data(), log_sums.data());
  return record(
      "scaled_dot_product_attention", out,
      [numbers = Saved(numbers), mask, out = Saved(out), log_sums, s, at, width, device](const auto& dy, auto dx) {
        constexpr const char* name = "scaled_dot_product_attention";
        const T *const in = numbers.read(name).data(), *const y = out.read(name).data(), *const hides = mask.data();
        const auto [grad, accumulate] = dx->target();
        T* const dq = grad.data();
        kernels::attention_backward(device, s, at, {accumulate, accumulate, accumulate}, in, in + width, in + 2 * width,
                                    hides, y, log_sums.data(), dy.data(), dq, dq + width, dq + 2 * width);
      },
      qkv);
}

/// q: [batch, queries, heads, features], k: [batch, keys, heads, features], v: [batch, keys, heads, values] ->
/// scaled_dot_product_attention for each head: [batch, queries, heads, values]. `mask`: as there, or none.
template <Operand Q, Operand K, Operand V, class... Mask>
auto attention_of_places(const Q& q, const K& k, const V& v, const AttentionOptions& options, const Mask&... mask) {
  if constexpr (has_stacked_attention<Q, K, V>) {
    const auto &queries = value_of(q).shape(), &keys = value_of(k).shape(), &values = value_of(v).shape();
    const Shape<4> scores{queries[0], queries[2], queries[1], keys[1]};
    const bool fits = keys == Shape<4>{queries[0], keys[1], queries[2], queries[3]} &&
                      values == Shape<4>{queries[0], keys[1], queries[2], values[3]};
    if (fits && queries[3] > 0 && values[3] > 0 && can_stride<Q, K, V>(scores))
      return attention_in_blocks<true>(q, k, v, mask_of_scores<Q>(scores, mask...), options);
  }
  const auto heads_first = [](const auto& x) { return permute(x, {0, 2, 1, 3}); };
  return heads_first(scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), mask..., options));
}

template <Operand X, class... Mask>
auto attention_packed(const X& qkv, const AttentionOptions& options, const Mask&... mask) {
  static_assert(tensor_of<X>::rank == 5,
                "scaled_dot_product_attention_packed: expected qkv [batch, length, 3, heads, features]");
  const auto shape = value_of(qkv).shape();
  const auto [batch, length, three, heads, features] = shape;
  check<ShapeError>(three == 3,
                    "scaled_dot_product_attention_packed: expected [batch, length, 3, heads, features], got ", shape);
  check<UsageError>(options.dropout >= 0 && options.dropout < 1,
                    "scaled_dot_product_attention_packed: expected a dropout probability in [0, 1), got ",
                    options.dropout);
  if constexpr (has_stacked_attention<X, X, X>) {
    const Shape<4> scores{batch, heads, length, length};
    if (features > 0 && can_stride<X, X, X>(scores))
      return attention_in_packed_blocks(qkv, mask_of_scores<X>(scores, mask...), options);
  }
  const auto parts = permute(qkv, {2, 0, 3, 1, 4});
  const auto part = [&, b = batch, l = length, h = heads, f = features](Index i) {
    return reshape(slice(parts, 0, i, i + 1), Shape<4>{b, h, l, f});
  };
  return permute(scaled_dot_product_attention(part(0), part(1), part(2), mask..., options), {0, 2, 1, 3});
}

}  // namespace detail

/// qkv: [batch, length, 3, heads, features], i.e. for each position and head a query, a key and a value ->
/// scaled_dot_product_attention for each head: [batch, length, heads, features]. On GPUs, above the limit for scores,
/// it copies nothing. Throws ShapeError if the third axis is not 3, UsageError unless 0 <= dropout < 1.
template <Operand X>
auto scaled_dot_product_attention_packed(const X& qkv, const AttentionOptions& options = {}) {
  return detail::attention_packed(qkv, options);
}
/// The same with a mask as for scaled_dot_product_attention: true for visible keys, or numbers added to the scores;
/// [length, length] or with leading axes.
template <Operand X, Scalar T, int Rank, Device D>
auto scaled_dot_product_attention_packed(const X& qkv, const Tensor<T, Rank, D>& mask,
                                         const AttentionOptions& options = {}) {
  return detail::attention_packed(qkv, options, mask);
}

}  // namespace chorus
