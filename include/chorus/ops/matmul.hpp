#pragma once
/// Matrix products and the linear layer's function.

#include <algorithm>
#include <chorus/autograd/deferred_gradients.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/kernels/few_rows.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/leaf_products.hpp>
#include <chorus/ops/shape.hpp>
#include <functional>
#include <numeric>
#include <utility>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct Matmul {
  static constexpr const char* name = "matmul";
};
struct Linear {
  static constexpr const char* name = "linear";
};
}  // namespace operations

namespace detail {
// The product of each pair of matrices in two stacks of one shape.
template <Operand A, Operand B>
auto stacked_matmul(const A& a, const B& b) {
  using T = typename tensor_of<A>::value_type;
  constexpr int rank = tensor_of<A>::rank;
  const auto left = contiguous(value_of(a));
  const auto right = contiguous(value_of(b));
  using kernels::Trans;
  const auto device = left.device();
  const Index m = left.size(-2), k = left.size(-1), n = right.size(-1);
  const Index count = std::accumulate(left.shape().begin(), left.shape().end() - 2, Index{1}, std::multiplies<>());
  auto shape = left.shape();
  shape.back() = n;
  auto out = Tensor<T, rank, typename tensor_of<A>::device_type>::empty(shape, device);
  count_multiply_adds(count * m * k * n);
  kernels::gemm_stack(device, {count, m * k, k * n, m * n}, Trans::no, Trans::no, m, n, k, left.data(), k, right.data(),
                      n, out.data(), n, false);
  return record(
      operations::Matmul{}, std::move(out),
      [left = Saved(left), right = Saved(right), device, count, m, n, k](const auto& dy, auto da, auto db) {
        if (da) {
          const T* const other = right.read("matmul").data();
          const auto [grad, accumulate] = da->target();
          kernels::gemm_stack(device, {count, m * n, k * n, m * k}, Trans::no, Trans::yes, m, k, n, dy.data(), n, other,
                              n, grad.data(), k, accumulate);
        }
        if (db) {
          const T* const other = left.read("matmul").data();
          const auto [grad, accumulate] = db->target();
          kernels::gemm_stack(device, {count, m * k, m * n, k * n}, Trans::yes, Trans::no, k, n, m, other, k, dy.data(),
                              n, grad.data(), n, accumulate);
        }
      },
      a, b);
}

// The shapes of two stacks after broadcasting the leading axes. Throws ShapeError if they don't fit.
template <std::size_t A, std::size_t B>
auto matmul_shapes(const std::array<Index, A>& a, const std::array<Index, B>& b) {
  constexpr std::size_t rank = std::max(A, B);
  std::array<Index, rank> left{}, right{};
  bool fits = a[A - 1] == b[B - 2];
  for (std::size_t i = 1; i <= rank; ++i) {
    const Index size_a = i <= A ? a[A - i] : 1, size_b = i <= B ? b[B - i] : 1, common = size_a == 1 ? size_b : size_a;
    fits = fits && (i <= 2 || size_a == size_b || size_a == 1 || size_b == 1);
    left[rank - i] = i <= 2 ? size_a : common;
    right[rank - i] = i <= 2 ? size_b : common;
  }
  check<ShapeError>(fits, "matmul: shapes ", a, " and ", b, " do not fit");
  return std::pair(left, right);
}
}  // namespace detail

