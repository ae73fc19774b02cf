#pragma once
/// Multi-head attention (Vaswani et al. 2017), with PyTorch's parameter names and initialisation.

#include <chorus/nn/linear.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/dropout.hpp>
#include <cmath>
#include <optional>

namespace chorus::nn {

struct MultiheadAttentionOptions {
  bool bias = true;
};

/// query: [batch, queries, features], key, value: [batch, keys, features] -> [batch, queries, features]; each of
/// `heads` heads attends with features / heads numbers. in_proj_weight: [3 features, features], the projections of
/// query, key and value one below the other. Batches come first (PyTorch's batch_first = True).
template <Device D, Real T = float>
class MultiheadAttention : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> in_proj_weight;
  Parameter<T, 1, D> in_proj_bias;
  Linear<D, T> out_proj;

  /// Throws ShapeError unless `heads` divides the features.
  MultiheadAttention(Index features, Index heads, const MultiheadAttentionOptions& options = {})
      : out_proj(features, features, {.bias = options.bias}), heads_(heads) {
    check<ShapeError>(heads > 0 && features % heads == 0, "MultiheadAttention: ", heads, " heads do not divide ",
                      features, " features");
    // Xavier's bound (Glorot, Bengio 2010) for the three projections as one.
    const double bound = std::sqrt(6.0 / static_cast<double>(4 * features));
    in_proj_weight = Parameter(init::uniform<T, D, 2>({3 * features, features}, bound));
    if (!options.bias) return;
    in_proj_bias = Parameter(init::constant<T, D, 1>({3 * features}, T{0}));
    out_proj.bias = Parameter(init::constant<T, D, 1>({features}, T{0}));
  }

  /// With `causal`, query i sees keys 0 to i only.
  template <Operand Q, Operand K, Operand V>
  auto operator()(const Q& query, const K& key, const V& value, bool causal = false) const {
    return detail::watched(*this, [&] { return attend(query, key, value, causal); });
  }
  /// `mask` says which keys each query sees: [queries, keys], or with axes [batch, heads] in front.
  template <Operand Q, Operand K, Operand V, int Rank>
  auto operator()(const Q& query, const K& key, const V& value, const Tensor<bool, Rank, D>& mask) const {
    return detail::watched(*this, [&] { return attend(query, key, value, mask); });
  }

  void visit(Visitor& visitor) override {
    visitor.parameter("in_proj_weight", in_proj_weight);
    if (in_proj_bias) visitor.parameter("in_proj_bias", in_proj_bias);
    visitor.module("out_proj", out_proj);
  }
  std::string describe() const override {
    return cat("MultiheadAttention(", in_proj_weight.shape()[1], ", ", heads_, " heads)");
  }

 private:
  template <Operand Q, Operand K, Operand V, class Seen>
  auto attend(const Q& query, const K& key, const V& value, const Seen& seen) const {
    const auto& shape = value_of(query).shape();
    check<ShapeError>(shape[2] == in_proj_weight.shape()[1], "MultiheadAttention: a query of shape ", shape,
                      " does not have ", in_proj_weight.shape()[1], " features");
    const auto heads = scaled_dot_product_attention(project(query, 0), project(key, 1), project(value, 2), seen);
    return out_proj(reshape(permute(heads, Shape<4>{0, 2, 1, 3}), shape));
  }
  // [batch, length, features] -> [batch, heads, length, features / heads]
  template <Operand X>
  auto project(const X& x, Index part) const {
    static_assert(tensor_of<X>::rank == 3, "MultiheadAttention: inputs are [batch, length, features]");
    const Index features = in_proj_weight.shape()[1];
    const auto weight = slice(in_proj_weight, 0, part * features, (part + 1) * features);
    const auto lines = [&] {
      return linear(x, weight, slice(in_proj_bias, 0, part * features, (part + 1) * features));
    };
    const auto y = in_proj_bias ? lines() : decltype(lines())(linear(x, weight));
    const auto& shape = value_of(x).shape();
    return permute(reshape(y, Shape<4>{shape[0], shape[1], heads_, features / heads_}), Shape<4>{0, 2, 1, 3});
  }

  Index heads_;
};

}  // namespace chorus::nn
