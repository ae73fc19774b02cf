#pragma once
/// The table of learned vectors, and one that the ranks of TensorParallel share.

#include <cstdint>
#include <utility>

#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/vocabulary.hpp>

namespace chorus::nn {

/// index: [...] -> the rows of weight: [entries, features] that it names: [..., features].
template <Device D, Real T = float>
class Embedding : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight;

  /// Starts with numbers from N(0, 1). Throws ShapeError unless both sizes are positive.
  Embedding(Index entries, Index features) {
    check<ShapeError>(entries > 0 && features > 0, "Embedding: ", entries, " entries of ", features,
                      " features: both must be positive");
    weight = Parameter(init::normal<T, D, 2>({entries, features}, 0, 1));
  }

  template <int Rank>
  auto operator()(const Tensor<std::int64_t, Rank, D>& index) const {
    return detail::watched(*this, [&] { return embedding(weight, index); });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override { return cat("Embedding(", weight.shape()[0], ", ", weight.shape()[1], ")"); }
};

/// Embedding whose entries are shared out under TensorParallel: each rank looks up those that it has, and what they
/// give is added up. Else it is Embedding, with the same name, shape and initial numbers.
template <Device D, Real T = float>
class VocabularyParallelEmbedding : public Embedding<D, T> {
 public:
  VocabularyParallelEmbedding(Index entries, Index features) : Embedding<D, T>(entries, features), entries_(entries) {}

  template <int Rank>
  auto operator()(const Tensor<std::int64_t, Rank, D>& index) const {
    return detail::watched(*this, [&] { return vocabulary_embedding(this->weight, index, entries_, group()); });
  }
  /// The head of a model that has its weight in common with the table: x: [..., features] -> the scores of all entries,
  /// x weightᵀ, as Columns of [..., entries].
  template <Operand X>
  auto scores(const X& x) const {
    auto own = group();
    auto y = linear(enter_tensor_region(x, own), this->weight);
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
