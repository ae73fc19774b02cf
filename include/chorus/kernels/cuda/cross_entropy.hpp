#pragma once
/// Cross entropy straight from logits, and negative log likelihood, on GPUs. A bad label is seen by the kernel: that
/// sample counts as ignored, and the next call that waits for the device throws UsageError.

#include <chorus/kernels/cross_entropy.hpp>
#include <chorus/kernels/cuda/fault.hpp>
#include <chorus/kernels/cuda/softmax.hpp>
#include <cstdint>

namespace chorus::kernels {

namespace cuda {

/// The samples' labels: which of them count.
struct Labels {
  const std::int64_t* labels;
  std::int64_t ignore_index;
  Index classes;
  __device__ bool counts(Index i) const { return labels[i] != ignore_index && labels[i] >= 0 && labels[i] < classes; }
  __device__ void check(Index i, const FaultNote& note) const {
    if (labels[i] != ignore_index && !counts(i)) note(i, labels[i], classes);
  }
};

template <class T>
struct CrossEntropy {
  const T* logits;
  Labels labels;
  FaultNote note;
  compute_type<T> smoothing;
  compute_type<T>* losses;
  T* log_sum_exp;
  __device__ void operator()(const Line& line) const {
    using C = compute_type<T>;
    const auto below = log_sum_below_maximum(line, logits);
    const C maximum = below.maximum, log_sum = below.log_sum;
    const C mean = static_cast<C>(smoothing == C(0) ? 0.0 : line.sum([&](Index i) {
      return get(logits, i) - maximum;
    }) / static_cast<double>(labels.classes));
    if (!line.first()) return;
    const Index i = line.result;
    put(log_sum_exp, i, log_sum);
    labels.check(i, note);
    losses[i] = labels.counts(i)
                    ? (C(1) - smoothing) * (log_sum - (get(logits, line.at + labels.labels[i]) - maximum)) +
                          smoothing * (log_sum - mean)
                    : C(0);
  }
};

template <class T>
struct NllLoss {
  const T* log_probabilities;
  Labels labels;
  FaultNote note;
  compute_type<T>* losses;
  __device__ void operator()(Index i) const {
    labels.check(i, note);
    losses[i] = labels.counts(i) ? -get(log_probabilities, i * labels.classes + labels.labels[i]) : compute_type<T>(0);
  }
};

/// All losses as one: their sum, or mean over the samples that count; the mean of none is 0.
template <class T>
struct ReduceLosses {
  const compute_type<T>* losses;
  Labels labels;
  bool mean;
  T* loss;
  __device__ Index start(Index) const { return 0; }
  __device__ Pair value(Index, Index i, Index) const {
    return {static_cast<double>(losses[i]), labels.counts(i) ? 1.0 : 0.0};
  }
  __device__ void finish(Index, const Pair& sum) const {
    put(loss, 0, static_cast<compute_type<T>>(mean && sum.b > 0 ? sum.a / sum.b : sum.a));
  }
};

template <class T>
struct CopyLosses {
  const compute_type<T>* losses;
  T* loss;
  __device__ void operator()(Index i) const { put(loss, i, losses[i]); }
};

template <class T>
void finish_losses(Cuda device, Index batch, const Labels& labels, Reduction reduction, const compute_type<T>* losses,
                   T* loss) {
  if (reduction == Reduction::none)
    for_each(device, "losses", batch, CopyLosses<T>{losses, loss});
  else
    reduce<Pair>(device, "loss", 1, batch, false, ReduceLosses<T>{losses, labels, reduction == Reduction::mean, loss});
}

struct CountLabels {
  Labels labels;
  double* count;
  __device__ Index start(Index) const { return 0; }
  __device__ double value(Index, Index i, Index) const { return labels.counts(i) ? 1 : 0; }
  __device__ void finish(Index, double total) const { *count = total; }
};

/// What each sample's gradient is multiplied by.
template <class T>
struct SampleScale {
  Reduction reduction;
  const T* dloss;
  const double* counted;
  __device__ compute_type<T> operator()(Index i) const {
    if (reduction == Reduction::none) return get(dloss, i);
    if (reduction == Reduction::sum || *counted == 0) return get(dloss, 0);
    return get(dloss, 0) / static_cast<compute_type<T>>(*counted);
  }
};

template <class T>
struct CrossEntropyGradient {
  const T* logits;
  Labels labels;
  compute_type<T> smoothing;
  const T* log_sum_exp;
  SampleScale<T> scale;
  T* dlogits;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    using C = compute_type<T>;
    const Index sample = line.result;
    const C maximum =
        line.reduce(-std::numeric_limits<C>::infinity(), Larger{}, [&](Index i) { return get(logits, i); });
    const bool counts = line.exists && labels.counts(sample);
    line.each([&](Index i) {
      C gradient = 0;
      if (counts) {
        const C p = std::exp(get(logits, i) - maximum - get(log_sum_exp, sample));
        const C one = i - line.at == labels.labels[sample] ? C(1) - smoothing : C(0);
        gradient = (p - smoothing / static_cast<C>(labels.classes) - one) * scale(sample);
      }
      put(dlogits, i, gradient, accumulate);
    });
  }
};

template <class T>
struct NllLossGradient {
  Labels labels;
  SampleScale<T> scale;
  T* dx;
  bool accumulate;
  __device__ void operator()(Index i) const {
    const Index sample = i / labels.classes;
    const bool chosen = labels.counts(sample) && i - sample * labels.classes == labels.labels[sample];
    put(dx, i, chosen ? -scale(sample) : compute_type<T>(0), accumulate);
  }
};

inline Scratch<double> count_labels(Cuda device, Index batch, const Labels& labels) {
  Scratch<double> count(device, 1);
  reduce<double>(device, "count of labels", 1, batch, false, CountLabels{labels, count.data()});
  return count;
}

}  // namespace cuda

