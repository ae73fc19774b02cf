#pragma once
/// Cross entropy from logits, which may be bf16 or half while loss and statistics are float, and negative log
/// likelihood, on GPUs. The kernel detects bad labels: it ignores the sample, and the next call that synchronises with
/// the device throws UsageError.

#include <chorus/kernels/cross_entropy.hpp>
#include <chorus/kernels/cuda/fault.hpp>
#include <chorus/kernels/cuda/softmax.hpp>
#include <cstdint>

namespace chorus::kernels {

namespace cuda {

/// The samples' labels, and which of them count.
struct Labels {
  const std::int64_t* labels;
  std::int64_t ignore_index;
  Index classes;
  __device__ bool counts(Index i) const { return labels[i] != ignore_index && labels[i] >= 0 && labels[i] < classes; }
  __device__ void check(Index i, const FaultNote& note) const {
    if (labels[i] != ignore_index && !counts(i)) note(i, labels[i], classes);
  }
};

/// Reads each line once.
template <class T>
struct CrossEntropy {
  using C = compute_type<T>;
  const T* logits;
  bool vector;
  Labels labels;
  FaultNote note;
  C smoothing;
  C* losses;
  C *log_sum_exp, *largest;
  __device__ void operator()(const Line& line) const {
    const C lowest = -std::numeric_limits<C>::infinity();
    auto mine = SumBelow<C>::none();
    double total = 0;
    each_vector(line, logits, vector, [&](Index, int n, const Vector<T>& x) {
      mine.template add<Vector<T>::width>(n, [&](int l) { return static_cast<C>(x.v[l]); });
      if (smoothing == C(0) || mine.largest == lowest) return;  // masked numbers add nothing
      C plain = 0;
#pragma unroll
      for (int l = 0; l < Vector<T>::width; ++l)
        if (l < n) plain += static_cast<C>(x.v[l]);
      total += static_cast<double>(plain);
    });
    const auto below = combine_lanes(line.plan, line.lane, line.line, mine, JoinSums<C>{});
    C mean = 0;  // of x - largest
    if (smoothing != C(0))
      mean = static_cast<C>(combine_lanes(line.plan, line.lane, line.line, total, Plus{}) /
                                static_cast<double>(labels.classes) -
                            static_cast<double>(below.largest));
    if (!line.first()) return;
    const Index i = line.result;
    const C log_sum = static_cast<C>(std::log(below.sum));
    log_sum_exp[i] = log_sum;
    largest[i] = below.largest;
    labels.check(i, note);
    losses[i] = labels.counts(i)
                    ? (C(1) - smoothing) * (log_sum - (get(logits, line.at + labels.labels[i]) - below.largest)) +
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

/// Reduces all losses to their sum, or to the mean over the counted samples; the mean over none is 0.
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

/// The factor of each sample's gradient.
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
  using C = compute_type<T>;
  const T* logits;
  bool vector;
  Labels labels;
  C smoothing;
  const C *log_sum_exp, *largest;
  SampleScale<C> scale;
  T* dlogits;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    if (!line.exists) return;
    const Index sample = line.result;
    const bool counts = labels.counts(sample);
    const C log_sum = log_sum_exp[sample], maximum = largest[sample], factor = counts ? scale(sample) : C(0);
    const C uniform = smoothing / static_cast<C>(labels.classes);
    const Index label = labels.labels[sample];
    // `dlogits` may be `logits`: each thread reads a vector before it writes there.
    each_vector(line, logits, vector, [&](Index i, int n, const Vector<T>& x) {
      T* const to = dlogits + line.at + i;
      Vector<T> out;
      if (accumulate) out = load_vector(to, n, vector);
#pragma unroll
      for (int l = 0; l < Vector<T>::width; ++l) {
        C gradient = 0;
        if (counts) {
          const C p = std::exp(static_cast<C>(x.v[l]) - maximum - log_sum);
          gradient = (p - uniform - (i + l == label ? C(1) - smoothing : C(0))) * factor;
        }
        out.v[l] = static_cast<T>(accumulate ? static_cast<C>(out.v[l]) + gradient : gradient);
      }
      store_vector(to, out, n, vector);
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
                           const CrossEntropyOptions& options, compute_type<T>* loss, compute_type<T>* statistics) {
  check<UsageError>(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    "cross_entropy: label_smoothing must be in [0, 1], got ", options.label_smoothing);
  using C = compute_type<T>;
  const cuda::Labels targets{labels, options.ignore_index, classes};
  const cuda::Scratch<C> losses(device, batch);
  cuda::for_lines(
      device, "cross_entropy", AxisShape{batch, classes, 1},
      cuda::CrossEntropy<T>{logits, cuda::aligned(logits), targets, cuda::fault_note(device, "cross_entropy", "label"),
                            static_cast<C>(options.label_smoothing), losses.data(), statistics, statistics + batch});
  cuda::finish_losses<C>(device, batch, targets, options.reduction, losses.data(), loss);
}

template <class T>
void cross_entropy_backward(Cuda device, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                            const CrossEntropyOptions& options, const compute_type<T>* statistics,
                            const compute_type<T>* dloss, T* dlogits, bool accumulate) {
  const cuda::Labels targets{labels, options.ignore_index, classes};
  const auto counted = cuda::count_labels(device, batch, targets);
  cuda::for_lines(device, "cross_entropy gradient", AxisShape{batch, classes, 1},
                  cuda::CrossEntropyGradient<T>{logits,
                                                cuda::aligned(logits, dlogits),
                                                targets,
                                                static_cast<compute_type<T>>(options.label_smoothing),
                                                statistics,
                                                statistics + batch,
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
