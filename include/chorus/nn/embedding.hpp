#pragma once
/// The embedding table.

#include <cstdint>

#include <chorus/nn/init.hpp>
#include <chorus/nn/intercepted.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/indexing.hpp>

namespace chorus::nn {

/// index: [...] -> rows of weight: [entries, features]: [..., features]; under MixedPrecision in its type.
template <Device D, Real T = float>
class Embedding : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight;

  /// Initialised from N(0, 1). Throws ShapeError unless both sizes are positive.
  Embedding(Index entries, Index features) {
    check<ShapeError>(entries > 0 && features > 0, "Embedding: ", entries, " entries of ", features,
                      " features: both must be positive");
    weight = Parameter(init::normal<T, D, 2>({entries, features}, 0, 1));
  }

  template <int Rank>
  auto operator()(const Tensor<std::int64_t, Rank, D>& index) const {
    return detail::watched(*this, [&] { return rows(index, index.numel()); });
  }
  template <Narrow N, int Rank>
  auto operator()(const NarrowIndices<N, Rank, D>& index) const {
    return detail::watched(*this, [&] { return rows(index, index.plain().numel()); });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override { return cat("Embedding(", weight.shape()[0], ", ", weight.shape()[1], ")"); }

 private:
  auto rows(const auto& index, Index count) const {
    return detail::looked_up(this, weight, count, [&](const auto& table) { return embedding(table, index); });
  }
};

}  // namespace chorus::nn