template <class T>
void cross_entropy_forward(Cuda device, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                           const CrossEntropyOptions& options, T* loss, T* log_sum_exp) {
  check<UsageError>(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    "cross_entropy: label_smoothing must be in [0, 1], got ", options.label_smoothing);
  using C = compute_type<T>;
  const cuda::Labels targets{labels, options.ignore_index, classes};
  const cuda::Scratch<C> losses(device, batch);
  cuda::for_lines(device, "cross_entropy", AxisShape{batch, classes, 1},
                  cuda::CrossEntropy<T>{logits, targets, cuda::fault_note(device, "cross_entropy", "label"),
                                        static_cast<C>(options.label_smoothing), losses.data(), log_sum_exp});
  cuda::finish_losses<T>(device, batch, targets, options.reduction, losses.data(), loss);
}

template <class T>
void cross_entropy_backward(Cuda device, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                            const CrossEntropyOptions& options, const T* log_sum_exp, const T* dloss, T* dlogits,
                            bool accumulate) {
  const cuda::Labels targets{labels, options.ignore_index, classes};
  const auto counted = cuda::count_labels(device, batch, targets);
  cuda::for_lines(device, "cross_entropy gradient", AxisShape{batch, classes, 1},
                  cuda::CrossEntropyGradient<T>{logits,
                                                targets,
                                                static_cast<compute_type<T>>(options.label_smoothing),
                                                log_sum_exp,
                                                {options.reduction, dloss, counted.data()},
                                                dlogits,
                                                accumulate});
}

template <class T>
void nll_loss_forward(Cuda device, Index batch, Index classes, const T* log_probabilities, const std::int64_t* labels,
                      const NllLossOptions& options, T* loss) {
  const cuda::Labels targets{labels, options.ignore_index, classes};
  const cuda::Scratch<compute_type<T>> losses(device, batch);
  cuda::for_each(
      device, "nll_loss", batch,
      cuda::NllLoss<T>{log_probabilities, targets, cuda::fault_note(device, "nll_loss", "label"), losses.data()});
  cuda::finish_losses<T>(device, batch, targets, options.reduction, losses.data(), loss);
}

template <class T>
void nll_loss_backward(Cuda device, Index batch, Index classes, const std::int64_t* labels,
                       const NllLossOptions& options, const T* dloss, T* dlog_probabilities, bool accumulate) {
  const cuda::Labels targets{labels, options.ignore_index, classes};
  const auto counted = cuda::count_labels(device, batch, targets);
  cuda::for_each(
      device, "nll_loss gradient", batch * classes,
      cuda::NllLossGradient<T>{targets, {options.reduction, dloss, counted.data()}, dlog_probabilities, accumulate});
}

}  // namespace chorus::kernels
