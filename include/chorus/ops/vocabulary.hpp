#pragma once
/// Embedding and cross entropy with a vocabulary that is sharded over ranks (Shoeybi et al. 2019, section 3).

#include <algorithm>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/vocabulary.hpp>
#include <chorus/ops/columns.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/masking.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// weight: this rank's part of `entries`: [part, features], index: [...] -> rows: [..., features], on all ranks. Throws
/// UsageError for an index out of range.
template <Operand W, int Rank, class D>
auto vocabulary_embedding(const W& weight, const Tensor<std::int64_t, Rank, D>& index, Index entries,
                          const TensorGroupRef& group = tensor_group()) {
  using Rows = decltype(leave_tensor_region(embedding(weight, index), group));
  if (group == nullptr) return Rows(embedding(weight, index));
  if (group->size() == 1) return Rows(embedding(weight, index) + 0.0);  // -0 becomes 0, as in a sum over ranks
  return leave_tensor_region(Rows(detail::rows_here(weight, index, entries, group->part(entries, 1))), group);
}

namespace detail {

template <int Rank, Operand X, class D>
Recorded<Rank, X> vocabulary_cross_entropy(const Columns<X>& logits, const Tensor<std::int64_t, 1, D>& labels,
                                           const CrossEntropyOptions& options) {
  using T = typename tensor_of<X>::value_type;
  const auto scores = contiguous(value_of(logits.part()));
  const auto targets = contiguous(labels);
  check_class_loss("cross_entropy", scores, targets, options, Rank == 1 ? Reduction::none : Reduction::mean);
  const auto device = scores.device();
  const Index batch = scores.size(0);
  const auto part = logits.range();
  const kernels::Vocabulary words{logits.width(), part.begin, part.count};
  auto largest = Tensor<T, 1, D>::empty({batch}, device);
  kernels::vocabulary_maximum(device, batch, words, scores.data(), largest.data());
  logits.group()->max(span_of(largest));
  // For each sample: the sum of exp(x - largest), the label's x - largest, and the sum of x - largest.
  auto sums = Tensor<T, 2, D>::empty({batch, 3}, device);
  kernels::vocabulary_sums(device, batch, words, scores.data(), targets.data(), options, largest.data(), sums.data());
  logits.group()->sum(span_of(sums));
  Shape<Rank> shape{};
  if constexpr (Rank == 1) shape[0] = batch;
  auto loss = Tensor<T, Rank, D>::empty(shape, device);
  kernels::vocabulary_loss(device, batch, words, targets.data(), options, sums.data(), loss.data());
  return record(
      "cross_entropy", std::move(loss),
      [saved = Saved(scores), targets, options, largest, sums, words](const auto& dloss, auto dlogits) {
        const auto& x = saved.read("cross_entropy");
        const auto [grad, accumulate] = dlogits->target();
        kernels::vocabulary_backward(x.device(), x.size(0), words, x.data(), targets.data(), options, largest.data(),
                                     sums.data(), dloss.data(), grad.data(), accumulate);
      },
      logits.part());
}

// All classes, if each rank computes the loss by itself: without a group, and under SameBits, where a sum over classes
// has one device's order.
template <class X>
std::optional<X> whole_scores(const Columns<X>& logits) {
  const auto& group = logits.group();
  if (group == nullptr) return logits.part();
  if (group->products() == nullptr) return std::nullopt;
  return gather_axis(logits.part(), -1, logits.width(), logits.unit(), false, group);
}

// `f(columns)`; bf16 and half columns are computed in float.
template <class X, class F>
auto columns_in_float(const Columns<X>& logits, const F& f) {
  if constexpr (NarrowOperand<X>)
    return to<typename tensor_of<X>::value_type>(f(logits.with(to<float>(logits.part()))));
  else
    return f(logits);
}

}  // namespace detail

/// Cross entropy of scores whose classes are sharded over ranks: the loss over all classes, on every rank. Communicates
/// three numbers per sample. Throws as for whole scores.
template <class X, class D>
auto cross_entropy(const Columns<X>& logits, const Tensor<std::int64_t, 1, D>& labels,
                   const CrossEntropyOptions& options = {}) {
  detail::check_first_order<X>();
  using Loss = decltype(cross_entropy(logits.part(), labels, options));
  if (const auto whole = detail::whole_scores(logits)) return cross_entropy(*whole, labels, options);
  return Loss(detail::columns_in_float(logits, [&](const auto& scores) {
    const auto targets = to_device(labels, value_of(scores.part()).device());
    const auto loss_of = [&](const CrossEntropyOptions& reducing) {
      return detail::vocabulary_cross_entropy<0>(scores, targets, reducing);
    };
    const auto each = [&](const CrossEntropyOptions& unreduced) {
      return detail::vocabulary_cross_entropy<1>(scores, targets, unreduced);
    };
    return detail::reduced_over_labels("cross_entropy", scores.part(), loss_of, each, labels, options);
  }));
}

/// The same without a reduction: [batch].
template <class X, class D>
auto cross_entropy_per_sample(const Columns<X>& logits, const Tensor<std::int64_t, 1, D>& labels,
                              const CrossEntropyOptions& options = {}) {
  detail::check_first_order<X>();
  using Losses = decltype(cross_entropy_per_sample(logits.part(), labels, options));
  if (const auto whole = detail::whole_scores(logits)) return cross_entropy_per_sample(*whole, labels, options);
  return Losses(detail::columns_in_float(logits, [&](const auto& scores) {
    return detail::vocabulary_cross_entropy<1>(scores, to_device(labels, value_of(scores.part()).device()),
                                               detail::unreduced("cross_entropy_per_sample", options));
  }));
}

}  // namespace chorus
