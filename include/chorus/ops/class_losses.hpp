#pragma once
/// Losses over classes for more than [batch, classes]: class weights, a class per pixel, probabilities as targets.

#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>
#include <cstdint>
#include <type_traits>

namespace chorus {

namespace detail {

// [batch, classes, ...] -> [batch * ..., classes]
template <Operand X>
auto class_rows(const X& x) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 2, "class loss: expected scores [batch, classes, ...]");
  Shape<rank> order{};
  order[0] = 0;
  for (int axis = 2; axis < rank; ++axis) order[static_cast<std::size_t>(axis - 1)] = axis;
  order.back() = 1;
  const Index classes = value_of(x).size(1);
  const Index rows = classes == 0 ? 0 : value_of(x).numel() / classes;
  return reshape(permute(x, order), Shape<2>{rows, classes});
}

template <std::size_t Rank>
Shape<static_cast<int>(Rank) - 1> shape_without_classes(const std::array<Index, Rank>& scores) {
  Shape<static_cast<int>(Rank) - 1> out{};
  out[0] = scores[0];
  for (std::size_t axis = 2; axis < Rank; ++axis) out[axis - 1] = scores[axis];
  return out;
}

template <class D, class T, int Rank>
Tensor<std::int64_t, 1, D> label_row(const char* operation, const Tensor<T, Rank, D>& scores,
                                     const Tensor<std::int64_t, Rank - 1, D>& labels) {
  check<ShapeError>(labels.shape() == shape_without_classes(scores.shape()), operation, ": scores of shape ",
                    scores.shape(), " do not fit labels of shape ", labels.shape());
  return contiguous(labels).view(Shape<1>{-1});
}

// Whether cross entropy of images has its own kernel: not for gradients of gradients and not on GPUs.
template <Operand X>
inline constexpr bool reads_class_columns =
    std::is_same_v<typename tensor_of<X>::device_type, Cpu> && !is_graph_variable<X>;

// logits: [batch, classes, ...], labels: [batch * ...]
template <int Rank, Operand X>
Recorded<Rank, X> image_cross_entropy(const X& logits, const Tensor<std::int64_t, 1, Cpu>& labels,
                                      const CrossEntropyOptions& options) {
  using T = typename tensor_of<X>::value_type;
  const auto scores = contiguous(value_of(logits));
  check<UsageError>((options.reduction == Reduction::none) == (Rank == 1),
                    "cross_entropy: for one loss per sample call cross_entropy_per_sample");
  const auto view = around_axis(scores.shape(), 1);
  Shape<Rank> shape{};
  if constexpr (Rank == 1) shape[0] = labels.numel();
  auto loss = Tensor<T, Rank, Cpu>::empty(shape, scores.device());
  const auto log_sum_exp = Tensor<T, 1, Cpu>::empty(labels.shape(), scores.device());
  kernels::image_cross_entropy_forward(scores.device(), view, scores.data(), labels.data(), options, loss.data(),
                                       log_sum_exp.data());
  return record(
      "cross_entropy", std::move(loss),
      [saved = Saved(scores), view, labels, options, log_sum_exp](const auto& dloss, auto dlogits) {
        const auto& x = saved.read("cross_entropy");
        const auto [grad, accumulate] = dlogits->target();
        kernels::image_cross_entropy_backward(x.device(), view, x.data(), labels.data(), options, log_sum_exp.data(),
                                              dloss.data(), grad.data(), accumulate);
      },
      logits);
}

// The loss of each sample, and the divisor of their mean.
template <Operand X, class T, class D>
auto weighted_losses(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels,
                     const Tensor<T, 1, D>& weight, std::int64_t ignore_index, double smoothing) {
  const auto& shape = value_of(log_probabilities).shape();
  check<ShapeError>(weight.numel() == shape[1], "loss over classes: ", weight.numel(), " weights for ", shape[1],
                    " classes");
  const NllLossOptions options{.ignore_index = ignore_index, .reduction = Reduction::none};
  const auto scaled = log_probabilities * weight;
  auto losses = nll_loss_per_sample(scaled, labels, options);
  if (smoothing != 0) {
    const auto counted = nll_loss_per_sample(Tensor<T, 2, D>::full(shape, T{-1}, weight.device()), labels, options);
    losses = losses * (1 - smoothing) -
             sum(scaled, 1) * counted * (smoothing / static_cast<double>(std::max(shape[1], Index{1})));
  }
  return losses;
}

