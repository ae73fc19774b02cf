#pragma once
/// scatter_add and scatter.

#include <chorus/ops/higher_order/picking.hpp>
#include <chorus/ops/reduction.hpp>
#include <tuple>
#include <type_traits>

namespace chorus {

namespace operations {
template <int Rank, class D, bool add>
struct Scatter {
  static constexpr const char* name = add ? "scatter_add" : "scatter";
  Tensor<std::int64_t, Rank, D> index;
  std::size_t axis;
};
}  // namespace operations

namespace detail {

// CPU kernels detect repeated positions themselves. On a GPU the elements for each position are counted.
template <class T, int Rank, class D>
void check_positions_once(const Shape<Rank>& shape, std::size_t axis, const Tensor<std::int64_t, Rank, D>& index) {
  if constexpr (!std::is_same_v<D, Cpu>) {
    const auto ones = Tensor<T, Rank, D>::ones(index.shape(), index.device());
    auto count = Tensor<T, Rank, D>::zeros(shape, index.device());
    kernels::scatter(index.device(), around_axis(shape, axis), index.shape()[axis], index.data(), ones.data(),
                     count.data(), true);
    check<UsageError>(count.numel() == 0 || !(static_cast<double>(amax(count).item()) > 1),
                      "scatter: the index names a position twice");
  }
}

/// A copy of x, with `source` added or stored at the indices.
template <bool add, Operand X, int Rank, class D, Operand S>
auto put_at(const X& x, std::size_t axis, const Tensor<std::int64_t, Rank, D>& positions, const S& source) {
  using T = typename tensor_of<X>::value_type;
  using Operation = operations::Scatter<Rank, D, add>;
  static_assert(of_one_type<X, S>, "scatter: expected one scalar type; to<float>(x) converts");
  const auto& shape = value_of(x).shape();
  const auto device = value_of(x).device();
  auto expected = shape;
  expected[axis] = positions.shape()[axis];
  check<ShapeError>(positions.shape() == expected && value_of(source).shape() == expected, Operation::name,
                    ": an index of shape ", positions.shape(), " and a source of shape ", value_of(source).shape(),
                    " do not fit an input of ", shape);
  check<DeviceError>(positions.device() == device && value_of(source).device() == device, Operation::name,
                     ": index and source are on ", positions.device(), " and ", value_of(source).device(),
                     ", the input on ", device);
  const auto index = contiguous(positions);
  if constexpr (!add) check_positions_once<T>(shape, axis, index);
  const auto from = contiguous(value_of(source));
  const auto whole = around_axis(shape, axis);
  const Index count = index.shape()[axis];
  auto out = clone(value_of(x));
  kernels::scatter(device, whole, count, index.data(), from.data(), out.data(), add);
  return record(
      Operation{index, axis}, std::move(out),
      [index, whole, count](const auto& dy, auto dx, auto dsource) {
        if (dsource) {
          auto grad = Tensor<T, Rank, D>::empty(index.shape(), dy.device());
          kernels::gather(dy.device(), whole, count, index.data(), dy.data(), grad.data());
          dsource->add(grad);
        }
        if (!dx) return;
        if constexpr (add) {
          dx->add(dy);
        } else {
          auto grad = clone(dy);
          const auto zeros = Tensor<T, Rank, D>::zeros(index.shape(), dy.device());
          kernels::scatter(dy.device(), whole, count, index.data(), zeros.data(), grad.data(), false);
          dx->add(grad);
        }
      },
      x, source);
}

}  // namespace detail

template <int Rank, class D, bool add, class Dy, class Y, class X, class S>
auto derivatives(const operations::Scatter<Rank, D, add>& operation, const Dy& dy, const Y&, const X&, const S&) {
  const auto by_input = [&] {
    if constexpr (add) {
      return Dy(dy);
    } else {
      using Zeros = Tensor<typename Dy::value_type, Rank, D>;
      const auto zeros = Zeros::zeros(operation.index.shape(), operation.index.device());
      return detail::put_at<false>(dy, operation.axis, operation.index, zeros);
    }
  };
  return std::tuple{by_input, [&] { return detail::gather_along(dy, operation.axis, operation.index); }};
}

/// As torch.scatter_add: adds each element of `source` to x at `index` along `axis`, at the same position in the other
/// axes. index and source have one shape, which equals x's except along the axis. Throws ShapeError if shapes don't
/// fit, DeviceError if devices differ, UsageError for an index out of range.
template <Operand X, class D, Operand S>
auto scatter_add(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index, const S& source) {
  return detail::put_at<true>(x, normalize_axis("scatter_add", axis, tensor_of<X>::rank), index, source);
}

/// As torch.scatter: stores each element of `source` in x at `index`. Throws as scatter_add does, and UsageError if a
/// position occurs twice.
template <Operand X, class D, Operand S>
auto scatter(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index, const S& source) {
  return detail::put_at<false>(x, normalize_axis("scatter", axis, tensor_of<X>::rank), index, source);
}

}  // namespace chorus