/// a: [..., m, k], b: [..., k, n] -> [..., m, n], the product of each pair of matrices; leading axes broadcast. Throws
/// ShapeError if sizes differ.
template <Operand A, Operand B>
auto matmul(const A& a, const B& b) {
  constexpr int rank_a = tensor_of<A>::rank, rank_b = tensor_of<B>::rank;
  static_assert(rank_a >= 2 && rank_b >= 2, "matmul: expected matrices or stacks of matrices");
  static_assert(of_one_type<A, B>, "matmul: operands have different scalar types; to<float>(x) converts one");
  const auto& shape_a = value_of(a).shape();
  const auto& shape_b = value_of(b).shape();
  const auto shapes = detail::matmul_shapes(shape_a, shape_b);
  if constexpr (!of_one_type<A, B>) {
    return detail::Recorded<std::max(rank_a, rank_b), B, A>();  // so that the message above is the only error
  } else if constexpr (rank_a > 2 && rank_b == 2) {
    // One matrix for the whole stack: a single tall product.
    auto out = shape_a;
    out.back() = shape_b[1];
    const Index rows = std::accumulate(shape_a.begin(), shape_a.end() - 1, Index{1}, std::multiplies<>());
    return reshape(detail::stacked_matmul(reshape(a, Shape<2>{rows, shape_b[0]}), b), out);
  } else {
    if constexpr (rank_a == rank_b)
      if (shapes.first == shape_a && shapes.second == shape_b) return detail::stacked_matmul(a, b);
    return detail::stacked_matmul(expand(a, shapes.first), expand(b, shapes.second));
  }
}

namespace detail {
/// The gradients of a linear layer's weight and bias in one product, on GPUs. Returns false and does nothing on the
/// CPU, and if the weight's gradient is deferred.
template <class W, class B, AnyTensor Dy, class Input>
bool weight_and_bias([[maybe_unused]] W& weight, [[maybe_unused]] B& bias, [[maybe_unused]] const Dy& dy,
                     [[maybe_unused]] const Input& input, [[maybe_unused]] Index rows, [[maybe_unused]] Index in,
                     [[maybe_unused]] Index out) {
  using D = typename Dy::device_type;
  if constexpr (!std::is_same_v<D, Cpu>) {
    if (deferred_gradients != nullptr && deferred_gradients->may_wait(weight)) return false;
    using kernels::Trans;
    const auto* const x = input.read("linear").data();
    const auto [dw, add_dw] = weight.target();
    const auto [db, add_db] = bias.target();
    if constexpr (std::is_same_v<decltype(dw.data()), decltype(db.data())>)
      if (gemm_with_sums(dy.device(), Trans::yes, Trans::no, out, in, rows, dy.data(), out, x, in, dw.data(), in,
                         add_dw, db.data(), add_db))
        return true;
    kernels::sum(dy.device(), {1, rows, out}, dy.data(), db.data(), add_db);
    kernels::gemm(dy.device(), Trans::yes, Trans::no, out, in, rows, dy.data(), out, x, in, dw.data(), in, add_dw);
    return true;
  } else {
    return false;
  }
}
}  // namespace detail