template <class T, class D>
Tensor<T, 0, D> total_weight(const Tensor<std::int64_t, 1, D>& labels, const Tensor<T, 1, D>& weight,
                             std::int64_t ignore_index) {
  const Shape<2> shape{labels.numel(), weight.numel()};
  const auto each = nll_loss_per_sample(broadcast_to(-weight, shape), labels, {.ignore_index = ignore_index});
  // The mean over no samples is 0, not 0 / 0.
  return maximum(sum(each), Tensor<T, 0, D>::full({}, std::numeric_limits<T>::min(), weight.device()));
}

template <Operand X, class T, class D, class Options>
auto reduce_weighted(const char* operation, const X& losses, const Tensor<std::int64_t, 1, D>& labels,
                     const Tensor<T, 1, D>& weight, const Options& options) {
  if (options.mean_over)
    return sum_of_losses_over(losses, checked_mean_over(operation, options),
                              std::is_same_v<D, Cpu>
                                  ? static_cast<double>(total_weight(labels, weight, options.ignore_index).item())
                                  : 0);
  if constexpr (AnyVariable<X> && !is_graph_variable<X>)
    if (const auto parts = options.reduction == Reduction::mean ? parts_of(losses) : nullptr) [[unlikely]]
      return mean_of_parts(losses, *parts, [&](Index begin, Index end) {
        const T weights = total_weight(labels.slice(0, begin, end), weight, options.ignore_index).item();
        return weights == std::numeric_limits<T>::min() ? 0 : static_cast<double>(weights);
      });
  auto total = sum(losses);
  if (options.reduction != Reduction::mean) return total;
  const auto over = total_weight(labels, weight, options.ignore_index);
  return as_counted_mean<D>(as_sum(total, true, 0, Node::of_a_mean) / over, [over] {
    const T weights = over.item();
    return weights == std::numeric_limits<T>::min() ? 0 : static_cast<double>(weights);
  });
}

}  // namespace detail

/// logits: [batch, classes, ...], labels: [batch, ...]: cross entropy, averaged (or summed) over all positions.
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto cross_entropy(
    const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels, const CrossEntropyOptions& options = {}) {
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  if constexpr (!detail::reads_class_columns<X>)
    return cross_entropy(detail::class_rows(logits), row, options);
  else
    return detail::in_float(logits, [&](const auto& scores) {
      const auto targets = to_device(row, value_of(scores).device());
      const auto loss_of = [&](const CrossEntropyOptions& reducing) {
        return detail::with_variables(
            [&](const auto& x) { return detail::image_cross_entropy<0>(x, targets, reducing); }, scores);
      };
      const auto each = [&](const CrossEntropyOptions& unreduced) {
        return detail::image_cross_entropy<1>(scores, targets, unreduced);
      };
      return detail::reduced_over_labels("cross_entropy", scores, loss_of, each, row, options);
    });
}
/// The same for each position, without a reduction: [batch, ...].
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto cross_entropy_per_sample(
    const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels, const CrossEntropyOptions& options = {}) {
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  if constexpr (!detail::reads_class_columns<X>) {
    return reshape(cross_entropy_per_sample(detail::class_rows(logits), row, options), labels.shape());
  } else {
    const auto losses = detail::in_float(logits, [&](const auto& scores) {
      const auto targets = to_device(row, value_of(scores).device());
      const auto each = detail::unreduced("cross_entropy_per_sample", options);
      return detail::image_cross_entropy<1>(scores, targets, each);
    });
    return reshape(losses, labels.shape());
  }
}

