#pragma once
/// The embedding table under TensorParallel.

#include <chorus/nn/embedding.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/vocabulary.hpp>
#include <cstdint>
#include <utility>

namespace chorus::nn {

/// Embedding with sharded entries under TensorParallel: each rank looks up its own entries, and the results are summed.
/// Without it, an Embedding with the same name, shape and initial values.
template <Device D, Real T = float>
class VocabularyParallelEmbedding : public Embedding<D, T> {
 public:
  VocabularyParallelEmbedding(Index entries, Index features) : Embedding<D, T>(entries, features), entries_(entries) {}

  template <int Rank>
  auto operator()(const Tensor<std::int64_t, Rank, D>& index) const {
    return detail::watched(*this, [&] {
      const ReadsParts parts;
      return detail::looked_up(this, this->weight, index.numel(), [&](const auto& table) {
        return vocabulary_embedding(table, index, entries_, group());
      });
    });
  }
  template <Narrow N, int Rank>
  auto operator()(const NarrowIndices<N, Rank, D>& index) const {
    return to<N>((*this)(index.plain()));
  }
  /// The output head of a model with tied weights: x: [..., features] -> the scores of all entries, x weightᵀ, as
  /// Columns of [..., entries].
  template <Operand X>
  auto scores(const X& x) const {
    const ReadsParts parts;
    auto own = group();
    auto y = detail::with_leaf_cut(own, {"VocabularyParallelEmbedding", entries_, 1, 1, /*of_inputs=*/false},
                                   [&] { return linear(enter_tensor_region(x, own), this->weight); });
    return Columns<decltype(y)>(std::move(y), entries_, 1, std::move(own));
  }
  void visit(Visitor& visitor) override { visitor.split_parameter("weight", this->weight, {.axis = 0}); }
  std::string describe() const override { return cat("Embedding(", entries_, ", ", this->weight.shape()[1], ")"); }

 private:
  TensorGroupRef group() const {
    return detail::group_of_part("VocabularyParallelEmbedding", this->weight.shape()[0], entries_, 1);
  }

  Index entries_;
};

}  // namespace chorus::nn
