#pragma once
/// Attention of queries, keys and values that lie side by side, as one layer gives all three.

#include <chorus/ops/attention.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus {

namespace detail {

/// By blocks, with strides in the place of copies, on GPUs: the gradients of all three are one array, too.
template <Operand X>
auto attention_in_packed_blocks(const X& qkv, const AttentionOptions& options) {
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
                            .dropout = options.dropout};
  if (s.dropout > 0) s.key = next_random_key(batch);
  const kernels::AttentionPitch packed{length * three * width, features, three * width};
  const kernels::AttentionPitches at{packed, packed, packed, {length * width, features, width}};
  auto log_sums = Tensor<compute_type<T>, 1, D>::empty({batch * heads * length}, device);
  auto out = Tensor<T, 4, D>::empty({batch, length, heads, features}, device);
  count_multiply_adds(2 * batch * heads * length * length * features);
  const T* const q = numbers.data();
  kernels::attention_forward(device, s, at, q, q + width, q + 2 * width, static_cast<const T*>(nullptr), out.data(),
                             log_sums.data());
  return record(
      "scaled_dot_product_attention", out,
      [numbers = Saved(numbers), out = Saved(out), log_sums, s, at, width, device](const auto& dy, auto dx) {
        constexpr const char* name = "scaled_dot_product_attention";
        const T *const in = numbers.read(name).data(), *const y = out.read(name).data();
        const auto [grad, accumulate] = dx->target();
        T* const dq = grad.data();
        kernels::attention_backward(device, s, at, {accumulate, accumulate, accumulate}, in, in + width, in + 2 * width,
                                    static_cast<const T*>(nullptr), y, log_sums.data(), dy.data(),
                                    dq, dq + width, dq + 2 * width);
      },
      qkv);
}

}  // namespace detail

/// qkv: [batch, length, 3, heads, features], of each place a query, a key and a value for each head ->
/// scaled_dot_product_attention of each head: [batch, length, heads, features]. On GPUs, where scores are not to be in
/// memory, nothing is copied for it. Throws ShapeError where the third axis is not 3, UsageError unless 0 <= dropout <
/// 1.
template <Operand X>
auto scaled_dot_product_attention_packed(const X& qkv, const AttentionOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 5,
                "scaled_dot_product_attention_packed: qkv is [batch, length, 3, heads, features]");
  using D = typename tensor_of<X>::device_type;
  const auto shape = value_of(qkv).shape();
  const auto [batch, length, three, heads, features] = shape;
  check<ShapeError>(three == 3,
                    "scaled_dot_product_attention_packed: expected [batch, length, 3, heads, features], got ", shape);
  check<UsageError>(options.dropout >= 0 && options.dropout < 1,
                    "scaled_dot_product_attention_packed: the probability of dropout is in [0, 1), got ",
                    options.dropout);
  if constexpr (!std::is_same_v<D, Cpu> && detail::has_stacked_attention<X, X, X>) {
    using T = typename tensor_of<X>::value_type;
    if (kernels::above_scores_limit<T>(batch * heads * length * length) && features > 0 &&
        !detail::rounds_attention<X>())
      return detail::attention_in_packed_blocks(qkv, options);
  }
  const auto parts = permute(qkv, {2, 0, 3, 1, 4});
  const auto part = [&, b = batch, l = length, h = heads, f = features](Index i) {
    return reshape(slice(parts, 0, i, i + 1), Shape<4>{b, h, l, f});
  };
  return permute(scaled_dot_product_attention(part(0), part(1), part(2), options), {0, 2, 1, 3});
}

}  // namespace chorus
