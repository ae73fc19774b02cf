#pragma once
/// Group normalisation on the CPU.

#include <algorithm>
#include <chorus/kernels/cpu/batch_pieces.hpp>
#include <chorus/kernels/cpu/layer_norm.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/group_norm.hpp>

namespace chorus::kernels {

namespace detail {
/// Calls f(group's index in [batch, groups], first channel's index in [groups, channels]) for each group.
template <class F>
void for_groups(const GroupShape& s, const F& f) {
  const Index least = thread_elements / std::max<Index>(1, s.channels * s.inner) + 1;
  parallel_ranges(s.batch * s.groups, 1, least, [&](Index first, Index count) {
    for (Index group = first; group < first + count; ++group) f(group, group % s.groups * s.channels);
  });
}
}  // namespace detail

template <class T>
void group_norm_forward(Cpu, const GroupShape& s, const T* x, const T* weight, const T* bias, double eps, T* y,
                        T* statistics) {
  const Index elements = s.channels * s.inner, rows = s.batch * s.groups;
  detail::for_groups(s, [&](Index group, Index first) {
    const Row<T> all{group * elements, group, elements};
    const auto both = detail::normal_statistics(all, x, splat(static_cast<T>(elements)), eps);
    const auto mean = both.first, invstd = both.second;
    all.store_result(statistics, mean);
    all.store_result(statistics + rows, invstd);
    for (Index c = 0; c < s.channels; ++c) {
      const auto scale = pmul(invstd, splat(weight[first + c])), shift = splat(bias[first + c]);
      const Index at = all.at + c * s.inner;
      for_packets<T>(s.inner, [=, from = x + at, to = y + at](Index i, auto count) {
        store(to + i, pmadd(psub(load(from + i, count), mean), scale, shift), count);
      });
    }
  });
}

template <class T>
void group_norm_backward(Cpu device, const GroupShape& s, const T* x, const T* weight, const T* dy, const T* statistics,
                         T* dx, T* dweight, T* dbias, const bool (&accumulate)[3]) {
  const Index elements = s.channels * s.inner, rows = s.batch * s.groups, channels = s.groups * s.channels;
  // For each channel of each sample: the sums of dy and of dy * (x - mean) * invstd.
  const Scratch<T> sums(device, 2 * s.batch * channels);
  T *plain = sums.data(), *scaled = plain + s.batch * channels;
  detail::for_groups(s, [&](Index group, Index first) {
    const auto mean = splat(statistics[group]), invstd = splat(statistics[rows + group]);
    double by_mean = 0, by_deviation = 0;
    for (Index c = 0; c < s.channels; ++c) {
      const Index place = group * s.channels + c;
      const detail::RowBlock<T> channel{{place * s.inner, place, s.inner}, 1, 0};
      const auto both = detail::sum_pairs(channel, [=](Index i, auto count) {
        const auto g = load(dy + i, count);
        return detail::TwoSums<T>{g, pmul(g, psub(load(x + i, count), mean))};
      });
      channel.store_result(plain, both.a);
      channel.store_result(scaled, pmul(both.b, invstd));
      by_mean += static_cast<double>(weight[first + c] * plain[place]);
      by_deviation += static_cast<double>(weight[first + c] * scaled[place]);
    }
    if (dx == nullptr) return;
    const auto n = static_cast<double>(elements);
    const auto a = splat(static_cast<T>(by_mean / n)), b = pmul(invstd, splat(static_cast<T>(by_deviation / n)));
    for (Index c = 0; c < s.channels; ++c) {
      const auto w = splat(weight[first + c]);
      const Index at = group * elements + c * s.inner;
      for_packets<T>(s.inner, [=, add = accumulate[0], g = dy + at, from = x + at, to = dx + at](Index i, auto count) {
        const auto d = psub(psub(pmul(load(g + i, count), w), a), pmul(psub(load(from + i, count), mean), b));
        store(to + i, pmul(d, invstd), count, add);
      });
    }
  });
  const auto add_up = [&](const T* each, T* to, bool add) {
    if (to == nullptr) return;
    if (!add) std::fill_n(to, channels, T{0});
    for (Index sample = 0; sample < s.batch; ++sample)
      for (Index c = 0; c < channels; ++c) to[c] += each[sample * channels + c];
  };
  add_up(scaled, dweight, accumulate[1]);
  add_up(plain, dbias, accumulate[2]);
}

}  // namespace chorus::kernels
