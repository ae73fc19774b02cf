#pragma once
/// Losses over classes.

#include <algorithm>
#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/cross_entropy.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/mean_of_parts.hpp>
#include <chorus/ops/cast.hpp>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
template <class D>
struct CrossEntropy {
  static constexpr const char* name = "cross_entropy";
  Tensor<std::int64_t, 1, D> labels;
  CrossEntropyOptions options;
};
template <class D>
struct NllLoss {
  static constexpr const char* name = "nll_loss";
  Tensor<std::int64_t, 1, D> labels;
  NllLossOptions options;
};
}  // namespace operations

namespace detail {
template <class T, class D, class Options>
void check_class_loss(const char* operation, const Tensor<T, 2, D>& scores, const Tensor<std::int64_t, 1, D>& labels,
                      const Options& options, Reduction expected) {
  check<ShapeError>(scores.size(0) == labels.size(0), operation, ": expected ", scores.size(0),
                    " labels for scores of shape ", scores.shape(), ", got ", labels.size(0));
  check<UsageError>((options.reduction == Reduction::none) == (expected == Reduction::none), operation,
                    ": for one loss per sample call ", operation, "_per_sample");
}

/// Backward of cross_entropy. `Narrow` logits get a narrow gradient, through the float node that passes it on (see
/// wide_later.hpp).
template <class X, class Statistics, class Labels>
struct CrossEntropyBackward {
  using T = typename X::value_type;

  Saved<X> saved;
  Labels labels;
  CrossEntropyOptions options;
  Statistics statistics;

  template <class Dy, class Dx>
  void operator()(const Dy& dloss, Dx dlogits) const {
    const auto& x = saved.read("cross_entropy");
    if constexpr (Narrow<T>) {
      const auto grad = X::empty(x.shape(), x.device());
      write(x, dloss, grad, false);
      add(grad, dlogits);
    } else {
      const auto [grad, accumulate] = dlogits->target();
      write(x, dloss, grad, accumulate);
    }
  }
  /// Writes the gradient over the logits if nobody else holds them.
  template <class Dy, class Dx>
  void last(const Dy& dloss, Dx dlogits) {
    if (!saved.alone() || !dlogits->takes_over()) return (*this)(dloss, dlogits);
    const X x = saved.take("cross_entropy");
    write(x, dloss, x, false);
    add(x, dlogits);
  }

