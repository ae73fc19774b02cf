#pragma once
/// KvCache: the keys and values of the tokens that a model has seen, so that a new token costs one position's work.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/indexing.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::nn {

namespace detail {

/// Of all types a KvCache alone is made of it: so `generate` asks whether a parameter is one.
struct CacheProbe {};

/// The keys and values of one attention layer.
struct CachedLayer {
  virtual ~CachedLayer() = default;
  virtual void reorder(std::span<const std::int64_t> rows) = 0;
  const void* layer = nullptr;
  Index length = 0;
};

template <Real T, Device D>
struct KeysAndValues final : CachedLayer {
  Tensor<T, 4, D> keys, values;  // [batch, heads, capacity, features]

  void reorder(std::span<const std::int64_t> rows) override {
    const auto index =
        Tensor<std::int64_t, 1, D>::from(rows, {static_cast<Index>(rows.size())}, keys.device());
    for (auto* const numbers : {&keys, &values}) {
      auto shape = numbers->shape();
      shape[0] = index.numel();
      const auto chosen = index_select(numbers->slice(2, 0, this->length), 0, index);
      auto moved = Tensor<T, 4, D>::empty(shape, keys.device());
      moved.slice(2, 0, this->length) = chosen;
      *numbers = std::move(moved);
    }
  }
};

}  // namespace detail

/// What attention layers keep of the positions before: a model passes it to each of its layers, and takes the position
/// of its first token from `length()`. A copy of a KvCache is the same cache. One without capacity keeps nothing, and
/// layers are causal over the tokens that they get, as in training. So a model has one `forward` for both:
///
///     auto forward(const auto& tokens, const nn::KvCache& cache = {}) const {
///       auto x = wte(tokens) + wpe(arange(cache.length(), cache.length() + tokens.size(1)));
///       for (const auto& block : blocks) x = block(x, cache);
///
/// Each layer keeps keys and values of shape [batch, heads, capacity, features / heads] on the model's device, under
/// TensorParallel those of this rank's heads.
class KvCache {
 public:
  KvCache() = default;
  /// For up to `capacity` positions. Throws UsageError unless it is positive.
  explicit KvCache(Index capacity) : state_(std::make_shared<State>()) {
    check<UsageError>(capacity > 0, "KvCache: expected a capacity of at least 1 position, got ", capacity);
    state_->capacity = capacity;
  }
  KvCache(detail::CacheProbe) {}

  explicit operator bool() const { return state_ != nullptr; }
  /// The number of positions before those of the current pass.
  Index length() const { return state_ ? state_->length : 0; }
  Index capacity() const { return state_ ? state_->capacity : 0; }

  /// Ends a pass: the positions that it added now count. Throws UsageError if layers added different numbers of them,
  /// or if no layer did.
  void advance() const {
    check<UsageError>(state_ != nullptr, "KvCache: advance: expected a cache with a capacity, got one without");
    const auto& layers = state_->layers;
    check<UsageError>(!layers.empty(),
                      "KvCache: advance: expected a pass in which attention layers took the cache, got none: the "
                      "model's forward must pass it to them");
    const Index length = layers.front()->length;
    for (const auto& layer : layers)
      check<UsageError>(layer->length == length && length > state_->length, "KvCache: advance: expected ", length,
                        " positions in each layer after ", state_->length, ", got ", layer->length,
                        ": each pass must go through all attention layers");
    state_->length = length;
  }

  /// Row i of the batch becomes the former row `rows[i]`, as beam search needs it; the batch may change its size.
  /// Throws UsageError for a row out of range.
  void reorder(std::span<const std::int64_t> rows) const {
    if (!state_) return;
    for (const auto& layer : state_->layers) layer->reorder(rows);
  }