/// With class weights, [classes]: every loss is multiplied by its label's weight, and the mean is divided by the sum of
/// these weights, as in PyTorch. logits: [batch, classes, ...], labels: [batch, ...].
template <Operand X, int LabelRank, class T, class D>
auto cross_entropy(const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels, const Tensor<T, 1, D>& weight,
                   const CrossEntropyOptions& options = {}) {
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  const auto losses = detail::weighted_losses(log_softmax(detail::class_rows(logits), 1), row, weight,
                                              options.ignore_index, options.label_smoothing);
  return detail::reduce_weighted("cross_entropy", losses, row, weight, options);
}
template <Operand X, int LabelRank, class T, class D>
auto cross_entropy_per_sample(const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels,
                              const Tensor<T, 1, D>& weight, const CrossEntropyOptions& options = {}) {
  detail::unreduced("cross_entropy_per_sample", options);
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  return reshape(detail::weighted_losses(log_softmax(detail::class_rows(logits), 1), row, weight, options.ignore_index,
                                         options.label_smoothing),
                 labels.shape());
}

/// Negative log likelihood of log_probabilities: [batch, classes, ...], with labels: [batch, ...].
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto nll_loss(
    const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels, const NllLossOptions& options = {}) {
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  return nll_loss(detail::class_rows(log_probabilities), row, options);
}
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto nll_loss_per_sample(
    const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels, const NllLossOptions& options = {}) {
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  return reshape(nll_loss_per_sample(detail::class_rows(log_probabilities), row, options), labels.shape());
}

/// Negative log likelihood with class weights, as for cross_entropy.
template <Operand X, int LabelRank, class T, class D>
auto nll_loss(const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels,
              const Tensor<T, 1, D>& weight, const NllLossOptions& options = {}) {
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  const auto losses =
      detail::weighted_losses(detail::class_rows(log_probabilities), row, weight, options.ignore_index, 0);
  return detail::reduce_weighted("nll_loss", losses, row, weight, options);
}
template <Operand X, int LabelRank, class T, class D>
auto nll_loss_per_sample(const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels,
                         const Tensor<T, 1, D>& weight, const NllLossOptions& options = {}) {
  detail::unreduced("nll_loss_per_sample", options);
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  return reshape(detail::weighted_losses(detail::class_rows(log_probabilities), row, weight, options.ignore_index, 0),
                 labels.shape());
}

/// Probabilities as targets, [batch, classes, ...] like the logits -> -sum over classes of target log_softmax(logits)
/// for each position: [batch, ...]. Throws ShapeError if shapes differ.
template <Operand X, Operand Y>
requires(
    tensor_of<X>::rank == tensor_of<Y>::rank &&
    Real<typename tensor_of<Y>::value_type>) auto cross_entropy_per_sample(const X& logits, const Y& target,
                                                                           const CrossEntropyOptions& options = {}) {
  const auto& shape = value_of(logits).shape();
  check<ShapeError>(shape == value_of(target).shape(), "cross_entropy: logits of shape ", shape,
                    " do not fit targets of shape ", value_of(target).shape());
  const double s = detail::unreduced("cross_entropy_per_sample", options).label_smoothing;
  check<UsageError>(s >= 0 && s <= 1, "cross_entropy: label_smoothing must be in [0, 1], got ", s);
  const auto smooth = target * (1 - s) + s / static_cast<double>(std::max(shape[1], Index{1}));
  return -sum(smooth * log_softmax(logits, 1), 1);
}
/// The same averaged over the batch and all positions, or summed.
template <Operand X, Operand Y>
requires(tensor_of<X>::rank == tensor_of<Y>::rank &&
         Real<typename tensor_of<Y>::value_type>) auto cross_entropy(const X& logits, const Y& target,
                                                                     const CrossEntropyOptions& options = {}) {
  const auto losses = cross_entropy_per_sample(logits, target, {.label_smoothing = options.label_smoothing});
  if (options.mean_over)
    return detail::sum_of_losses_over(losses, detail::checked_mean_over("cross_entropy", options),
                                      static_cast<double>(value_of(losses).numel()));
  return detail::mean_or_sum(losses, options.reduction);
}

}  // namespace chorus
