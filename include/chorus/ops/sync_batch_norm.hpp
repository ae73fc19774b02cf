#pragma once
/// Batch normalisation with the statistics of a batch that several devices or ranks share.

#include <array>
#include <chorus/core/batch_group.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <memory>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI {

namespace detail {
/// A channel's sums, and further numbers behind them, added up over the group; the sums end on the device again.
template <class D>
void sum_over_group(BatchGroup& group, const Tensor<double, 1, D>& sums, std::vector<double>& numbers) {
  const auto count = static_cast<std::size_t>(sums.numel());
  copy_bytes(Cpu{}, numbers.data(), sums.device(), sums.data(), count * sizeof(double));
  group.sum(numbers);
  copy_bytes(sums.device(), sums.data(), Cpu{}, numbers.data(), count * sizeof(double));
}
}  // namespace detail

/// `batch_norm` in training, over the shares of all members of `group`; a share may be empty. Forward adds up 2
/// channels + 1 numbers, backward 2 channels. Gradients are those by the sum over members of weight * loss: what the
/// policy's step will be. Of GraphVariables see <chorus/ops/higher_order/sync_batch_norm.hpp>. Throws ShapeError, for
/// all members, where a channel has one number in the whole batch.
template <Operand X, Operand W, Operand B, class T, class D>
auto sync_batch_norm(const X& x, const W& weight, const B& bias, const Tensor<T, 1, D>& running_mean,
                     const Tensor<T, 1, D>& running_var, const std::shared_ptr<BatchGroup>& group,
                     const BatchNormOptions& options = {}) {
  if constexpr (NarrowOperand<X>) {
    return to<typename tensor_of<X>::value_type>(
        sync_batch_norm(to<float>(x), to<float>(weight), to<float>(bias), running_mean, running_var, group, options));
  } else {
    const auto input = contiguous(value_of(x));
    const auto w = contiguous(value_of(weight));
    const auto b = contiguous(value_of(bias));
    const auto view = detail::channel_view(input.shape());
    for (const auto& per_channel : {w, b, running_mean, running_var})
      check<ShapeError>(!per_channel.defined() || per_channel.numel() == view.channels,
                        "sync_batch_norm: an input of shape ", input.shape(), " does not fit ", per_channel.numel(),
                        " channels");
    const auto device = input.device();
    const auto sums = Tensor<double, 1, D>::empty({2 * view.channels}, device);
    std::vector<double> numbers(static_cast<std::size_t>(2 * view.channels + 1));
    kernels::batch_norm_sums(device, view, input.data(), sums.data());
    numbers.back() = static_cast<double>(view.per_channel());
    detail::sum_over_group(*group, sums, numbers);
    const double count = numbers.back();
    check<ShapeError>(count != 1, "sync_batch_norm: training needs more than one value per channel, got one in the ",
                      "batches of all ranks, here of shape ", input.shape());
    const auto mean = Tensor<T, 1, D>::empty({view.channels}, device);
    const auto invstd = Tensor<T, 1, D>::empty({view.channels}, device);
    kernels::batch_norm_statistics(device, view.channels, count, sums.data(), options.momentum, options.eps,
                                   running_mean.data(), running_var.data(), mean.data(), invstd.data());
    if constexpr (detail::is_graph_variable<X> || detail::is_graph_variable<W> || detail::is_graph_variable<B>) {
      return sync_batch_norm_graph(x, weight, bias, count, group, options.eps);
    } else {
      auto out = tensor_of<X>::empty(input.shape(), device);
      kernels::batch_norm_normalise(device, view, input.data(), w.data(), b.data(), mean.data(), invstd.data(),
                                    out.data());
      return record(
          "sync_batch_norm", std::move(out),
          [input, w, mean, invstd, view, group, count](const auto& dy, auto dx, auto dw, auto db) {
            const auto here = dy.device();
            const auto own = Tensor<double, 1, D>::empty({2 * view.channels}, here);
            kernels::batch_norm_backward_sums(here, view, input.data(), dy.data(), mean.data(), own.data());
            const auto affine = [&](T* dweight, bool add_weight, T* dbias, bool add_bias) {
              kernels::batch_norm_backward_affine(here, view.channels, own.data(), invstd.data(), dweight, dbias,
                                                  add_weight, add_bias);
            };
            if (dw) {
              const auto target = dw->target();
              affine(target.data(), target.accumulate, nullptr, false);
            }
            if (db) {
              const auto target = db->target();
              affine(nullptr, false, target.data(), target.accumulate);
            }
            // All members take part, whether or not this one's input wants a gradient. This one's dx is multiplied by
            // its weight later: the sums of the others, who have other weights, are brought to the same scale.
            std::vector<double> all(static_cast<std::size_t>(2 * view.channels));
            const double own_weight = group->weight();
            copy_bytes(Cpu{}, all.data(), here, own.data(), own.bytes());
            for (double& number : all) number *= own_weight;
            group->sum(all);
            if (!dx) return;
            const auto target = dx->target();
            if (own_weight == 0) {
              if (!target.accumulate) zero_bytes(here, target.data(), target.grad.bytes());
              return;
            }
            for (double& number : all) number /= own_weight;
            copy_bytes(here, own.data(), Cpu{}, all.data(), own.bytes());
            kernels::batch_norm_backward_input(here, view, input.data(), dy.data(), w.data(), mean.data(),
                                               invstd.data(), count, own.data(), target.data(), target.accumulate);
          },
          x, weight, bias);
    }
  }
}

}  // namespace chorus::inline CHORUS_ABI
