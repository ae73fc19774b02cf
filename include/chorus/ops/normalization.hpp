#pragma once
/// Normalisation within each sample: layer, group, instance and RMS norm.

#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/group_norm.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <type_traits>

namespace chorus {

// The tape's record of this operation, in addition to its backward function: see ops/higher_order.hpp.
namespace operations {
struct LayerNorm {
  static constexpr const char* name = "layer_norm";
  Index rows, columns;
  double eps;
};
}  // namespace operations

namespace functors {
struct ScaleShift {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& scale, const S& shift) const {
    return x * scale + shift;
  }
  template <class S>
  CHORUS_HD Partials<S, 3> gradient(const S& dy, const S& x, const S& scale, const S&) const {
    return {{dy * scale, dy * x, dy}};
  }
};
}  // namespace functors

namespace detail {
// On GPUs x may have 2 bytes and the rest float.
template <Operand X, Operand W, Operand B>
auto recorded_layer_norm(const X& x, const W& weight, const B& bias, double eps) {
  using T = typename tensor_of<W>::value_type;
  constexpr std::size_t rank = tensor_of<X>::rank, inner = tensor_of<W>::rank;
  static_assert(inner >= 1 && inner <= rank && inner == tensor_of<B>::rank,
                "layer_norm: expected weight and bias of the shape of the input's last axes");
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  Shape<static_cast<int>(inner)> normalized{};
  std::copy_n(input.shape().begin() + (rank - inner), inner, normalized.begin());
  check<ShapeError>((!w.defined() || w.shape() == normalized) && (!b.defined() || b.shape() == normalized),
                    "layer_norm: an input of shape ", input.shape(), " does not fit a weight of shape ", w.shape(),
                    " and a bias of shape ", b.shape());
  const Index columns = numel(normalized), rows = columns == 0 ? 0 : input.numel() / columns;
  const auto device = input.device();
  auto out = tensor_of<X>::empty(input.shape(), device);
  // Mean and 1 / standard deviation of each row.
  const auto statistics = Tensor<T, 2, typename tensor_of<X>::device_type>::empty({2, rows}, device);
  kernels::layer_norm_forward(device, rows, columns, input.data(), w.data(), b.data(), eps, out.data(),
                              statistics.data());
  return record(
      operations::LayerNorm{rows, columns, eps}, std::move(out),
      [saved = Saved(input), w = Saved(w), statistics, device, rows, columns](const auto& dy, auto dx, auto dw,
                                                                              auto db) {
        T* affine[2] = {};
        bool accumulate[3] = {};
        const auto target = [&](std::size_t i, auto node) {
          const auto to = node->target();
          accumulate[i] = to.accumulate;
          return to.data();
        };
        if (dw) affine[0] = target(1, dw);
        if (db) affine[1] = target(2, db);
        kernels::layer_norm_backward(device, rows, columns, saved.read("layer_norm").data(),
                                     dx ? w.read("layer_norm").data() : nullptr, dy.data(), statistics.data(),
                                     dx ? target(0, dx) : nullptr, affine[0], affine[1], accumulate);
      },
      x, weight, bias);
}
}  // namespace detail

/// x: [...], weight, bias: the shape of x's last axes, over which it normalises (Ba, Kiros, Hinton 2016) -> (x - mean)
/// / sqrt(var + eps) * weight + bias, with the biased variance. Undefined weight and bias mean 1 and 0. Throws
/// ShapeError if shapes don't fit.
template <Operand X, Operand W, Operand B>
auto layer_norm(const X& x, const W& weight, const B& bias, double eps = 1e-5) {
  return detail::recorded_layer_norm(x, weight, bias, eps);
}

namespace detail {
// A single value is its own mean, so the result would be the bias, whatever x is.
template <Operand X>
void check_normalizes(const char* operation, const X& x, Index groups) {
  const auto& shape = value_of(x).shape();
  check<ShapeError>(groups <= 0 || shape[0] * groups != value_of(x).numel() || value_of(x).numel() == 0, operation,
                    ": expected more than one value to normalise, got one for each sample and ",
                    groups == shape[1] ? "channel" : "group", " of an input of shape ", shape);
}

// group_norm as layer_norm and, if `affine`, a weight and a bias for each channel.
template <Operand X, Operand W, Operand B>
auto composed_group_norm(const X& x, Index groups, const W& weight, const B& bias, bool affine, double eps) {
  using Row = Tensor<typename tensor_of<X>::value_type, 1, typename tensor_of<X>::device_type>;
  const auto& shape = value_of(x).shape();
  const Index rows = shape[0] * groups, columns = rows == 0 ? 0 : value_of(x).numel() / rows;
  const auto normalized = reshape(layer_norm(reshape(x, Shape<2>{rows, columns}), Row{}, Row{}, eps), shape);
  Shape<tensor_of<X>::rank - 1> per_channel{};
  per_channel.fill(1);
  per_channel[0] = shape[1];
  const auto scaled = [&] {
    return pointwise("group_norm", functors::ScaleShift{}, normalized, reshape(weight, per_channel),
                     reshape(bias, per_channel));
  };
  return affine ? scaled() : decltype(scaled())(normalized);
}

// The same with weights and biases, in two passes on the CPU.
template <Operand X, Operand W, Operand B>
auto scaled_group_norm(const X& x, Index groups, const W& weight, const B& bias, double eps) {
  using T = typename tensor_of<X>::value_type;
  static_assert(of_one_type<X, W, B>, "group_norm: expected one scalar type; to<float>(x) converts");
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  const auto device = input.device();
  check<DeviceError>(w.device() == device && b.device() == device, "group_norm: weight and bias are on ", w.device(),
                     " and ", b.device(), ", the input on ", device);
  const Index batch = input.size(0), channels = input.size(1);
  const Index inner = input.numel() / std::max(Index{1}, batch * channels);
  const kernels::GroupShape shape{batch, groups, channels / groups, inner};
  auto out = tensor_of<X>::empty(input.shape(), device);
  const auto statistics = Tensor<T, 2, Cpu>::empty({2, batch * groups}, device);
  kernels::group_norm_forward(device, shape, input.data(), w.data(), b.data(), eps, out.data(), statistics.data());
  return record(
      "group_norm", std::move(out),
      [saved = Saved(input), w = Saved(w), statistics, device, shape](const auto& dy, auto dx, auto dw, auto db) {
        T* grads[3] = {};
        bool accumulate[3] = {};
        const auto want = [&](std::size_t i, auto node) {
          if (!node) return;
          const auto target = node->target();
          grads[i] = target.data();
          accumulate[i] = target.accumulate;
        };
        want(0, dx);
        want(1, dw);
        want(2, db);
        kernels::group_norm_backward(device, shape, saved.read("group_norm").data(), w.read("group_norm").data(),
                                     dy.data(), statistics.data(), grads[0], grads[1], grads[2], accumulate);
      },
      x, weight, bias);
}
}  // namespace detail

