#pragma once
/// Cross entropy and negative log likelihood on the CPU.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/cpu/label_losses.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/softmax.hpp>
#include <chorus/kernels/cross_entropy.hpp>
#include <cstdint>

namespace chorus::kernels {

template <class T>
void cross_entropy_forward(Cpu cpu, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                           const CrossEntropyOptions& options, T* loss, T* statistics) {
  detail::check_smoothing(options);
  const Index counted = count_labels(cpu, "cross_entropy", batch, classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  const auto sample_loss = [&](Index i) {
    const Row<T> row{i * classes, i, classes};
    const auto below = detail::log_sum_below_maximum(row, logits);
    const auto maximum = below.first;
    row.store_result(statistics, below.second);
    row.store_result(statistics + batch, maximum);
    if (labels[i] == options.ignore_index) return T{0};
    const T sharp = statistics[i] - (logits[row.at + labels[i]] - Eigen::internal::pfirst(maximum));
    if (smoothing == 0) return sharp;
    const auto sum = row.reduce(Sum<T>{}, [&](Index j, auto count) { return psub(load(logits + j, count), maximum); });
    const T smooth = statistics[i] - Eigen::internal::pfirst(sum) / static_cast<T>(classes);
    return (T{1} - smoothing) * sharp + smoothing * smooth;
  };
  const Scratch<T> each(cpu, batch);
  parallel_ranges(batch, 1, thread_elements / std::max<Index>(1, classes) + 1, [&](Index first, Index count) {
    for (Index i = first; i < first + count; ++i) each.data()[i] = sample_loss(i);
  });
  detail::reduce_losses(batch, counted, options.reduction, loss, [&](Index i) { return each.data()[i]; });
}

template <class T>
void cross_entropy_backward(Cpu cpu, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                            const CrossEntropyOptions& options, const T* statistics, const T* dloss, T* dlogits,
                            bool accumulate) {
  const Index counted = count_labels(cpu, "cross_entropy", batch, classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  const auto sample = [&](Index i) {
    const T* x = logits + i * classes;
    T* dx = dlogits + i * classes;
    if (labels[i] == options.ignore_index) {
      if (!accumulate) std::fill_n(dx, classes, T{0});
      return;
    }
    const T scale = detail::sample_scale(i, counted, options.reduction, dloss);
    const auto s = splat(scale), log_sum = splat(statistics[i]), uniform = splat(smoothing / static_cast<T>(classes));
    const auto maximum = splat(statistics[batch + i]);
    for_packets<T>(classes, [&](Index j, auto count) {
      const auto p = detail::exp_to_zero<T>(psub(psub(load(x + j, count), maximum), log_sum));
      store(dx + j, pmul(psub(p, uniform), s), count, accumulate);
    });
    dx[labels[i]] -= (T{1} - smoothing) * scale;
  };
  parallel_ranges(batch, 1, thread_elements / std::max<Index>(1, classes) + 1, [&](Index first, Index count) {
    for (Index i = first; i < first + count; ++i) sample(i);
  });
}

template <class T>
void nll_loss_forward(Cpu cpu, Index batch, Index classes, const T* log_probabilities, const std::int64_t* labels,
                      const NllLossOptions& options, T* loss) {
  const Index counted = count_labels(cpu, "nll_loss", batch, classes, labels, options.ignore_index);
  detail::reduce_losses(batch, counted, options.reduction, loss, [&](Index i) {
    return labels[i] == options.ignore_index ? T{0} : -log_probabilities[i * classes + labels[i]];
  });
}

template <class T>
void nll_loss_backward(Cpu cpu, Index batch, Index classes, const std::int64_t* labels, const NllLossOptions& options,
                       const T* dloss, T* dlog_probabilities, bool accumulate) {
  const Index counted = count_labels(cpu, "nll_loss", batch, classes, labels, options.ignore_index);
  if (!accumulate) std::fill_n(dlog_probabilities, batch * classes, T{0});
  for (Index i = 0; i < batch; ++i)
    if (labels[i] != options.ignore_index)
      dlog_probabilities[i * classes + labels[i]] -= detail::sample_scale(i, counted, options.reduction, dloss);
}

}  // namespace chorus::kernels
