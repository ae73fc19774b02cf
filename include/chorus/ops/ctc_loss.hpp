#pragma once
/// Connectionist temporal classification (Graves et al. 2006): the likelihood of a label sequence, given scores of a
/// longer sequence, summed over all alignments.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/reduction.hpp>
#include <cmath>
#include <cstdint>
#include <limits>

namespace chorus {

/// Options of ctc_loss.
struct CtcLossOptions {
  std::int64_t blank = 0;
  /// mean: each loss is divided by its number of labels (at least 1), then averaged over the batch; or sum.
  Reduction reduction = Reduction::mean;
  /// Whether an infinite loss (too little time for the labels) becomes 0 with a zero gradient.
  bool zero_infinity = false;
};

namespace operations {
struct CtcLoss {
  static constexpr const char* name = "ctc_loss";
};
}  // namespace operations

namespace detail {

inline double log_add(double a, double b) {
  const double most = std::max(a, b);
  return most == -std::numeric_limits<double>::infinity() ? most : most + std::log1p(std::exp(std::min(a, b) - most));
}

/// -log of the labels' probability for one sample. scores: [time, classes], with row stride `pitch`. `grad`, unless
/// null, has the same layout and is 0 at first.
template <class T>
double ctc_of_sample(Index time, const T* scores, Index pitch, Index labels, const std::int64_t* label,
                     std::int64_t blank, bool zero_infinity, T* grad) {
  constexpr double never = -std::numeric_limits<double>::infinity();
  if (time == 0) return labels == 0 || zero_infinity ? 0 : -never;
  // States: the labels, with a blank before, between and after them.
  const Index states = 2 * labels + 1;
  const auto at = [&](Index state) { return state % 2 == 0 ? blank : label[state / 2]; };
  const auto score = [&](Index t, Index state) { return static_cast<double>(scores[t * pitch + at(state)]); };
  const auto skips = [&](Index state) { return state >= 2 && at(state) != blank && at(state) != at(state - 2); };
  const kernels::Scratch<double> numbers(Cpu{}, (time + 2) * states);
  double* before = numbers.data();  // [time, states]: forward variables, this score included
  for (Index t = 0; t < time; ++t)
    for (Index s = 0; s < states; ++s) {
      double sum = s < 2 ? 0 : never;
      if (t > 0) {
        const double* last = before + (t - 1) * states;
        sum = last[s];
        if (s >= 1) sum = log_add(sum, last[s - 1]);
        if (skips(s)) sum = log_add(sum, last[s - 2]);
      }
      before[t * states + s] = sum + score(t, s);
    }
  const double* end = before + time * states;
  const double loss = -(states > 1 ? log_add(end[-1], end[-2]) : end[-1]);
  if (zero_infinity && loss == -never) return 0;
  if (grad == nullptr) return loss;
  double *after = before + time * states, *next = after + states;  // backward variables, this score left out
  for (Index t = time - 1; t >= 0; --t, std::swap(after, next))
    for (Index s = 0; s < states; ++s) {
      if (t == time - 1) {
        after[s] = s + 2 >= states ? 0 : never;
      } else {
        double sum = next[s] + score(t + 1, s);
        if (s + 1 < states) sum = log_add(sum, next[s + 1] + score(t + 1, s + 1));
        if (s + 2 < states && skips(s + 2)) sum = log_add(sum, next[s + 2] + score(t + 1, s + 2));
        after[s] = sum;
      }
      grad[t * pitch + at(s)] -= static_cast<T>(std::exp(before[t * states + s] + after[s] + loss));
    }
  return loss;
}

}  // namespace detail

/// log_probabilities: [time, batch, classes]; labels: [batch, most], of which the first label_lengths[n] count, none of
/// them `blank`; the first input_lengths[n] time steps count -> [batch]: -log p(labels). A sequence that is too short
/// for its labels has an infinite loss and, without `zero_infinity`, a NaN gradient. Computed on the host in double.
/// Throws ShapeError if sizes differ, UsageError for lengths and labels out of range. It has a first derivative alone,
/// as in PyTorch: `grad` with `create_graph` throws UsageError.
template <Operand X>
auto ctc_loss_per_sample(const X& log_probabilities, const Tensor<std::int64_t, 2, Cpu>& labels,
                         const Tensor<std::int64_t, 1, Cpu>& input_lengths,
                         const Tensor<std::int64_t, 1, Cpu>& label_lengths, const CtcLossOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  const auto device = value_of(log_probabilities).device();
  const auto scores = to_device(contiguous(value_of(log_probabilities)), Cpu{});
  const auto targets = contiguous(labels);
  const Index time = scores.size(0), batch = scores.size(1), classes = scores.size(2), most = targets.size(1);
  check<ShapeError>(targets.size(0) == batch && input_lengths.size(0) == batch && label_lengths.size(0) == batch,
                    "ctc_loss: scores of shape ", scores.shape(),
                    ", expected labels, input_lengths and label_lengths of ", batch, " samples, got ", targets.shape(),
                    ", ", input_lengths.shape(), " and ", label_lengths.shape());
  check<UsageError>(options.blank >= 0 && options.blank < classes, "ctc_loss: blank ", options.blank,
                    " is not one of ", classes, " classes");
  for (Index n = 0; n < batch; ++n) {
    check<UsageError>(input_lengths(n) >= 0 && input_lengths(n) <= time && label_lengths(n) >= 0 &&
                          label_lengths(n) <= most,
                      "ctc_loss: sample ", n, " has ", input_lengths(n), " of ", time, " steps and ", label_lengths(n),
                      " of ", most, " labels");
    for (Index i = 0; i < label_lengths(n); ++i)
      check<UsageError>(targets(n, i) >= 0 && targets(n, i) < classes && targets(n, i) != options.blank,
                        "ctc_loss: label ", targets(n, i), " of sample ", n, " is not in [0, ", classes,
                        "), or is the blank ", options.blank);
  }
  auto losses = Tensor<T, 1, Cpu>::empty({batch});
  Tensor<T, 3, Cpu> grads;
  if (node_of(log_probabilities) && grad_enabled()) grads = Tensor<T, 3, Cpu>::zeros(scores.shape());
  parallel_for(batch, [&](Index n) {
    losses.data()[n] = static_cast<T>(detail::ctc_of_sample(
        input_lengths(n), scores.data() + n * classes, batch * classes, label_lengths(n), targets.data() + n * most,
        options.blank, options.zero_infinity, grads.defined() ? grads.data() + n * classes : nullptr));
  });
  return record(
      operations::CtcLoss{}, to_device(losses, device),
      [grads, batch](const auto& dloss, auto dx) {
        dx->add(to_device(grads, dloss.device()) * contiguous(dloss).view(Shape<3>{1, batch, 1}));
      },
      log_probabilities);
}

/// The same, reduced.
template <Operand X>
auto ctc_loss(const X& log_probabilities, const Tensor<std::int64_t, 2, Cpu>& labels,
              const Tensor<std::int64_t, 1, Cpu>& input_lengths, const Tensor<std::int64_t, 1, Cpu>& label_lengths,
              const CtcLossOptions& options = {}) {
  check<UsageError>(options.reduction != Reduction::none, "ctc_loss: for one loss per sample call ctc_loss_per_sample");
  using T = typename tensor_of<X>::value_type;
  const auto losses = ctc_loss_per_sample(log_probabilities, labels, input_lengths, label_lengths, options);
  const Index batch = label_lengths.size(0);
  if constexpr (AnyVariable<X> && !detail::is_graph_variable<X>)
    if (options.reduction == Reduction::mean && detail::parts_of(losses)) [[unlikely]] {
      auto of_labels = Tensor<T, 1, Cpu>::empty({batch});
      for (Index n = 0; n < batch; ++n)
        of_labels.data()[n] = T{1} / static_cast<T>(std::max<Index>(1, label_lengths(n)));
      return detail::mean_of_losses(losses * to_device(of_labels, value_of(losses).device()),
                                    static_cast<double>(batch));
    }
  auto weight = Tensor<T, 1, Cpu>::full({batch}, T{1});
  if (options.reduction == Reduction::mean)
    for (Index n = 0; n < batch; ++n)
      weight.data()[n] = T{1} / static_cast<T>(std::max<Index>(1, label_lengths(n)) * batch);
  auto loss = sum(losses * to_device(weight, value_of(losses).device()));
  if (options.reduction == Reduction::mean) return detail::as_mean(std::move(loss), static_cast<double>(batch));
  return loss;
}

}  // namespace chorus
