#pragma once
/// Batch normalisation on the CPU: a few samples of a channel at a time, so that they are read twice from the cache.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <cmath>
#include <functional>
#include <vector>

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// The same line of several samples, taken together.
template <class T>
struct RowBlock : Row<T> {
  Index rows, stride;

  template <class Op, class Value>
  Packet<T> reduce(Op op, const Value& value) const {
    return splat(Op::fold(reduce_rows(Index{0}, rows, splat(Op::neutral), op, [&](Index r) {
      const Index begin = this->at + r * stride;
      return reduce_packets<T>(begin, begin + this->length, splat(Op::neutral), op,
                               [&](Index i, auto count) { return keep_first<T>(value(i, count), count, Op::neutral); });
    })));
  }
};

/// Two sums at once.
template <class T>
struct TwoSums {
  Packet<T> a, b;
  friend TwoSums operator+(const TwoSums& x, const TwoSums& y) { return {padd(x.a, y.a), padd(x.b, y.b)}; }
};

/// The sums of the pairs `value(offset, count)` over a line, in the order of its `reduce`.
template <class T, class Value>
TwoSums<T> sum_pairs(const RowBlock<T>& line, const Value& value) {
  const TwoSums<T> zero{splat(T{0}), splat(T{0})};
  const auto sums = reduce_rows(Index{0}, line.rows, zero, std::plus<>{}, [&](Index r) {
    const Index begin = line.at + r * line.stride;
    return reduce_packets<T>(begin, begin + line.length, zero, std::plus<>{}, [&](Index i, auto count) {
      const TwoSums<T> pair = value(i, count);
      return TwoSums<T>{keep_first<T>(pair.a, count, T{0}), keep_first<T>(pair.b, count, T{0})};
    });
  });
  return {splat(Sum<T>::fold(sums.a)), splat(Sum<T>::fold(sums.b))};
}
template <class T, class Count, class Value>
TwoSums<T> sum_pairs(const Columns<T, Count>& line, const Value& value) {
  return reduce_rows(Index{0}, line.length, TwoSums<T>{splat(T{0}), splat(T{0})}, std::plus<>{},
                     [&](Index i) { return value(line.at + i * line.stride, line.count); });
}

/// sums: [2, channels], what `f(line, elements of a channel in it, sums)` adds up for pieces of all channels: a few
/// samples at a time, so that a piece can be read twice from the cache, and memory is read in as many streams as
/// processors follow. Each piece has sums of its own, which are added in their order: threads take samples, as other
/// operations do, and find them in their caches.
template <class T, class F>
void sum_channels(Cpu device, ChannelShape shape, double* sums, const F& f) {
  const Index channels = shape.channels, sample = channels * shape.inner;
  const Index rows = shape.inner == 1 ? 32 : std::clamp(2048 / std::max(Index{1}, shape.inner), Index{1}, Index{16});
  const Index pieces = (shape.batch + rows - 1) / rows, least = thread_elements / std::max<Index>(1, rows * sample) + 1;
  const Scratch<double> partial(device, pieces * 2 * channels);
  parallel_ranges(pieces, 1, least, [&](Index first, Index count) {
    for (Index piece = first; piece < first + count; ++piece) {
      const Index b = piece * rows, n = std::min(rows, shape.batch - b);
      double* own = partial.data() + piece * 2 * channels;
      if (shape.inner == 1)
        for_packets<T>(channels, [&](Index c, auto some) {
          f(Columns<T, decltype(some)>{b * sample + c, c, n, sample, some}, n, own);
        });
      else
        for (Index c = 0; c < channels; ++c)
          f(RowBlock<T>{{b * sample + c * shape.inner, c, shape.inner}, n, sample}, n * shape.inner, own);
    }
  });
  std::fill_n(sums, 2 * channels, 0.0);
  for (Index piece = 0; piece < pieces; ++piece)
    for (Index c = 0; c < 2 * channels; ++c) sums[c] += partial.data()[piece * 2 * channels + c];
}

/// Calls `f(line)` in the order of memory; a line belongs to one channel, or to a packet of channels where inner is 1.
template <class T, class F>
void for_samples(ChannelShape shape, const F& f) {
  const Index least = thread_elements / std::max<Index>(1, shape.channels * shape.inner) + 1;
  parallel_ranges(shape.batch, 1, least, [&](Index begin, Index samples) {
    for (Index b = begin; b < begin + samples; ++b) {
      if (shape.inner == 1)
        for_packets<T>(shape.channels, [&](Index c, auto count) {
          f(Columns<T, decltype(count)>{b * shape.channels + c, c, 1, shape.channels, count});
        });
      else
        for (Index c = 0; c < shape.channels; ++c) f(Row<T>{(b * shape.channels + c) * shape.inner, c, shape.inner});
    }
  });
}

