#pragma once
/// Batch normalisation on the CPU.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/cpu/batch_pieces.hpp>
#include <cmath>
#include <vector>

namespace chorus::kernels {

namespace detail {
/// Per-channel memory, reused by this thread's next call with the same slot.
template <class T, int slot>
T* channel_scratch(Index count) {
  thread_local std::vector<T> numbers;
  if (numbers.size() < static_cast<std::size_t>(count)) numbers.resize(static_cast<std::size_t>(count));
  return numbers.data();
}

/// The normalisation of the elements of a line.
template <class T>
struct Normaliser {
  Packet<T> mean, scale, shift;

  template <class Line>
  Normaliser(const Line& line, const T* weight, const T* bias, const T* means, const T* invstd)
      : mean(line.load_result(means)),
        scale(line.load_result(invstd)),
        shift(bias == nullptr ? splat(T{0}) : line.load_result(bias)) {
    if (weight != nullptr) scale = pmul(scale, line.load_result(weight));
  }
  Packet<T> operator()(const Packet<T>& x) const { return pmadd(psub(x, mean), scale, shift); }
};

/// `value` if a ReLU passes `x`, else 0.
template <class T>
Packet<T> where_positive(const Packet<T>& x, const Packet<T>& value) {
  const auto zero = splat(T{0});
  return pselect(Eigen::internal::pcmp_le(x, zero), zero, value);
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
    const double variance = count > 0 ? std::max(sums[channels + c] / count - m * m, 0.0) : 0;
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
  detail::for_batch<T>(shape, [&](const auto& line) {
    const detail::Normaliser<T> normal(line, weight, bias, mean, invstd);
    const auto value = [x, normal](Index i, auto count) { return normal(load(x + i, count)); };
    const auto positive = [](const auto& v) { return detail::where_positive<T>(v, v); };
    if (!relu)
      line.each([=](Index i, auto count) { store(y + i, value(i, count), count); });
    else if (residual == nullptr)
      line.each([=](Index i, auto count) { store(y + i, positive(value(i, count)), count); });
    else
      line.each([=](Index i, auto count) {
        store(y + i, positive(padd(value(i, count), load(residual + i, count))), count);
      });
  });
}

template <class T>
void batch_norm_forward_train(Cpu cpu, ChannelShape shape, const T* x, const T* weight, const T* bias, T* running_mean,
                              T* running_var, double momentum, double eps, T* y, T* saved_mean, T* saved_invstd,
                              const T* residual, bool relu) {
  check<ShapeError>(shape.per_channel() != 1, "batch_norm: expected several values per channel, got [batch ",
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

namespace detail {
/// The sums of batch_norm_backward_sums; `gradient(line)` makes the function for a line's dy.
template <class T, class Gradient>
void sum_gradients(Cpu device, ChannelShape shape, const T* x, const T* mean, double* sums, const Gradient& gradient) {
  sum_channels<T>(device, shape, sums, [&](const auto& line, Index, double* own) {
    const auto m = line.load_result(mean);
    const auto dy = gradient(line);
    const auto both = sum_pairs(line, [dy, x, m](Index i, auto count) {
      const auto g = dy(i, count);
      return TwoSums<T>{g, pmul(g, psub(load(x + i, count), m))};
    });
    line.for_results(both.a, both.b, [&](Index c, T sum, T product_sum) {
      own[c] = static_cast<double>(sum);
      own[shape.channels + c] = static_cast<double>(product_sum);
    });
  });
}

/// The implementation of batch_norm_backward_input, for a gradient function like that.
template <class T, class Gradient>
void input_gradient(ChannelShape shape, const T* x, const T* weight, const T* mean, const T* invstd, double count,
                    const double* sums, T* dx, bool accumulate, const Gradient& gradient) {
  T* centre = channel_scratch<T, 1>(2 * shape.channels);
  T* slope = centre + shape.channels;
  for (Index c = 0; c < shape.channels; ++c) {
    const double s = static_cast<double>(invstd[c]);
    centre[c] = sums == nullptr ? T{0} : static_cast<T>(sums[c] / count);
    slope[c] = sums == nullptr ? T{0} : static_cast<T>(s * s * sums[shape.channels + c] / count);
  }
  for_batch<T>(shape, [&](const auto& line) {
    auto scale = line.load_result(invstd);
    if (weight != nullptr) scale = pmul(scale, line.load_result(weight));
    const auto m = line.load_result(mean), a = line.load_result(centre), b = line.load_result(slope);
    const auto dy = gradient(line);
    // With constant statistics x is not read, even if it is infinite.
    if (sums == nullptr)
      return line.each([=](Index i, auto n) { store(dx + i, pmul(scale, dy(i, n)), n, accumulate); });
    line.each([=](Index i, auto n) {
      const auto d = psub(psub(dy(i, n), a), pmul(psub(load(x + i, n), m), b));
      store(dx + i, pmul(scale, d), n, accumulate);
    });
  });
}

/// A gradient without a ReLU, or one that is already masked.
template <class T>
auto as_it_is(const T* dy) {
  return [dy](const auto&) { return [dy](Index i, auto count) { return load(dy + i, count); }; };
}
}  // namespace detail

template <class T>
void batch_norm_backward_sums(Cpu device, ChannelShape shape, const T* x, const T* dy, const T* mean, double* sums) {
  detail::sum_gradients(device, shape, x, mean, sums, detail::as_it_is(dy));
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
  detail::input_gradient(shape, x, weight, mean, invstd, count, sums, dx, accumulate, detail::as_it_is(dy));
}

template <class T>
void batch_norm_backward_train(Cpu cpu, ChannelShape shape, const T* x, const T* dy, const T* weight, const T* bias,
                               const T* saved_mean, const T* saved_invstd, T* dx, T* dweight, T* dbias,
                               std::array<bool, 3> accumulate, const T* y, T* masked) {
  double* sums = detail::channel_scratch<double, 2>(2 * shape.channels);
  const auto backward = [&](const auto& gradient, const auto& gradient_again) {
    detail::sum_gradients(cpu, shape, x, saved_mean, sums, gradient);
    batch_norm_backward_affine(cpu, shape.channels, sums, saved_invstd, dweight, dbias, accumulate[1], accumulate[2]);
    if (dx != nullptr)
      detail::input_gradient(shape, x, weight, saved_mean, saved_invstd, static_cast<double>(shape.per_channel()), sums,
                             dx, accumulate[0], gradient_again);
  };
  if (y == nullptr) return backward(detail::as_it_is(dy), detail::as_it_is(dy));
  if (masked != nullptr)
    return backward(
        [&](const auto&) {
          return [=](Index i, auto count) {
            const auto g = detail::where_positive<T>(load(y + i, count), load(dy + i, count));
            store(masked + i, g, count);
            return g;
          };
        },
        detail::as_it_is<T>(masked));
  // y is recomputed, which is faster than reading it, and only dx is written.
  const auto through = [&](const auto& line) {
    const detail::Normaliser<T> normal(line, weight, bias, saved_mean, saved_invstd);
    return [x, dy, normal](Index i, auto count) {
      return detail::where_positive<T>(normal(load(x + i, count)), load(dy + i, count));
    };
  };
  backward(through, through);
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

}  // namespace chorus::kernels