  /// For attention layers: keeps `keys` and `values`, [batch, heads, new positions, features], and returns those of all
  /// positions until now, which are views. Throws UsageError beyond the capacity, if gradients are recorded, and if
  /// `layer` has already been called in this pass or was not in an earlier one; ShapeError if the batch changed.
  template <Real T, Device D>
  std::pair<Tensor<T, 4, D>, Tensor<T, 4, D>> append(const void* layer, const Tensor<T, 4, D>& keys,
                                                     const Tensor<T, 4, D>& values) const {
    check<UsageError>(!grad_enabled(), "KvCache: kept keys have no gradient: expected ch::NoGrad around the pass");
    auto& kept = of<T, D>(layer, keys, values);
    check<UsageError>(kept.length == length(), "KvCache: expected each attention layer once in a pass, and ",
                      kept.length < length() ? "in every pass, got a layer that missed one"
                                             : "cache.advance() after each pass, got a second call of a layer");
    const Index before = length(), now = before + keys.size(2);
    check<UsageError>(now <= capacity(), "KvCache: expected at most ", capacity(), " positions, got ", now,
                      ": give it a larger capacity");
    const auto fits = [&](const auto& all, const auto& added) {
      return all.size(0) == added.size(0) && all.size(1) == added.size(1) && all.size(3) == added.size(3);
    };
    check<ShapeError>(fits(kept.keys, keys) && fits(kept.values, values), "KvCache: expected keys like those before, ",
                      kept.keys.shape(), ", got ", keys.shape(), ": a cache belongs to one batch");
    kept.keys.slice(2, before, now) = keys;
    kept.values.slice(2, before, now) = values;
    kept.length = now;
    return {kept.keys.slice(2, 0, now), kept.values.slice(2, 0, now)};
  }

 private:
  struct State {
    Index length = 0, capacity = 0;
    std::vector<std::unique_ptr<detail::CachedLayer>> layers;
  };

  template <Real T, Device D>
  detail::KeysAndValues<T, D>& of(const void* layer, const Tensor<T, 4, D>& keys, const Tensor<T, 4, D>& values) const {
    using Layer = detail::KeysAndValues<T, D>;
    auto& layers = state_->layers;
    const auto found = std::find_if(layers.begin(), layers.end(), [&](const auto& l) { return l->layer == layer; });
    if (found != layers.end()) {
      auto* const known = dynamic_cast<Layer*>(found->get());
      check<UsageError>(known != nullptr, "KvCache: expected keys of one type and device, got a second one: ",
                        dtype<T>);
      return *known;
    }
    check<UsageError>(length() == 0,
                      "KvCache: expected the layers of the first pass, got a new one: the model has moved or was "
                      "copied since");
    auto made = std::make_unique<Layer>();
    const auto room = [&](const auto& x) {
      auto shape = x.shape();
      shape[2] = capacity();
      return Tensor<T, 4, D>::empty(shape, x.device());
    };
    made->layer = layer;
    made->keys = room(keys);
    made->values = room(values);
    layers.push_back(std::move(made));
    return static_cast<Layer&>(*layers.back());
  }

  std::shared_ptr<State> state_;
};

namespace detail {

/// Attention of a layer's projections [batch, heads, length, features]; `seen`: causal or a mask.
template <Operand Q, Operand K, Operand V, class Seen>
auto attention_of_layer(const void*, const Q& q, const K& k, const V& v, const Seen& seen) {
  return scaled_dot_product_attention(q, k, v, seen);
}
/// The queries follow the positions in the cache: query i attends to these and to the new keys 0 to i.
template <Operand Q, Operand K, Operand V>
auto attention_of_layer(const void* layer, const Q& q, const K& k, const V& v, const KvCache& cache) {
  using Result = decltype(scaled_dot_product_attention(q, k, v, true));
  const Index before = cache.length(), queries = value_of(q).size(2);
  check<ShapeError>(value_of(k).size(2) == queries, "MultiheadAttention: a KvCache is for self-attention: expected ",
                    queries, " new keys, got ", value_of(k).size(2));
  if (!cache) return scaled_dot_product_attention(q, k, v, true);
  const auto [keys, values] = cache.append(layer, value_of(k), value_of(v));
  if (queries == 1) return Result(scaled_dot_product_attention(q, keys, values));
  if (before == 0) return Result(scaled_dot_product_attention(q, keys, values, true));
  auto mask = Tensor<bool, 2, Cpu>::empty({queries, before + queries});
  for (Index i = 0; i < queries; ++i)
    for (Index j = 0; j < before + queries; ++j) mask(i, j) = j <= before + i;
  return Result(scaled_dot_product_attention(q, keys, values, to_device(mask, keys.device())));
}

}  // namespace detail

}  // namespace chorus::nn
