#pragma once
/// Cross entropy with a class per pixel on the CPU.

#include <chorus/kernels/cpu/column_blocks.hpp>
#include <chorus/kernels/cpu/label_losses.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/softmax.hpp>
#include <chorus/kernels/cross_entropy.hpp>
#include <cmath>

namespace chorus::kernels {

template <class T>
void image_cross_entropy_forward(Cpu cpu, AxisShape shape, const T* logits, const std::int64_t* labels,
                                 const CrossEntropyOptions& options, T* loss, T* log_sum_exp) {
  if (shape.inner == 1)
    return cross_entropy_forward(cpu, shape.outer, shape.axis, logits, labels, options, loss, log_sum_exp);
  detail::check_smoothing(options);
  const Index samples = shape.outer * shape.inner;
  const Index counted = count_labels(cpu, "cross_entropy", samples, shape.axis, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  const Scratch<T> losses(cpu, options.reduction == Reduction::none ? 0 : samples);
  T* const each = options.reduction == Reduction::none ? loss : losses.data();
  detail::for_column_blocks<T>(shape, [&](const auto& block) {
    constexpr Index most = detail::block_columns<T>;
    T maximum[most], total[most], below[most];
    block.reduce(Max<T>{}, maximum, [=](Index i, Index, auto count) { return load(logits + i, count); });
    const auto shifted = [=, m = &maximum[0]](Index i, Index j, auto count) {
      return psub(load(logits + i, count), load(m + j, count));
    };
    block.reduce(Sum<T>{}, total,
                 [=](Index i, Index j, auto count) { return detail::exp_to_zero<T>(shifted(i, j, count)); });
    if (smoothing != 0) block.reduce(Sum<T>{}, below, shifted);
    for (Index j = 0; j < block.columns; ++j) {
      const Index sample = block.result + j;
      const T log_sum = std::log(total[j]);
      log_sum_exp[sample] = log_sum;
      each[sample] = T{0};
      if (labels[sample] == options.ignore_index) continue;
      const T sharp = log_sum - (logits[block.at + labels[sample] * block.stride + j] - maximum[j]);
      each[sample] = sharp;
      if (smoothing == 0) continue;
      const T smooth = log_sum - below[j] / static_cast<T>(shape.axis);
      each[sample] = (T{1} - smoothing) * sharp + smoothing * smooth;
    }
  });
  if (options.reduction != Reduction::none)
    detail::reduce_losses(samples, counted, options.reduction, loss, [=](Index i) { return each[i]; });
}

template <class T>
void image_cross_entropy_backward(Cpu cpu, AxisShape shape, const T* logits, const std::int64_t* labels,
                                  const CrossEntropyOptions& options, const T* log_sum_exp, const T* dloss, T* dlogits,
                                  bool accumulate) {
  if (shape.inner == 1)
    return cross_entropy_backward(cpu, shape.outer, shape.axis, logits, labels, options, log_sum_exp, dloss, dlogits,
                                  accumulate);
  const Index samples = shape.outer * shape.inner;
  const Index counted = count_labels(cpu, "cross_entropy", samples, shape.axis, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  detail::for_column_blocks<T>(shape, [&](const auto& block) {
    constexpr Index most = detail::block_columns<T>;
    T maximum[most], scale[most], counts[most];
    for (Index j = 0; j < block.columns; ++j) {
      counts[j] = labels[block.result + j] == options.ignore_index ? T{0} : T{1};
      scale[j] = detail::sample_scale(block.result + j, counted, options.reduction, dloss);
    }
    block.reduce(Max<T>{}, maximum, [=](Index i, Index, auto count) { return load(logits + i, count); });
    const auto uniform = splat(smoothing / static_cast<T>(shape.axis)), zero = splat(T{0});
    block.each([=, log_sums = log_sum_exp + block.result, m = &maximum[0], s = &scale[0], c = &counts[0]](
                   Index i, Index j, auto count) {
      const auto shifted = psub(load(logits + i, count), load(m + j, count));
      const auto p = detail::exp_to_zero<T>(psub(shifted, load(log_sums + j, count)));
      const auto gradient = pmul(psub(p, uniform), load(s + j, count));
      store(dlogits + i, pselect(pcmp_eq(load(c + j, count), zero), zero, gradient), count, accumulate);
    });
    for (Index j = 0; j < block.columns; ++j)
      if (counts[j] != 0)
        dlogits[block.at + labels[block.result + j] * block.stride + j] -= (T{1} - smoothing) * scale[j];
  });
}

}  // namespace chorus::kernels
