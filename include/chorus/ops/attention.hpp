#pragma once
/// Scaled dot-product attention (Vaswani et al. 2017).

#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/softmax.hpp>
#include <cmath>
#include <limits>

namespace chorus::inline CHORUS_ABI {

namespace detail {
/// [queries, keys]: true where the key comes after the query. The newest one is kept, so that a step that is captured
/// as a graph, in which nothing comes from the host, finds it.
template <Device D>
Tensor<bool, 2, D> later_keys(Index queries, Index keys, D device) {
  thread_local Tensor<bool, 2, D> kept;
  if (kept.defined() && kept.shape() == Shape<2>{queries, keys} && kept.device() == device) return kept;
  auto later = Tensor<bool, 2, Cpu>::empty({queries, keys});
  for (Index i = 0; i < queries; ++i)
    for (Index j = 0; j < keys; ++j) later.data()[i * keys + j] = j > i;
  const std::span<const bool> mask(later.data(), static_cast<std::size_t>(later.numel()));
  kept = Tensor<bool, 2, D>::from(mask, later.shape(), device);
  return kept;
}
}  // namespace detail

/// q: [batch..., queries, features], k: [batch..., keys, features], v: [batch..., keys, values] -> softmax(q kᵀ /
/// sqrt(features)) v: [batch..., queries, values]. With `causal`, query i sees keys 0 to i only. Throws ShapeError
/// where sizes differ.
template <Operand Q, Operand K, Operand V>
auto scaled_dot_product_attention(const Q& q, const K& k, const V& v, bool causal = false) {
  const auto features = static_cast<double>(value_of(q).size(-1));
  auto scores = matmul(q * (1 / std::sqrt(features)), transpose(k, -2, -1));
  if (causal) {
    const Index queries = scores.size(-2), keys = scores.size(-1);
    scores = masked_fill(scores, detail::later_keys(queries, keys, scores.device()),
                         -std::numeric_limits<double>::infinity());
  }
  return matmul(softmax(scores, -1), v);
}

/// The same where the mask says which keys each query sees: true for those; [queries, keys] or with axes in front.
/// Every query must see a key: else its result is NaN.
template <Operand Q, Operand K, Operand V, int Rank, Device D>
auto scaled_dot_product_attention(const Q& q, const K& k, const V& v, const Tensor<bool, Rank, D>& mask) {
  using T = typename tensor_of<Q>::value_type;
  const auto features = static_cast<double>(value_of(q).size(-1));
  const auto scores = matmul(q * (1 / std::sqrt(features)), transpose(k, -2, -1));
  const auto never = Tensor<T, 0, D>::full({}, static_cast<T>(-std::numeric_limits<float>::infinity()), mask.device());
  return matmul(softmax(where(mask, scores, never), -1), v);
}

}  // namespace chorus::inline CHORUS_ABI