/// x: [batch, channels, ...], weight, bias: [channels], or both undefined: layer_norm over each of `groups` groups of
/// adjacent channels of a sample (Wu, He 2018). Throws ShapeError if channels don't match, if groups don't divide them,
/// or if a group has a single value.
template <Operand X, Operand W, Operand B>
auto group_norm(const X& x, Index groups, const W& weight, const B& bias, double eps = 1e-5) {
  static_assert(tensor_of<X>::rank >= 2, "group_norm: expected an input [batch, channels, ...]");
  const auto& shape = value_of(x).shape();
  check<ShapeError>(groups > 0 && shape[1] % groups == 0, "group_norm: ", groups,
                    " groups do not divide the channels of shape ", shape);
  detail::check_normalizes("group_norm", x, groups);
  const bool affine = value_of(weight).defined() || value_of(bias).defined();
  check<ShapeError>(!affine || (value_of(weight).numel() == shape[1] && value_of(bias).numel() == shape[1]),
                    "group_norm: an input of shape ", shape, " does not fit a weight of ", value_of(weight).numel(),
                    " and a bias of ", value_of(bias).numel(), " channels");
  // Gradients of gradients and GPUs use composed operations; so do channels so small that the kernel would only run
  // remainder loops.
  constexpr bool recorded =
      detail::is_graph_variable<X> || detail::is_graph_variable<W> || detail::is_graph_variable<B>;
  if constexpr (!recorded && std::is_same_v<typename tensor_of<X>::device_type, Cpu>)
    if (affine && value_of(x).numel() >= 16 * shape[0] * shape[1])
      return detail::scaled_group_norm(x, groups, weight, bias, eps);
  return detail::composed_group_norm(x, groups, weight, bias, affine, eps);
}

/// Normalises each channel of each sample separately (Ulyanov et al. 2016): group_norm with one channel per group.
/// Throws as that does.
template <Operand X, Operand W, Operand B>
auto instance_norm(const X& x, const W& weight, const B& bias, double eps = 1e-5) {
  static_assert(tensor_of<X>::rank >= 3, "instance_norm: expected input [batch, channels, ...] of 3 axes or more");
  detail::check_normalizes("instance_norm", x, value_of(x).size(1));
  return group_norm(x, value_of(x).size(1), weight, bias, eps);
}

/// x: [..., features], weight: [features] -> x / sqrt(mean(x²) + eps) * weight (Zhang, Sennrich 2019). Throws
/// ShapeError if sizes differ.
template <Operand X, Operand W>
auto rms_norm(const X& x, const W& weight, double eps = 1e-6) {
  static_assert(tensor_of<X>::rank >= 1 && tensor_of<W>::rank == 1, "rms_norm: expected a weight [features]");
  check<ShapeError>(value_of(x).size(-1) == value_of(weight).numel(), "rms_norm: an input of shape ",
                    value_of(x).shape(), " does not fit a weight of ", value_of(weight).numel(), " features");
  return x * rsqrt(mean(square(x), -1, keep_axis) + eps) * weight;
}

// bf16 and half inputs are computed in float; weights and biases may be float or of the input's type.
template <NarrowOperand X, Operand W, Operand B>
auto layer_norm(const X& x, const W& weight, const B& bias, double eps = 1e-5) {
  // On GPUs kernels read and write these types, except for gradients of gradients.
  if constexpr (!std::is_same_v<typename tensor_of<X>::device_type, Cpu> &&
                !(detail::is_graph_variable<X> || detail::is_graph_variable<W> || detail::is_graph_variable<B>))
    return detail::recorded_layer_norm(x, to<float>(weight), to<float>(bias), eps);
  else
    return to<typename tensor_of<X>::value_type>(
        detail::recorded_layer_norm(to<float>(x), to<float>(weight), to<float>(bias), eps));
}
template <NarrowOperand X, Operand W, Operand B>
auto group_norm(const X& x, Index groups, const W& weight, const B& bias, double eps = 1e-5) {
  using T = typename tensor_of<X>::value_type;
  return to<T>(group_norm(to<float>(x), groups, to<float>(weight), to<float>(bias), eps));
}
template <NarrowOperand X, Operand W>
auto rms_norm(const X& x, const W& weight, double eps = 1e-6) {
  return to<typename tensor_of<X>::value_type>(rms_norm(to<float>(x), to<float>(weight), eps));
}

}  // namespace chorus