 private:
  template <class Dy>
  void write(const X& x, const Dy& dloss, const X& grad, bool accumulate) const {
    kernels::cross_entropy_backward(x.device(), x.size(0), x.size(1), x.data(), labels.data(), options,
                                    statistics.data(), dloss.data(), grad.data(), accumulate);
  }
  template <class Dx>
  static void add(const X& grad, Dx dlogits) {
    if constexpr (Narrow<T>)
      dlogits->add(wide_later(grad));
    else
      dlogits->add(grad);
  }
};

/// `scores` are the values of `logits`; they may be narrow where those are float.
template <int Rank, class T, Operand X, class D>
Recorded<Rank, X> cross_entropy_of(const X& logits, const Tensor<T, 2, D>& scores,
                                   const Tensor<std::int64_t, 1, D>& labels, const CrossEntropyOptions& options) {
  using L = typename tensor_of<X>::value_type;
  const auto targets = contiguous(labels);
  check_class_loss("cross_entropy", scores, targets, options, Rank == 1 ? Reduction::none : Reduction::mean);
  const auto device = scores.device();
  const Index batch = scores.size(0), classes = scores.size(1);
  Shape<Rank> shape{};
  if constexpr (Rank == 1) shape[0] = batch;
  auto loss = Tensor<L, Rank, D>::empty(shape, device);
  auto statistics = Tensor<L, 2, D>::empty({2, batch}, device);
  kernels::cross_entropy_forward(device, batch, classes, scores.data(), targets.data(), options, loss.data(),
                                 statistics.data());
  using Backward = CrossEntropyBackward<Tensor<T, 2, D>, Tensor<L, 2, D>, Tensor<std::int64_t, 1, D>>;
  return record(operations::CrossEntropy<D>{targets, options}, std::move(loss),
                Backward{Saved(scores), targets, options, std::move(statistics)}, logits);
}

template <int Rank, Operand X, class D>
Recorded<Rank, X> cross_entropy(const X& logits, const Tensor<std::int64_t, 1, D>& labels,
                                const CrossEntropyOptions& options) {
  if constexpr (!std::is_same_v<D, Cpu> && std::is_same_v<X, Variable<float, 2, D>>) {
    if (const auto scores = logits.template narrow<bf16>(); scores.defined())
      return cross_entropy_of<Rank>(logits, scores, labels, options);
    if (const auto scores = logits.template narrow<half>(); scores.defined())
      return cross_entropy_of<Rank>(logits, scores, labels, options);
  }
  return cross_entropy_of<Rank>(logits, contiguous(value_of(logits)), labels, options);
}

template <int Rank, Operand X, class D>
auto nll_loss(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels, const NllLossOptions& options) {
  using T = typename tensor_of<X>::value_type;
  const auto scores = contiguous(value_of(log_probabilities));
  const auto targets = contiguous(labels);
  check_class_loss("nll_loss", scores, targets, options, Rank == 1 ? Reduction::none : Reduction::mean);
  Shape<Rank> shape{};
  if constexpr (Rank == 1) shape[0] = scores.size(0);
  auto loss = Tensor<T, Rank, D>::empty(shape, scores.device());
  kernels::nll_loss_forward(scores.device(), scores.size(0), scores.size(1), scores.data(), targets.data(), options,
                            loss.data());
  return record(
      operations::NllLoss<D>{targets, options}, std::move(loss),
      [scores, targets, options](const auto& dloss, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::nll_loss_backward(scores.device(), scores.size(0), scores.size(1), targets.data(), options,
                                   dloss.data(), grad.data(), accumulate);
      },
      log_probabilities);
}

// `loss_of(scores)`; bf16 and half scores are computed in float.
template <Operand X, class LossOf>
auto in_float(const X& scores, const LossOf& loss_of) {
  if constexpr (NarrowOperand<X>)
    return to<typename tensor_of<X>::value_type>(loss_of(widened(scores)));
  else
    return loss_of(scores);
}

// The device of an operand, without reading its values.
template <Operand X>
auto place_of(const X& x) {
  if constexpr (AnyVariable<X> && requires { x.device(); })
    return x.device();
  else
    return value_of(x).device();
}

// The divisor that the caller wants for the sum. Throws UsageError if it is not positive and finite.
template <class Options>
double checked_mean_over(const char* operation, const Options& options) {
  const double over = *options.mean_over;
  check<UsageError>(over > 0 && std::isfinite(over), operation, ": expected a positive mean_over, got ", over);
  check<UsageError>(options.reduction == Reduction::mean, operation, ": mean_over needs Reduction::mean");
  return over;
}

// Options for losses without a reduction.
template <class Options>
Options unreduced(const char* operation, Options options) {
  options.reduction = Reduction::none;
  if (options.mean_over) checked_mean_over(operation, options);
  return options;
}

// The number of labels that are not ignored.
template <class D>
double count_labels(const Tensor<std::int64_t, 1, D>& labels, std::int64_t ignore_index) {
  Tensor<std::int64_t, 1, Cpu> row;
  if constexpr (std::is_same_v<D, Cpu>)
    row = contiguous(labels);
  else
    row = to_device(labels, Cpu{});
  return static_cast<double>(row.numel() - std::count(row.data(), row.data() + row.numel(), ignore_index));
}

// `loss_of(options)`, with the number of counted labels in its node. If a policy computes the batch in parts: the
// global batch's mean of `each(options)`, the losses of samples.
template <Operand X, class LossOf, class Each, class D, class Options>
auto reduced_over_labels(const char* operation, const X& scores, const LossOf& loss_of, const Each& each,
                         const Tensor<std::int64_t, 1, D>& labels, Options options) {
  if constexpr (AnyVariable<X> && !is_graph_variable<X>)
    if (const auto parts = options.reduction == Reduction::sum ? nullptr : parts_of(scores)) [[unlikely]] {
      const double over = options.mean_over ? checked_mean_over(operation, options) : 0;
      Options of_each = options;
      of_each.mean_over.reset();
      return mean_of_parts(
          each(unreduced(operation, of_each)), *parts,
          [&](Index begin, Index end) { return count_labels(labels.slice(0, begin, end), options.ignore_index); },
          over);
    }
  if (options.mean_over) {
    const double over = checked_mean_over(operation, options);
    options.reduction = Reduction::sum;
    const double counted = std::is_same_v<D, Cpu> ? count_labels(labels, options.ignore_index) : 0;
    return as_sum(loss_of(options), true, over, counted) / over;
  }
  auto loss = loss_of(options);
  if (options.reduction == Reduction::sum) return as_sum(std::move(loss), true, 0, static_cast<double>(labels.numel()));
  return as_counted_mean<D>(std::move(loss), [labels, ignore_index = options.ignore_index] {
    return count_labels(labels, ignore_index);
  });
}

// cross_entropy in the scalar type of the scores.
template <Operand X, class D>
Recorded<0, X> reduced_cross_entropy(const X& scores, const Tensor<std::int64_t, 1, D>& labels,
                                     const CrossEntropyOptions& options) {
  const auto targets = to_device(labels, place_of(scores));
  const auto loss_of = [&](const CrossEntropyOptions& reducing) {
    return with_variables([&](const auto& x) { return cross_entropy<0>(x, targets, reducing); }, scores);
  };
  const auto each = [&](const CrossEntropyOptions& unreduced) { return cross_entropy<1>(scores, targets, unreduced); };
  return reduced_over_labels("cross_entropy", scores, loss_of, each, labels, options);
}
}  // namespace detail