/// Memory for numbers per channel, kept for the next call of this thread that asks for the same slot.
template <class T, int slot>
T* channel_scratch(Index count) {
  thread_local std::vector<T> numbers;
  if (numbers.size() < static_cast<std::size_t>(count)) numbers.resize(static_cast<std::size_t>(count));
  return numbers.data();
}

template <class T>
const T* inverse_std(Index channels, const T* variance, double eps) {
  T* out = channel_scratch<T, 0>(channels);
  for (Index c = 0; c < channels; ++c) out[c] = static_cast<T>(1 / std::sqrt(static_cast<double>(variance[c]) + eps));
  return out;
}
}  // namespace detail

template <class T>
void batch_norm_sums(Cpu device, ChannelShape shape, const T* x, double* sums) {
  detail::sum_channels<T>(device, shape, sums, [&](const auto& line, Index n, double* own) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto mean = pmul(total, splat(T{1} / static_cast<T>(n)));
    const auto squares = line.reduce(Sum<T>{}, [&](Index i, auto count) {
      const auto d = psub(load(x + i, count), mean);
      return pmul(d, d);
    });
    line.for_results(total, squares, [&](Index c, T sum, T square_sum) {
      const auto elements = static_cast<double>(n), s = static_cast<double>(sum);
      const auto m = static_cast<double>(sum * (T{1} / static_cast<T>(n)));  // as above
      own[c] = s;
      own[shape.channels + c] = static_cast<double>(square_sum) + m * (2 * s - elements * m);
    });
  });
}

template <class T>
void batch_norm_statistics(Cpu, Index channels, double count, const double* sums, double momentum, double eps,
                           T* running_mean, T* running_var, T* mean, T* invstd) {
  for (Index c = 0; c < channels; ++c) {
    const double m = count > 0 ? sums[c] / count : 0;
    const double variance = count > 0 ? std::max(0.0, sums[channels + c] / count - m * m) : 0;
    mean[c] = static_cast<T>(m);
    invstd[c] = static_cast<T>(1 / std::sqrt(variance + eps));
    if (!(count > 0)) continue;
    const auto move = [&](T* running, double value) {
      if (running != nullptr)
        running[c] = static_cast<T>((1 - momentum) * static_cast<double>(running[c]) + momentum * value);
    };
    move(running_mean, m);
    move(running_var, count > 1 ? variance * count / (count - 1) : variance);
  }
}

template <class T>
void batch_norm_normalise(Cpu, ChannelShape shape, const T* x, const T* weight, const T* bias, const T* mean,
                          const T* invstd, T* y, const T* residual, bool relu) {
  const auto zero = splat(T{0});
  detail::for_samples<T>(shape, [&](const auto& line) {
    const auto m = line.load_result(mean);
    auto scale = line.load_result(invstd), shift = splat(T{0});
    if (weight != nullptr) scale = pmul(scale, line.load_result(weight));
    if (bias != nullptr) shift = line.load_result(bias);
    const auto value = [&](Index i, auto count) { return pmadd(psub(load(x + i, count), m), scale, shift); };
    const auto positive = [&](const auto& v) { return pselect(Eigen::internal::pcmp_le(v, zero), zero, v); };
    if (!relu)
      line.each([&](Index i, auto count) { store(y + i, value(i, count), count); });
    else if (residual == nullptr)
      line.each([&](Index i, auto count) { store(y + i, positive(value(i, count)), count); });
    else
      line.each([&](Index i, auto count) {
        store(y + i, positive(padd(value(i, count), load(residual + i, count))), count);
      });
  });
}

template <class T>
void batch_norm_forward_train(Cpu cpu, ChannelShape shape, const T* x, const T* weight, const T* bias, T* running_mean,
                              T* running_var, double momentum, double eps, T* y, T* saved_mean, T* saved_invstd,
                              const T* residual, bool relu) {
  check<ShapeError>(shape.per_channel() != 1, "batch_norm: training needs more than one value per channel, got [batch ",
                    shape.batch, ", channels ", shape.channels, ", inner ", shape.inner, "]");
  double* sums = detail::channel_scratch<double, 2>(2 * shape.channels);
  batch_norm_sums(cpu, shape, x, sums);
  batch_norm_statistics(cpu, shape.channels, static_cast<double>(shape.per_channel()), sums, momentum, eps,
                        running_mean, running_var, saved_mean, saved_invstd);
  batch_norm_normalise(cpu, shape, x, weight, bias, saved_mean, saved_invstd, y, residual, relu);
}

template <class T>
void batch_norm_forward_eval(Cpu cpu, ChannelShape shape, const T* x, const T* weight, const T* bias,
                             const T* running_mean, const T* running_var, double eps, T* y, const T* residual,
                             bool relu) {
  batch_norm_normalise(cpu, shape, x, weight, bias, running_mean, detail::inverse_std(shape.channels, running_var, eps),
                       y, residual, relu);
}

