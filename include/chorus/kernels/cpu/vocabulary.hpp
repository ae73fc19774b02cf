#pragma once
/// Cross entropy with sharded classes on the CPU.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/cpu/cross_entropy.hpp>
#include <chorus/kernels/cpu/softmax.hpp>
#include <cmath>
#include <cstdint>

namespace chorus::kernels {

/// This rank's part of `classes`. Scores are [batch, count].
struct Vocabulary {
  Index classes, begin, count;
  bool has(std::int64_t label) const { return label >= begin && label < begin + count; }
};

/// largest[i]: the maximum of this rank's scores of sample i.
template <class T>
void vocabulary_maximum(Cpu, Index batch, const Vocabulary& words, const T* scores, T* largest) {
  for (Index i = 0; i < batch; ++i) {
    const Row<T> row{i * words.count, i, words.count};
    row.store_result(largest, row.reduce(Max<T>{}, [&](Index j, auto count) { return load(scores + j, count); }));
  }
}

/// sums[i], for sample i: the sum of exp(x - largest); x - largest of the label if this rank has it, else 0; and, with
/// label smoothing, the sum of x - largest. Throws UsageError for a bad label or option.
template <class T>
void vocabulary_sums(Cpu cpu, Index batch, const Vocabulary& words, const T* scores, const std::int64_t* labels,
                     const CrossEntropyOptions& options, const T* largest, T* sums) {
  check<UsageError>(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    "cross_entropy: label_smoothing must be in [0, 1], got ", options.label_smoothing);
  count_labels(cpu, "cross_entropy", batch, words.classes, labels, options.ignore_index);
  for (Index i = 0; i < batch; ++i) {
    const Row<T> row{i * words.count, 3 * i, words.count};
    const auto shift = splat(largest[i]);
    row.store_result(sums, row.reduce(Sum<T>{}, [&](Index j, auto count) {
      return detail::exp_to_zero<T>(psub(load(scores + j, count), shift));
    }));
    sums[3 * i + 1] = words.has(labels[i]) ? scores[row.at + labels[i] - words.begin] - largest[i] : T{0};
    sums[3 * i + 2] = 0;
    if (options.label_smoothing > 0)
      Row<T>{row.at, 3 * i + 2, words.count}.store_result(
          sums, row.reduce(Sum<T>{}, [&](Index j, auto count) { return psub(load(scores + j, count), shift); }));
  }
}

/// The loss, from `sums` summed over all ranks.
template <class T>
void vocabulary_loss(Cpu cpu, Index batch, const Vocabulary& words, const std::int64_t* labels,
                     const CrossEntropyOptions& options, const T* sums, T* loss) {
  const Index counted = count_labels(cpu, "cross_entropy", batch, words.classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  detail::reduce_losses(batch, counted, options.reduction, loss, [&](Index i) {
    if (labels[i] == options.ignore_index) return T{0};
    const T log_sum = std::log(sums[3 * i]), sharp = log_sum - sums[3 * i + 1];
    if (smoothing == 0) return sharp;
    const T smooth = log_sum - sums[3 * i + 2] / static_cast<T>(words.classes);
    return (T{1} - smoothing) * sharp + smoothing * smooth;
  });
}

/// The gradient w.r.t. this rank's scores.
template <class T>
void vocabulary_backward(Cpu cpu, Index batch, const Vocabulary& words, const T* scores, const std::int64_t* labels,
                         const CrossEntropyOptions& options, const T* largest, const T* sums, const T* dloss,
                         T* dscores, bool accumulate) {
  const Index counted = count_labels(cpu, "cross_entropy", batch, words.classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  for (Index i = 0; i < batch; ++i) {
    const T* const x = scores + i * words.count;
    T* const dx = dscores + i * words.count;
    if (labels[i] == options.ignore_index) {
      if (!accumulate) std::fill_n(dx, words.count, T{0});
      continue;
    }
    const T scale = detail::sample_scale(i, counted, options.reduction, dloss);
    const auto s = splat(scale), uniform = splat(smoothing / static_cast<T>(words.classes)),
               shift = splat(largest[i]), log_sum = splat(std::log(sums[3 * i]));
    for_packets<T>(words.count, [&](Index j, auto count) {
      const auto p = detail::exp_to_zero<T>(psub(psub(load(x + j, count), shift), log_sum));
      store(dx + j, pmul(psub(p, uniform), s), count, accumulate);
    });
    if (words.has(labels[i])) dx[labels[i] - words.begin] -= (T{1} - smoothing) * scale;
  }
}

}  // namespace chorus::kernels