namespace operations {
// `w` and `b`: weight and bias in x's type. Gradients have the types of weight and bias.
template <Operand X, Operand W, Operand B, class Matrix, class Row>
detail::RecordedLike<X, X, W, B> linear(const X& x, const W& weight, const B& bias, const Matrix& w,
                                        const Row& b) {
  using kernels::Trans;
  using T = typename tensor_of<X>::value_type;
  constexpr int rank = tensor_of<X>::rank;
  const auto input = contiguous(value_of(x));
  check<ShapeError>(input.size(-1) == w.size(1), "linear: the input's shape is ", input.shape(), ", the weight's ",
                    w.shape(), ": expected ", w.size(1), " features, got ", input.size(-1));
  const Index out_features = w.size(0), in_features = w.size(1);
  check<ShapeError>(!b.defined() || b.numel() == out_features, "linear: the bias has ", b.numel(), " elements for ",
                    out_features, " features");
  const auto device = input.device();
  auto shape = input.shape();
  shape.back() = 1;
  const Index rows = numel(shape);
  shape.back() = out_features;
  auto out = Tensor<T, rank, typename tensor_of<X>::device_type>::empty(shape, device);
  detail::count_multiply_adds(rows * out_features * in_features);
  const auto leaves =
      detail::leaf_cut == nullptr ? nullptr : std::make_shared<const detail::LeafCut>(*detail::leaf_cut);
  // Without recording, a few rows are summed in another, faster order. A recorded pass has one order for any number of
  // rows, so that a sample's result does not depend on the share of the batch it is in.
  bool done = false;
  if constexpr (std::is_same_v<typename tensor_of<X>::device_type, Cpu> && std::floating_point<T>) {
    const bool recorded = grad_enabled() && (node_of(x) || node_of(weight) || node_of(bias));
    done = !recorded && rows <= kernels::few_rows && leaves == nullptr;
    if (done)
      kernels::linear_of_few_rows(device, rows, out_features, in_features, input.data(), w.data(), out.data(),
                                  b.data());
  }
  if (!done)
    detail::gemm_in_leaves(leaves.get(), true, device, Trans::yes, rows, out_features, in_features, input.data(),
                           w.data(), in_features, out.data(), false, b.data());
  return record(
      Linear{}, std::move(out),
      [input = detail::Saved(input), w = detail::Saved(w), device, rows, in_features, out_features, leaves,
       part = detail::computes_part](const auto& dy, auto dx, auto dw, auto db) {
        // For a part of a batch the bias's gradient is summed in a fixed order, whatever a library would choose.
        const bool both = dw && db && !part &&
                          detail::weight_and_bias(*dw, *db, dy, input, rows, in_features, out_features);
        if (db && !both) {
          const auto [grad, accumulate] = db->target();
          kernels::sum(device, {1, rows, out_features}, dy.data(), grad.data(), accumulate);
        }
        if (dw && !both) {
          const auto add = [device, rows, in_features, out_features](auto& node, const auto& dout, const auto& saved) {
            const auto [grad, accumulate] = node.target();
            kernels::gemm(device, Trans::yes, Trans::no, out_features, in_features, rows, dout.data(), out_features,
                          saved.read("linear").data(), in_features, grad.data(), in_features, accumulate);
          };
          detail::now_or_later(*dw, add, dy, input);
        }
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          detail::gemm_in_leaves(leaves.get(), false, device, Trans::no, rows, in_features, out_features, dy.data(),
                                 w.read("linear").data(), in_features, grad.data(), accumulate);
        }
      },
      x, weight, bias);
}
template <Operand X, Operand W, Operand B>
detail::RecordedLike<X, X, W, B> linear(const X& x, const W& weight, const B& bias) {
  return linear(x, weight, bias, contiguous(value_of(weight)), contiguous(value_of(bias)));
}
}  // namespace operations

/// x: [..., in], weight: [out, in], bias: [out] or absent -> x weightᵀ + bias: [..., out]. Throws ShapeError if sizes
/// differ.
template <Operand X, Operand W, Operand B>
auto linear(const X& x, const W& weight, const B& bias) {
  static_assert(tensor_of<X>::rank >= 1, "linear: expected an input with at least one axis");
  static_assert(of_one_type<X, W, B>,
                "linear: input and weights have different scalar types; to<float>(x) converts one");
  if constexpr (of_one_type<X, W, B>)
    return detail::with_variables([](const auto&... xs) { return operations::linear(xs...); }, x, weight, bias);
  else
    return detail::RecordedLike<X, W, X>();  // so that the message above is the only error
}
/// For bf16 and half inputs, weight and bias are converted to the input's type. Gradients of float weights and biases
/// stay float.
template <NarrowOperand X, Operand W, Operand B>
requires OfOtherType<X, W>
auto linear(const X& x, const W& weight, const B& bias) {
  using T = typename tensor_of<X>::value_type;
  if constexpr (detail::has_float_gradients<X, W, B>)
    return detail::with_variables(
        [w = detail::numbers_in<T>(weight), b = detail::numbers_in<T>(bias)](const auto&... xs) {
          return operations::linear(xs..., w, b);
        },
        x, weight, bias);
  else
    return linear(x, to<T>(weight), to<T>(bias));
}
template <Operand X, Operand W>
auto linear(const X& x, const W& weight) {
  return linear(x, weight, Tensor<typename tensor_of<X>::value_type, 1, typename tensor_of<X>::device_type>());
}

}  // namespace chorus