template <class T>
void batch_norm_backward_sums(Cpu device, ChannelShape shape, const T* x, const T* dy, const T* mean, double* sums,
                              const T* y, T* masked) {
  const auto zero = splat(T{0});
  detail::sum_channels<T>(device, shape, sums, [&](const auto& line, Index, double* own) {
    const auto m = line.load_result(mean);
    const auto pair = [&](Index i, const auto& g, auto count) {
      return detail::TwoSums<T>{g, pmul(g, psub(load(x + i, count), m))};
    };
    const auto both =
        y == nullptr ? detail::sum_pairs(line, [&](Index i, auto count) { return pair(i, load(dy + i, count), count); })
                     : detail::sum_pairs(line, [&](Index i, auto count) {
                         const auto off = Eigen::internal::pcmp_le(load(y + i, count), zero);
                         const auto g = pselect(off, zero, load(dy + i, count));
                         store(masked + i, g, count);
                         return pair(i, g, count);
                       });
    line.for_results(both.a, both.b, [&](Index c, T sum, T product_sum) {
      own[c] = static_cast<double>(sum);
      own[shape.channels + c] = static_cast<double>(product_sum);
    });
  });
}

template <class T>
void batch_norm_backward_affine(Cpu, Index channels, const double* sums, const T* invstd, T* dweight, T* dbias,
                                bool accumulate_weight, bool accumulate_bias) {
  for (Index c = 0; c < channels; ++c) {
    if (dweight != nullptr) {
      const T value = static_cast<T>(sums[channels + c] * static_cast<double>(invstd[c]));
      dweight[c] = accumulate_weight ? dweight[c] + value : value;
    }
    if (dbias != nullptr) {
      const T value = static_cast<T>(sums[c]);
      dbias[c] = accumulate_bias ? dbias[c] + value : value;
    }
  }
}

template <class T>
void batch_norm_backward_input(Cpu, ChannelShape shape, const T* x, const T* dy, const T* weight, const T* mean,
                               const T* invstd, double count, const double* sums, T* dx, bool accumulate) {
  T* centre = detail::channel_scratch<T, 1>(2 * shape.channels);
  T* slope = centre + shape.channels;
  for (Index c = 0; c < shape.channels; ++c) {
    const double s = static_cast<double>(invstd[c]);
    centre[c] = sums == nullptr ? T{0} : static_cast<T>(sums[c] / count);
    slope[c] = sums == nullptr ? T{0} : static_cast<T>(s * s * sums[shape.channels + c] / count);
  }
  detail::for_samples<T>(shape, [&](const auto& line) {
    auto scale = line.load_result(invstd);
    if (weight != nullptr) scale = pmul(scale, line.load_result(weight));
    const auto m = line.load_result(mean), a = line.load_result(centre), b = line.load_result(slope);
    line.each([&](Index i, auto n) {
      const auto d = psub(psub(load(dy + i, n), a), pmul(psub(load(x + i, n), m), b));
      store(dx + i, pmul(scale, d), n, accumulate);
    });
  });
}

template <class T>
void batch_norm_backward_train(Cpu cpu, ChannelShape shape, const T* x, const T* dy, const T* weight,
                               const T* saved_mean, const T* saved_invstd, T* dx, T* dweight, T* dbias,
                               std::array<bool, 3> accumulate, const T* y, T* masked) {
  double* sums = detail::channel_scratch<double, 2>(2 * shape.channels);
  batch_norm_backward_sums(cpu, shape, x, dy, saved_mean, sums, y, masked);
  batch_norm_backward_affine(cpu, shape.channels, sums, saved_invstd, dweight, dbias, accumulate[1], accumulate[2]);
  if (dx != nullptr)
    batch_norm_backward_input(cpu, shape, x, y == nullptr ? dy : masked, weight, saved_mean, saved_invstd,
                              static_cast<double>(shape.per_channel()), sums, dx, accumulate[0]);
}

template <class T>
void batch_norm_backward_eval(Cpu cpu, ChannelShape shape, const T* x, const T* dy, const T* weight,
                              const T* running_mean, const T* running_var, double eps, T* dx, T* dweight, T* dbias,
                              std::array<bool, 3> accumulate) {
  const T* invstd = detail::inverse_std(shape.channels, running_var, eps);
  if (dweight != nullptr || dbias != nullptr) {
    double* sums = detail::channel_scratch<double, 2>(2 * shape.channels);
    batch_norm_backward_sums(cpu, shape, x, dy, running_mean, sums);
    batch_norm_backward_affine(cpu, shape.channels, sums, invstd, dweight, dbias, accumulate[1], accumulate[2]);
  }
  if (dx != nullptr)
    batch_norm_backward_input(cpu, shape, x, dy, weight, running_mean, invstd, 0, nullptr, dx, accumulate[0]);
}

}  // namespace chorus::inline CHORUS_ABI::kernels
