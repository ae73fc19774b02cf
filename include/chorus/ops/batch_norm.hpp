#pragma once
/// Batch normalisation (Ioffe, Szegedy 2015).

#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/functors.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/ops/cast.hpp>
#include <type_traits>
#include <utility>

namespace chorus {

/// Options of batch_norm.
struct BatchNormOptions {
  double eps = 1e-5;
  /// The weight of the new batch in the running statistics.
  double momentum = 0.1;
};

// The tape's record of this operation, in addition to its backward function: see ops/higher_order.hpp.
namespace operations {
template <class T, class D>
struct BatchNorm {
  static constexpr const char* name = "batch_norm";
  Tensor<T, 1, D> running_mean, running_var;
  bool training = false;
  double eps = 0;
};
/// The same followed by an optional residual addition and a ReLU.
template <class T, class D>
struct BatchNormRelu : BatchNorm<T, D> {
  static constexpr const char* name = "batch_norm_relu";
};
}  // namespace operations

namespace detail {
template <std::size_t N>
kernels::ChannelShape channel_view(const std::array<Index, N>& shape) {
  static_assert(N >= 2, "batch_norm: expected an input [batch, channels, ...]");
  kernels::ChannelShape view{shape[0], shape[1], 1};
  for (std::size_t i = 2; i < N; ++i) view.inner *= shape[i];
  return view;
}

/// Marks a buffer as written. Other tensors have no version.
template <AnyTensor X>
void note_write(const X& numbers) {
  if (auto* const writes = numbers.storage().writes()) writes->add();
}

// batch_norm; with `relu` also the ReLU, fused. `residual`: none, or a residual to add. On GPUs x and residual may have
// 2 bytes and the rest float.
template <bool relu, Operand X, Operand W, Operand B, class T, class D, Operand... Residual>
auto batch_norm(const char* name, const X& x, const W& weight, const B& bias, const Tensor<T, 1, D>& running_mean,
                const Tensor<T, 1, D>& running_var, bool training, const BatchNormOptions& options,
                const Residual&... residual) {
  using Number = typename tensor_of<X>::value_type;
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  const auto view = channel_view(input.shape());
  for (const auto& per_channel : {w, b, running_mean, running_var})
    check<ShapeError>(!per_channel.defined() || per_channel.numel() == view.channels, name, ": an input of shape ",
                      input.shape(), " does not fit ", per_channel.numel(), " channels");
  check<UsageError>(training || (running_mean.defined() && running_var.defined()), name,
                    ": evaluation needs running statistics, and they are undefined");
  tensor_of<X> added;
  ((added = contiguous(value_of(residual))), ...);
  check<ShapeError>(!added.defined() || added.shape() == input.shape(), name, ": the residual has shape ",
                    added.shape(), ", the input ", input.shape());
  const auto device = input.device();
  auto out = tensor_of<X>::empty(input.shape(), device);
  Tensor<T, 1, D> mean, var, invstd;
  if (training) {
    mean = Tensor<T, 1, D>::empty({view.channels}, device);
    invstd = Tensor<T, 1, D>::empty({view.channels}, device);
    kernels::batch_norm_forward_train(device, view, input.data(), w.data(), b.data(), running_mean.data(),
                                      running_var.data(), options.momentum, options.eps, out.data(), mean.data(),
                                      invstd.data(), added.data(), relu);
    note_write(running_mean);
    note_write(running_var);
  } else {
    kernels::batch_norm_forward_eval(device, view, input.data(), w.data(), b.data(), running_mean.data(),
                                     running_var.data(), options.eps, out.data(), added.data(), relu);
    // The running statistics may change before backward.
    if (grad_enabled()) {
      mean = clone(running_mean);
      var = clone(running_var);
    }
  }
  added = {};
  std::conditional_t<relu, operations::BatchNormRelu<T, D>, operations::BatchNorm<T, D>> operation;
  static_cast<operations::BatchNorm<T, D>&>(operation) = {training ? running_mean : mean, training ? running_var : var,
                                                          training, options.eps};
  const auto y = relu ? out : tensor_of<X>{};
  return record(
      std::move(operation), std::move(out),
      [name, input = Saved(input), w = Saved(w), b = Saved(b), mean, invstd, var, view, training, y, eps = options.eps](
          const auto& dy, auto dx, auto dw, auto db, auto... dr) {
        const Number* const numbers = input.read(name).data();
        const T* const scale = (dx || relu ? w.read(name) : w.tensor()).data();
        const T* const shift = (relu ? b.read(name) : b.tensor()).data();
        Number* grad = nullptr;
        T *weight_grad = nullptr, *bias_grad = nullptr;
        std::array<bool, 3> accumulate{};
        const auto want = [](auto& place, bool& adds, auto node) {
          if (!node) return;
          const auto target = node->target();
          place = target.data();
          adds = target.accumulate;
        };
        // After a residual addition, and always in evaluation, y decides what the ReLU passes. If nobody else holds dy,
        // it is overwritten: with the masked gradient, or else with the gradient w.r.t. x.
        const bool masks = relu && (sizeof...(dr) > 0 || !training), ours = dy.storage().owners() == 1;
        const bool in_place = training && ours && !masks && dx && dx->takes_over();
        if (in_place)
          grad = dy.data();
        else
          want(grad, accumulate[0], dx);
        want(weight_grad, accumulate[1], dw);
        want(bias_grad, accumulate[2], db);
        tensor_of<X> masked;
        if (masks) masked = ours ? dy : tensor_of<X>::empty(dy.shape(), dy.device());
        if (training) {
          kernels::batch_norm_backward_train(dy.device(), view, numbers, dy.data(), scale, shift, mean.data(),
                                             invstd.data(), grad, weight_grad, bias_grad, accumulate, y.data(),
                                             masked.data());
        } else {
          if constexpr (relu)
            kernels::pointwise_backward(dy.device(), functors::Relu{}, dy.numel(),
                                        std::array<const Number*, 1>{y.data()}, dy.data(),
                                        std::array<Number*, 1>{masked.data()}, std::array<bool, 1>{});
          kernels::batch_norm_backward_eval(dy.device(), view, numbers, relu ? masked.data() : dy.data(), scale,
                                            mean.data(), var.data(), eps, grad, weight_grad, bias_grad, accumulate);
        }
        if (in_place) dx->add(dy);
        ((dr ? dr->add(masked) : void()), ...);
      },
      x, weight, bias, residual...);
}
}  // namespace detail

/// x: [batch, channels, ...], weight, bias, running_mean, running_var: [channels] -> (x - mean) / sqrt(var + eps) *
/// weight + bias for each channel. Training uses the batch's mean and (biased) variance and updates the running
/// statistics (with the unbiased variance), unless the batch is empty; evaluation uses the running ones. Throws
/// ShapeError if channels differ, or if a training batch has one value per channel.
template <Operand X, Operand W, Operand B, class T, class D>
auto batch_norm(const X& x, const W& weight, const B& bias, const Tensor<T, 1, D>& running_mean,
                const Tensor<T, 1, D>& running_var, bool training, const BatchNormOptions& options = {}) {
  return detail::batch_norm<false>("batch_norm", x, weight, bias, running_mean, running_var, training, options);
}

/// relu(batch_norm(...)), fused; backward needs only x and the result.
template <Operand X, Operand W, Operand B, class T, class D>
auto batch_norm_relu(const X& x, const W& weight, const B& bias, const Tensor<T, 1, D>& running_mean,
                     const Tensor<T, 1, D>& running_var, bool training, const BatchNormOptions& options = {}) {
  return detail::batch_norm<true>("batch_norm_relu", x, weight, bias, running_mean, running_var, training, options);
}

/// relu(batch_norm(...) + residual), fused, for the end of residual blocks; the residual has the shape of x.
template <Operand X, Operand R, Operand W, Operand B, class T, class D>
auto batch_norm_add_relu(const X& x, const R& residual, const W& weight, const B& bias,
                         const Tensor<T, 1, D>& running_mean, const Tensor<T, 1, D>& running_var, bool training,
                         const BatchNormOptions& options = {}) {
  return detail::batch_norm<true>("batch_norm_add_relu", x, weight, bias, running_mean, running_var, training, options,
                                  residual);
}

namespace detail {
/// Whether kernels read and write 2-byte numbers and compute in float: on GPUs, without gradients of gradients.
template <class... X>
inline constexpr bool has_narrow_batch_norm = (!std::is_same_v<typename tensor_of<X>::device_type, Cpu> && ...) &&
                                              !(is_graph_variable<X> || ...);
}  // namespace detail

/// bf16 and half inputs are computed in float. Running statistics are float; weight and bias float or as x.
template <NarrowOperand X, Operand W, Operand B, class D>
auto batch_norm(const X& x, const W& weight, const B& bias, const Tensor<float, 1, D>& running_mean,
                const Tensor<float, 1, D>& running_var, bool training, const BatchNormOptions& options = {}) {
  if constexpr (detail::has_narrow_batch_norm<X, W, B>)
    return detail::batch_norm<false>("batch_norm", x, to<float>(weight), to<float>(bias), running_mean, running_var,
                                     training, options);
  else
    return to<typename tensor_of<X>::value_type>(
        batch_norm(to<float>(x), to<float>(weight), to<float>(bias), running_mean, running_var, training, options));
}

template <NarrowOperand X, Operand W, Operand B, class D>
auto batch_norm_relu(const X& x, const W& weight, const B& bias, const Tensor<float, 1, D>& running_mean,
                     const Tensor<float, 1, D>& running_var, bool training, const BatchNormOptions& options = {}) {
  if constexpr (detail::has_narrow_batch_norm<X, W, B>)
    return detail::batch_norm<true>("batch_norm_relu", x, to<float>(weight), to<float>(bias), running_mean, running_var,
                                    training, options);
  else
    return to<typename tensor_of<X>::value_type>(batch_norm_relu(to<float>(x), to<float>(weight), to<float>(bias),
                                                                 running_mean, running_var, training, options));
}
template <NarrowOperand X, Operand R, Operand W, Operand B, class D>
auto batch_norm_add_relu(const X& x, const R& residual, const W& weight, const B& bias,
                         const Tensor<float, 1, D>& running_mean, const Tensor<float, 1, D>& running_var, bool training,
                         const BatchNormOptions& options = {}) {
  if constexpr (detail::has_narrow_batch_norm<X, R, W, B> && !OfOtherType<X, R>)
    return detail::batch_norm<true>("batch_norm_add_relu", x, to<float>(weight), to<float>(bias), running_mean,
                                    running_var, training, options, residual);
  else
    return to<typename tensor_of<X>::value_type>(batch_norm_add_relu(to<float>(x), to<float>(residual),
                                                                     to<float>(weight), to<float>(bias), running_mean,
                                                                     running_var, training, options));
}

}  // namespace chorus