/// logits: [batch, classes], labels: [batch] in [0, classes) -> -log softmax(logits)[label], averaged (or summed) over
/// the batch. The mean over no samples is 0, so that an empty share of a batch contributes nothing. Throws UsageError
/// for a bad label (on a GPU the next synchronising call does), ShapeError if the batches differ. Labels may be on
/// another device, such as the loader's.
template <Operand X, class D>
requires(tensor_of<X>::rank == 2)
auto cross_entropy(const X& logits, const Tensor<std::int64_t, 1, D>& labels, const CrossEntropyOptions& options = {}) {
  return detail::in_float(
      logits, [&](const auto& scores) { return detail::reduced_cross_entropy(scores, labels, options); });
}

/// For other logits and labels: reports what they have to be, at compile time.
template <Operand X, class Labels, class... Rest>
Variable<float, 0> cross_entropy(const X&, const Labels&, const Rest&...) {
  constexpr int axes = tensor_of<X>::rank, labels = tensor_of<Labels>::rank;
  using T = typename tensor_of<Labels>::value_type;
  if constexpr (!std::is_same_v<T, std::int64_t>)
    static_assert(std::is_same_v<T, std::int64_t>,
                  "cross_entropy: expected labels in a Tensor of std::int64_t; to<std::int64_t>(labels) converts; for "
                  "probabilities #include <chorus/ops/class_losses.hpp>");
  else if constexpr (axes != labels + 1)
    static_assert(axes == labels + 1,
                  "cross_entropy: expected logits [batch, classes] and labels [batch]; for images [batch, classes, "
                  "height, width] and [batch, height, width]");
  else
    static_assert(axes == 2, "cross_entropy: for logits of more than two axes #include <chorus/ops/class_losses.hpp>");
  return {};
}

/// The same without a reduction: [batch].
template <Operand X, class D>
auto cross_entropy_per_sample(const X& logits, const Tensor<std::int64_t, 1, D>& labels,
                              const CrossEntropyOptions& options = {}) {
  return detail::in_float(logits, [&](const auto& scores) {
    return detail::cross_entropy<1>(scores, to_device(labels, detail::place_of(scores)),
                                    detail::unreduced("cross_entropy_per_sample", options));
  });
}

/// log_probabilities: [batch, classes], labels: [batch] -> -log_probabilities[label], averaged (or summed) over the
/// batch.
template <Operand X, class D>
auto nll_loss(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels,
              const NllLossOptions& options = {}) {
  return detail::in_float(log_probabilities, [&](const auto& scores) {
    const auto targets = to_device(labels, detail::place_of(scores));
    const auto loss_of = [&](const NllLossOptions& reducing) { return detail::nll_loss<0>(scores, targets, reducing); };
    const auto each = [&](const NllLossOptions& unreduced) { return detail::nll_loss<1>(scores, targets, unreduced); };
    return detail::reduced_over_labels("nll_loss", scores, loss_of, each, labels, options);
  });
}

/// The same without a reduction: [batch].
template <Operand X, class D>
auto nll_loss_per_sample(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels,
                         const NllLossOptions& options = {}) {
  return detail::in_float(log_probabilities, [&](const auto& scores) {
    return detail::nll_loss<1>(scores, to_device(labels, detail::place_of(scores)),
                               detail::unreduced("nll_loss_per_sample", options));
  });
}

}  // namespace chorus
