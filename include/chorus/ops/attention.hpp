#pragma once
/// Scaled dot-product attention (Vaswani et al. 2017).

#include <algorithm>
#include <chorus/autograd/saved.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/shared_places.hpp>
#include <chorus/kernels/attention.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/tensor/kept_for_replays.hpp>
#include <cmath>
#include <concepts>
#include <functional>
#include <limits>
#include <numeric>

namespace chorus {

/// Options of scaled_dot_product_attention.
struct AttentionOptions {
  /// Query i attends to keys 0 to i only.
  bool causal = false;
  /// The probability of dropping an attention weight in training (see `dropout`).
  double dropout = 0;
};

namespace detail {

/// Whether a blockwise kernel exists: on the CPU, in float and double, without gradients of gradients.
template <class Q, class K, class V>
inline constexpr bool has_attention_kernel =
    std::same_as<typename tensor_of<Q>::device_type, Cpu>&& std::floating_point<typename tensor_of<Q>::value_type>&&
            tensor_of<Q>::rank == tensor_of<K>::rank&& tensor_of<Q>::rank == tensor_of<V>::rank &&
    !(is_graph_variable<Q> || is_graph_variable<K> || is_graph_variable<V>);

template <bool heads_inside>
kernels::AttentionPitches attention_pitches(const kernels::AttentionShape& s) {
  return heads_inside ? kernels::AttentionPitches::heads_inside(s) : kernels::AttentionPitches::dense(s);
}

template <class Q>
using AttentionMask = Tensor<typename tensor_of<Q>::value_type, 3, typename tensor_of<Q>::device_type>;

/// `mask` is undefined, or has the shape of the scores or of one score matrix. There is at least one score. With
/// `heads_inside`, on GPUs, operands and result are [batch, places, heads, features].
template <bool heads_inside = false, Operand Q, Operand K, Operand V>
auto attention_in_blocks(const Q& q, const K& k, const V& v, const AttentionMask<Q>& mask,
                         const AttentionOptions& options) {
  using T = typename tensor_of<Q>::value_type;
  using D = typename tensor_of<Q>::device_type;
  constexpr int rank = tensor_of<Q>::rank, places = heads_inside ? -3 : -2;
  constexpr bool on_cpu = std::is_same_v<D, Cpu>;
  static_assert(!heads_inside || (rank == 4 && !on_cpu));
  const auto queries = contiguous(value_of(q));
  const auto keys = contiguous(value_of(k));
  const auto values = contiguous(value_of(v));
  const auto device = queries.device();
  auto shape = queries.shape();
  const Index samples = rank > 2 ? shape[0] : 1;
  const Index matrices = queries.numel() / (queries.size(places) * queries.size(-1));
  kernels::AttentionShape s{.samples = samples,
                            .heads = matrices / samples,
                            .queries = queries.size(places),
                            .keys = keys.size(places),
                            .features = queries.size(-1),
                            .values = values.size(-1),
                            .scale = 1 / std::sqrt(static_cast<double>(queries.size(-1))),
                            .causal = options.causal,
                            .dropout = options.dropout,
                            .mask_pitch = mask.defined() && mask.size(0) != 1 ? mask.size(1) * mask.size(2) : 0};
  const auto shared = places_here();
  if (s.dropout > 0) s.key = shared ? shared->next_key(samples) : next_random_key(samples);
  auto log_sums = Tensor<compute_type<T>, 1, D>::empty({matrices * s.queries}, device);
  shape.back() = s.values;
  auto out = Tensor<T, rank, D>::empty(shape, device);
  count_multiply_adds(matrices * s.queries * s.keys * (s.features + s.values));
  const auto forward = [&](const auto&... at) {
    if constexpr (on_cpu)
      if (shared) [[unlikely]]
        return shared->attention_forward(s, queries.data(), keys.data(), values.data(), mask.data(), out.data(),
                                         log_sums.data());
    kernels::attention_forward(device, s, at..., queries.data(), keys.data(), values.data(), mask.data(), out.data(),
                               log_sums.data());
  };
  if constexpr (on_cpu)
    forward();
  else
    forward(attention_pitches<heads_inside>(s));
  return record(
      "scaled_dot_product_attention", out,
      [queries = Saved(queries), keys = Saved(keys), values = Saved(values), mask, out = Saved(out), log_sums, s,
       device, shared](const auto& dy, auto dq, auto dk, auto dv) {
        const auto numbers = [](const auto& saved) { return saved.read("scaled_dot_product_attention").data(); };
        const auto place = [&](auto node, bool& adds) -> T* {
          if (!node) return nullptr;
          const auto [grad, accumulate] = node->target();
          if (on_cpu && !accumulate) zero_bytes(device, grad.data(), grad.bytes());
          adds = accumulate;
          return grad.data();
        };
        const T* const in[] = {numbers(queries), numbers(keys), numbers(values), numbers(out)};
        kernels::AttentionAdds adds{};
        T* const grads[] = {place(dq, adds.q), place(dk, adds.k), place(dv, adds.v)};
        const auto backward = [&](const auto&... how) {
          if constexpr (on_cpu)
            if (shared) [[unlikely]]
              return shared->attention_backward(s, in[0], in[1], in[2], mask.data(), in[3], log_sums.data(), dy.data(),
                                                grads[0], grads[1], grads[2]);
          kernels::attention_backward(device, s, how..., in[0], in[1], in[2], mask.data(), in[3], log_sums.data(),
                                      dy.data(), grads[0], grads[1], grads[2]);
        };
        if constexpr (on_cpu)
          backward();
        else
          backward(attention_pitches<heads_inside>(s), adds);
      },
      q, k, v);
}

/// [queries, keys]: true if the key comes after the query. The last one is cached, since a captured CUDA graph must not
/// copy from the host.
template <Device D>
Tensor<bool, 2, D> later_keys(Index queries, Index keys, D device) {
  thread_local Tensor<bool, 2, D> kept;
  if (kept.defined() && kept.shape() == Shape<2>{queries, keys} && kept.device() == device) {
    keep_for_replays(kept.storage());
    return kept;
  }
  auto later = Tensor<bool, 2, Cpu>::empty({queries, keys});
  for (Index i = 0; i < queries; ++i)
    for (Index j = 0; j < keys; ++j) later.data()[i * keys + j] = j > i;
  const std::span<const bool> mask(later.data(), static_cast<std::size_t>(later.numel()));
  kept = Tensor<bool, 2, D>::from(mask, later.shape(), device);
  return kept;
}

/// Whether the interceptor wants the attention weights of this layer.
template <Operand Q>
bool takes_attention_weights() {
  if constexpr (may_be_intercepted<Q>) return interceptor != nullptr && interceptor->takes_attention_weights();
  return false;
}
template <Operand W>
W taken_weights(const W& weights) {
  if constexpr (may_be_intercepted<W>)
    if (takes_attention_weights<W>()) [[unlikely]] {
      interceptor->attends_by(value_of(weights).storage());
      return taken(weights);
    }
  return weights;
}

/// The same with the library's operations: the score matrix is in memory, for every device and type. `masked(scores)`
/// applies the mask.
template <Operand Q, Operand K, Operand V, class Masked>
auto unblocked_attention(const Q& q, const K& k, const V& v, const Masked& masked, const AttentionOptions& options) {
  const auto features = static_cast<double>(value_of(q).size(-1));
  auto scores = masked(matmul(q * (1 / std::sqrt(features)), transpose(k, -2, -1)));
  if (options.causal)
    scores = masked_fill(scores, later_keys(scores.size(-2), scores.size(-1), scores.device()),
                         -std::numeric_limits<double>::infinity());
  const auto weights = taken_weights(softmax(scores, -1, /*none_is_zero=*/true));
  if (options.dropout == 0) return matmul(weights, v);
  return matmul(dropout(weights, options.dropout), v);
}

/// Whether attention uses batched products, with the scale and the causal mask fused: on GPUs, without gradients of
/// gradients.
template <class Q, class K, class V>
inline constexpr bool has_stacked_attention =
    !std::is_same_v<typename tensor_of<Q>::device_type, Cpu> && tensor_of<Q>::rank == tensor_of<K>::rank &&
    tensor_of<Q>::rank == tensor_of<V>::rank && !(is_graph_variable<Q> || is_graph_variable<K> || is_graph_variable<V>);

/// q kᵀ / sqrt(features) for stacks of one shape, without a transposed or scaled copy.
template <Operand Q, Operand K>
auto attention_scores(const Q& q, const K& k) {
  using kernels::Trans;
  const auto queries = contiguous(value_of(q));
  const auto keys = contiguous(value_of(k));
  const auto device = queries.device();
  const Index m = queries.size(-2), n = keys.size(-2), features = queries.size(-1);
  auto shape = queries.shape();
  shape.back() = n;
  const Index count = queries.numel() / (m * features);
  const double scale = 1 / std::sqrt(static_cast<double>(features));
  auto out = tensor_of<Q>::empty(shape, device);
  count_multiply_adds(count * m * n * features);
  kernels::gemm_stack(device, {count, m * features, n * features, m * n}, Trans::no, Trans::yes, m, n, features,
                      queries.data(), features, keys.data(), features, out.data(), n, false, scale);
  return record(
      "scaled_dot_product_attention", std::move(out),
      [queries = Saved(queries), keys = Saved(keys), device, count, m, n, features, scale](const auto& dy, auto dq,
                                                                                           auto dk) {
        constexpr const char* name = "scaled_dot_product_attention";
        if (dq) {
          const auto [grad, accumulate] = dq->target();
          kernels::gemm_stack(device, {count, m * n, n * features, m * features}, Trans::no, Trans::no, m, features, n,
                              dy.data(), n, keys.read(name).data(), features, grad.data(), features, accumulate, scale);
        }
        if (dk) {
          const auto [grad, accumulate] = dk->target();
          kernels::gemm_stack(device, {count, m * n, m * features, n * features}, Trans::yes, Trans::no, n, features, m,
                              dy.data(), n, queries.read(name).data(), features, grad.data(), features, accumulate,
                              scale);
        }
      },
      q, k);
}

/// The attention weights of scores [..., queries, keys], if query i attends to keys 0 to i only.
template <Operand X>
auto causal_softmax(const X& scores) {
  return along_axis(
      operations::Softmax{-1}, scores, -1,
      [queries = value_of(scores).size(-2)](auto device, auto view, const auto* in, auto* out) {
        kernels::softmax_forward(device, view, in, out, /*none_is_zero=*/true, queries);
      },
      [](auto device, auto view, const auto* y, const auto* dy, auto* dx, bool accumulate) {
        kernels::softmax_backward(device, view, y, dy, dx, accumulate);
      });
}

/// One batched product for the scores and one for the result. The score matrix is in memory; the number of kernel
/// launches does not depend on the sizes.
template <Operand Q, Operand K, Operand V, class Masked>
auto attention_in_stacks(const Q& q, const K& k, const V& v, const Masked& masked, const AttentionOptions& options) {
  const auto scores = masked(attention_scores(q, k));
  const auto weights = options.causal ? causal_softmax(scores) : softmax(scores, -1, /*none_is_zero=*/true);
  if (options.dropout == 0) return matmul(weights, v);
  return matmul(dropout(weights, options.dropout), v);
}

/// The mask as matrices: one for each matrix of scores, or one for all.
template <class T, int Rank, class D, std::size_t N>
Tensor<T, 3, D> attention_mask(const Tensor<T, Rank, D>& mask, std::array<Index, N> scores) {
  static_assert(Rank >= 2 && Rank <= static_cast<int>(N), "attention: expected a mask [..., queries, keys]");
  check<ShapeError>(shared_places == nullptr || mask.size(-1) == scores[N - 1],
                    "SequenceParallel: attention: expected ", "a mask for the ", scores[N - 1],
                    " keys of all ranks (ch::whole), got shape ", mask.shape());
  const auto matrix = [&](Index count) { return Shape<3>{count, scores[N - 2], scores[N - 1]}; };
  const bool for_all = std::all_of(mask.shape().begin(), mask.shape().end() - 2, [](Index size) { return size == 1; });
  if (!for_all) return broadcast_to(mask, scores).view(matrix(-1));
  return broadcast_to(contiguous(mask).view(Shape<3>{1, mask.size(-2), mask.size(-1)}), matrix(1));
}
/// The same for a bool mask: 0 for visible keys, -infinity of type T for others.
template <class T, int Rank, class D, std::size_t N>
Tensor<T, 3, D> attention_mask(const Tensor<bool, Rank, D>& mask, std::array<Index, N> scores) {
  constexpr float hidden = -std::numeric_limits<float>::infinity();
  if constexpr (std::is_same_v<D, Cpu>) {
    const auto seen = contiguous(mask);
    auto added = Tensor<T, Rank, D>::empty(mask.shape(), mask.device());
    std::transform(seen.data(), seen.data() + seen.numel(), added.data(),
                   [=](bool sees) { return sees ? static_cast<T>(0) : static_cast<T>(hidden); });
    return attention_mask(added, scores);
  } else {
    const auto none = Tensor<T, 0, D>::full({}, static_cast<T>(hidden), mask.device());
    return attention_mask(where(mask, Tensor<T, Rank, D>::zeros(mask.shape(), mask.device()), none), scores);
  }
}

template <Operand Q, Operand K, Operand V, class MakeMask, class Masked>
auto attention(const Q& q, const K& k, const V& v, const MakeMask& make_mask, const Masked& masked,
               const AttentionOptions& options) {
  const auto &queries = value_of(q), &keys = value_of(k), &values = value_of(v);
  check<ShapeError>(queries.size(-1) == keys.size(-1) && keys.size(-2) == values.size(-2),
                    "scaled_dot_product_attention: queries of shape ", queries.shape(), ", keys of shape ",
                    keys.shape(), " and values of shape ", values.shape(), " do not fit");
  check<UsageError>(options.dropout >= 0 && options.dropout < 1,
                    "scaled_dot_product_attention: expected a dropout probability in [0, 1), got ", options.dropout);
  check<UsageError>(options.dropout == 0 || tensor_of<Q>::rank > 2,
                    "scaled_dot_product_attention: expected a batch axis for dropout, got shape ", queries.shape());
  if constexpr (has_attention_kernel<Q, K, V> || has_stacked_attention<Q, K, V>) {
    auto scores = queries.shape();
    const auto same_batch = [&](const auto& other) {
      return std::equal(scores.begin(), scores.end() - 2, other.begin());
    };
    if (same_batch(keys.shape()) && same_batch(values.shape()) && queries.numel() > 0 && values.numel() > 0 &&
        !takes_attention_weights<Q>()) {
      scores.back() = keys.size(-2);
      if (shared_places != nullptr) [[unlikely]]
        shared_places->widen(scores[scores.size() - 2], scores.back());
      const auto in_blocks = [&] { return attention_in_blocks(q, k, v, make_mask(scores), options); };
      if constexpr (has_attention_kernel<Q, K, V>) {
        return in_blocks();
      } else {
        if (kernels::above_scores_limit<typename tensor_of<Q>::value_type>(numel(scores))) return in_blocks();
        return attention_in_stacks(q, k, v, masked, options);
      }
    }
  }
  check<UsageError>(shared_places == nullptr || queries.numel() == 0, "SequenceParallel: attention of shapes ",
                    queries.shape(), ", ", keys.shape(), ": expected self-attention in float or double on the CPU, ",
                    "with one key for each query and head, without gradients of gradients or quantisation");
  return unblocked_attention(q, k, v, masked, options);
}

}  // namespace detail

/// q: [batch..., queries, features], k: [batch..., keys, features], v: [batch..., keys, values] -> softmax(q kᵀ /
/// sqrt(features)) v: [batch..., queries, values]. Memory grows with queries + keys, not with their product; on GPUs
/// only above kernels::attention_scores_limit(). Throws ShapeError if sizes differ, UsageError unless 0 <= dropout < 1.
template <Operand Q, Operand K, Operand V>
auto scaled_dot_product_attention(const Q& q, const K& k, const V& v, const AttentionOptions& options) {
  return detail::attention(
      q, k, v, [](const auto&) { return detail::AttentionMask<Q>{}; }, [](const auto& scores) { return scores; },
      options);
}
template <Operand Q, Operand K, Operand V>
auto scaled_dot_product_attention(const Q& q, const K& k, const V& v, bool causal = false) {
  return scaled_dot_product_attention(q, k, v, AttentionOptions{.causal = causal});
}

/// The same with a bool mask, [queries, keys] or with leading axes: true for keys that the query attends to. A query
/// without any key gets zeros and no gradient, as in PyTorch.
template <Operand Q, Operand K, Operand V, int Rank, Device D>
auto scaled_dot_product_attention(const Q& q, const K& k, const V& v, const Tensor<bool, Rank, D>& mask,
                                  const AttentionOptions& options = {}) {
  using T = typename tensor_of<Q>::value_type;
  constexpr float hidden = -std::numeric_limits<float>::infinity();
  return detail::attention(
      q, k, v, [&](const auto& scores) { return detail::attention_mask<T>(mask, scores); },
      [&](const auto& scores) {
        return where(mask, scores, Tensor<T, 0, D>::full({}, static_cast<T>(hidden), mask.device()));
      },
      options);
}

/// The same with a mask that is added to the scores: [queries, keys] or with leading axes. It gets no gradient.
template <Operand Q, Operand K, Operand V, int Rank, Device D>
auto scaled_dot_product_attention(const Q& q, const K& k, const V& v,
                                  const Tensor<typename tensor_of<Q>::value_type, Rank, D>& mask,
                                  const AttentionOptions& options = {}) {
  return detail::attention(
      q, k, v, [&](const auto& scores) { return detail::attention_mask(mask, scores); },
      [&](const auto& scores) { return scores + mask; }, options);
}

}  // namespace chorus
