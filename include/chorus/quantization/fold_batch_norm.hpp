#pragma once
/// Folds batch norm into the preceding layer, as integer models do: rounds the weight after multiplication by
/// fold_factor = gamma / sqrt(running_var + eps), and divides the layer's result by that factor, so that batch norm can
/// normalise as usual (Jacob et al. 2018, section 3.2; PyTorch's ConvBnReLU2d in training).

#include <array>
#include <chorus/autograd/saved.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/quantization/ops/fake_quantize.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace chorus::nn::quantization {

/// Whether batch norm multiplies a channel by 0.
inline bool is_nothing(float fold_factor) { return std::abs(fold_factor) < 1e-30f; }

/// By channel: its fold factor, and the factor's derivative by gamma, 1 / sqrt(running_var + eps).
struct FoldFactors {
  std::vector<float> factor, slope;
  std::vector<char> nothing;  ///< which channels batch norm multiplies by 0

  FoldFactors(const Tensor<float, 1, Cpu>& gamma, const Tensor<float, 1, Cpu>& running_var, float eps) {
    for (Index i = 0; i < running_var.numel(); ++i) {
      const float var = running_var.data()[i];
      factor.push_back(quantized::fold_factor(gamma.defined() ? gamma.data()[i] : 1.0f, var, eps));
      slope.push_back(1.0f / std::sqrt(var + eps));
      // A channel that batch norm multiplies by 0 can't be divided by that factor, so it is not folded. The layer's
      // result has no effect on later layers there, and gamma gets its gradient.
      nothing.push_back(is_nothing(factor.back()) ? 1 : 0);
      if (nothing.back() != 0) factor.back() = 1, slope.back() = 0;
    }
  }
};

/// By channel: the layer's bias after folding, as in integer models. Operands of `channels` numbers; null means 0,
/// gamma 1.
inline std::vector<float> folded_biases(Index channels, const float* bias, const float* gamma, const float* beta,
                                        const float* running_mean, const float* running_var, float eps) {
  std::vector<float> out;
  for (Index i = 0; i < channels; ++i) {
    const float factor = quantized::fold_factor(gamma == nullptr ? 1.0f : gamma[i], running_var[i], eps);
    out.push_back(quantized::folded_bias(factor, bias == nullptr ? 0.0f : bias[i], running_mean[i],
                                         beta == nullptr ? 0.0f : beta[i]));
  }
  return out;
}

namespace detail {

/// x times the factors of its channels along `axis`, or divided by them; gamma gets a gradient, too.
template <int Rank>
Variable<float, Rank, Cpu> times_factors(const Variable<float, Rank, Cpu>& x, const Variable<float, 1, Cpu>& gamma,
                                         const FoldFactors& factors, int axis, bool divided) {
  const auto input = contiguous(value_of(x));
  const auto shape = chorus::detail::channels_along(input.shape(), axis);
  auto out = Tensor<float, Rank, Cpu>::empty(input.shape());
  const auto for_rows = [shape](const auto& f) {
    parallel_for(
        shape.batch * shape.channels, [&](Index row) { f(row * shape.inner, row % shape.channels); },
        shape.numel() > 32768);
  };
  const auto multiply = [=](float number, float factor) { return divided ? number / factor : number * factor; };
  for_rows([&](Index first, Index channel) {
    const float factor = factors.factor[static_cast<std::size_t>(channel)];
    for (Index i = first; i < first + shape.inner; ++i) out.data()[i] = multiply(input.data()[i], factor);
  });
  return record(
      "fold_batch_norm", std::move(out),
      [input = chorus::detail::Saved(input), factors, shape, for_rows, multiply, divided](const auto& dy, auto dx,
                                                                                          auto dgamma) {
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          for_rows([&, to = grad.data(), adds = accumulate](Index first, Index channel) {
            const float factor = factors.factor[static_cast<std::size_t>(channel)];
            for (Index i = first; i < first + shape.inner; ++i)
              to[i] = (adds ? to[i] : 0.0f) + multiply(dy.data()[i], factor);
          });
        }
        if (dgamma) {
          const float* const numbers = input.read("fold_batch_norm").data();
          const auto [grad, accumulate] = dgamma->target();
          for (Index channel = 0; channel < shape.channels; ++channel) {
            double sum = 0;
            for (Index sample = 0; sample < shape.batch; ++sample) {
              const Index first = (sample * shape.channels + channel) * shape.inner;
              for (Index i = first; i < first + shape.inner; ++i)
                sum += static_cast<double>(dy.data()[i]) * static_cast<double>(numbers[i]);
            }
            const auto at = static_cast<std::size_t>(channel);
            const auto factor = static_cast<double>(factors.factor[at]), slope = static_cast<double>(factors.slope[at]);
            const auto gradient = static_cast<float>(sum * (divided ? -slope / (factor * factor) : slope));
            grad.data()[channel] = (accumulate ? grad.data()[channel] : 0.0f) + gradient;
          }
        }
      },
      x, gamma);
}

}  // namespace detail

/// weight: [out, ...], multiplied by the fold factor of each output channel.
template <int Rank>
auto fold(const Variable<float, Rank, Cpu>& weight, const Variable<float, 1, Cpu>& gamma, const FoldFactors& factors) {
  return detail::times_factors(weight, gamma, factors, 0, false);
}
/// y: [batch, out, ...], a folded layer's result, divided by the fold factors.
template <int Rank>
auto unfold(const Variable<float, Rank, Cpu>& y, const Variable<float, 1, Cpu>& gamma, const FoldFactors& factors) {
  return detail::times_factors(y, gamma, factors, 1, true);
}

}  // namespace chorus::nn::quantization
