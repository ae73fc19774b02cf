#pragma once
/// scatter_add, scatter, index_add, scatter_reduce.

#include <algorithm>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/higher_order/picking.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/reduction.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

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

/// As torch.index_add: adds entry i of source's axis to entry `index[i]` of x's. The other sizes are equal. Throws
/// ShapeError if sizes differ, UsageError for an index out of range. Waits for the GPU.
template <Operand X, class D, Operand S>
auto index_add(const X& x, Index axis, const Tensor<std::int64_t, 1, D>& index, const S& source) {
  static_assert(of_one_type<X, S> && tensor_of<X>::rank == tensor_of<S>::rank,
                "index_add: expected one scalar type and rank; to<float>(x) converts");
  const auto a = normalize_axis("index_add", axis, tensor_of<X>::rank);
  auto expected = value_of(x).shape();
  expected[a] = index.numel();
  check<ShapeError>(value_of(source).shape() == expected, "index_add: expected a source of shape ", expected, " for ",
                    index.numel(), " indices and an input of shape ", value_of(x).shape(), ", got ",
                    value_of(source).shape());
  const Index size = value_of(x).shape()[a];
  const auto places = to_device(contiguous(index), Cpu{});
  for (Index i = 0; i < places.numel(); ++i)
    check<UsageError>(places.data()[i] >= 0 && places.data()[i] < size, "index_add: index ", places.data()[i],
                      " is not in [0, ", size, ")");
  return x + detail::index_add(source, value_of(x).shape(), a, contiguous(index));
}

/// How `scatter_reduce` joins the elements for one position.
enum class ScatterReduction : std::uint8_t { sum, prod, mean, amax, amin };

namespace operations {
template <int Rank, class D>
struct ScatterReduce {
  static constexpr const char* name = "scatter_reduce";
  Tensor<std::int64_t, Rank, D> index;
  std::size_t axis;
  ScatterReduction how;
  Tensor<bool, Rank, D> touched;  // where the input counts no longer
};
}  // namespace operations

namespace detail {

// Calls `f(position in x, position in the source)` for each element of the source; arrays are contiguous on the host.
template <class F>
void for_each_scattered(const kernels::AxisShape& whole, Index count, const std::int64_t* index, const F& f) {
  for (Index o = 0; o < whole.outer; ++o)
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i) {
        const Index from = (o * count + j) * whole.inner + i;
        f((o * whole.axis + index[from]) * whole.inner + i, from);
      }
}

// The product of all factors but one; a factor of 0 counts separately.
struct OtherFactors {
  double product = 1;
  Index zeros = 0;
  void add(double factor) { factor == 0 ? static_cast<void>(++zeros) : static_cast<void>(product *= factor); }
  double all() const { return zeros > 0 ? 0 : product; }
  double without(double factor) const {
    return factor == 0 ? (zeros == 1 ? product : 0) : (zeros == 0 ? product / factor : 0);
  }
};

// prod, amax and amin: on the host. `touched`: where x counts no longer.
template <Operand X, int Rank, class D, Operand S>
auto reduce_scattered(const X& x, std::size_t axis, const Tensor<std::int64_t, Rank, D>& index, const S& source,
                      ScatterReduction how, const Tensor<bool, Rank, D>& touched) {
  using T = typename tensor_of<X>::value_type;
  const auto whole = around_axis(value_of(x).shape(), axis);
  const Index count = index.shape()[axis];
  const auto device = value_of(x).device();
  struct OnHost {
    Tensor<T, Rank> x, source;
    Tensor<std::int64_t, Rank> index;
    Tensor<bool, Rank> touched;
  };
  const OnHost host{to_device(contiguous(value_of(x)), Cpu{}), to_device(contiguous(value_of(source)), Cpu{}),
                    to_device(index, Cpu{}), to_device(contiguous(touched), Cpu{})};
  const auto factors = [host, whole, count] {
    std::vector<OtherFactors> all(static_cast<std::size_t>(host.x.numel()));
    for (Index i = 0; i < host.x.numel(); ++i)
      if (!host.touched.data()[i]) all[static_cast<std::size_t>(i)].add(static_cast<double>(host.x.data()[i]));
    for_each_scattered(whole, count, host.index.data(), [&](Index at, Index from) {
      all[static_cast<std::size_t>(at)].add(static_cast<double>(host.source.data()[from]));
    });
    return all;
  };
  auto out = clone(host.x);
  if (how == ScatterReduction::prod) {
    const auto all = factors();
    std::transform(all.begin(), all.end(), out.data(), [](const auto& one) { return static_cast<T>(one.all()); });
  } else {
    const bool largest = how == ScatterReduction::amax;
    constexpr T infinity = std::numeric_limits<T>::infinity();
    for (Index i = 0; i < out.numel(); ++i)
      if (host.touched.data()[i]) out.data()[i] = largest ? -infinity : infinity;
    for_each_scattered(whole, count, host.index.data(), [&](Index at, Index from) {
      T& best = out.data()[at];
      const T next = host.source.data()[from];
      if (next != next || (largest ? next > best : next < best)) best = next;
    });
  }
  return record(
      operations::ScatterReduce<Rank, D>{index, axis, how, touched}, to_device(out, device),
      [host, whole, count, how, out, factors, of_x = Saved(value_of(x)), of_source = Saved(value_of(source))](
          const auto& dy, auto dx, auto dsource) {
        of_x.read("scatter_reduce");
        of_source.read("scatter_reduce");
        const auto above = to_device(contiguous(dy), Cpu{});
        auto by_x = Tensor<T, Rank>::zeros(host.x.shape()), by_source = Tensor<T, Rank>::zeros(host.source.shape());
        const auto x_counts = [&](Index i) { return !host.touched.data()[i]; };
        if (how == ScatterReduction::prod) {
          const auto all = factors();
          const auto slope = [&](Index at, T factor) {
            return static_cast<T>(static_cast<double>(above.data()[at]) *
                                  all[static_cast<std::size_t>(at)].without(static_cast<double>(factor)));
          };
          for (Index i = 0; i < by_x.numel(); ++i)
            if (x_counts(i)) by_x.data()[i] = slope(i, host.x.data()[i]);
          for_each_scattered(whole, count, host.index.data(), [&](Index at, Index from) {
            by_source.data()[from] = slope(at, host.source.data()[from]);
          });
        } else {  // equal extremes share the gradient
          std::vector<double> equal(static_cast<std::size_t>(by_x.numel()));
          const auto is_best = [&](Index at, T number) { return number == out.data()[at]; };
          const auto share = [&](Index at) {
            return static_cast<T>(static_cast<double>(above.data()[at]) / equal[static_cast<std::size_t>(at)]);
          };
          for (Index i = 0; i < by_x.numel(); ++i)
            if (x_counts(i) && is_best(i, host.x.data()[i])) ++equal[static_cast<std::size_t>(i)];
          for_each_scattered(whole, count, host.index.data(), [&](Index at, Index from) {
            if (is_best(at, host.source.data()[from])) ++equal[static_cast<std::size_t>(at)];
          });
          for (Index i = 0; i < by_x.numel(); ++i)
            if (x_counts(i) && is_best(i, host.x.data()[i])) by_x.data()[i] = share(i);
          for_each_scattered(whole, count, host.index.data(), [&](Index at, Index from) {
            if (is_best(at, host.source.data()[from])) by_source.data()[from] = share(at);
          });
        }
        if (dx) dx->add(to_device(by_x, dy.device()));
        if (dsource) dsource->add(to_device(by_source, dy.device()));
      },
      x, source);
}

}  // namespace detail

/// Throws UsageError for a product with a factor of 0.
template <int Rank, class D, class Dy, class Y, class X, class S>
auto derivatives(const operations::ScatterReduce<Rank, D>& operation, const Dy& dy, const Y& y, const X& x,
                 const S& source) {
  const auto there = [&operation](const auto& each) {
    return detail::gather_along(each, operation.axis, operation.index);
  };
  const auto rule = [&operation, &dy, &y, &x, &source, there]<bool by_x>(std::integral_constant<bool, by_x>) {
    using T = typename X::value_type;
    const auto counts = masked_fill(tensor_of<X>::ones(x.shape(), x.device()), operation.touched, 0);
    if (operation.how == ScatterReduction::prod) {
      const auto no_zeros = [](const auto& factors) {
        const auto host = to_device(contiguous(factors), Cpu{});
        return std::all_of(host.data(), host.data() + host.numel(), [](auto factor) { return factor != 0; });
      };
      check<UsageError>(no_zeros(masked_fill(x.value(), operation.touched, 1)) && no_zeros(source.value()),
                        "grad: create_graph: 'scatter_reduce': expected factors other than 0, got a 0");
      if constexpr (by_x)
        return dy * y / masked_fill(x, operation.touched, 1) * counts;
      else
        return there(dy * y) / source;
    } else {  // equal extremes share the gradient; which ones these are changes at single points alone
      const auto of_x = to<T>(x.value() == y.value()) * counts, of_source = to<T>(source.value() == there(y.value()));
      const auto all = scatter_add(of_x, static_cast<Index>(operation.axis), operation.index, of_source);
      if constexpr (by_x)
        return dy * of_x / all;
      else
        return there(dy / all) * of_source;
    }
  };
  return std::tuple{[rule] { return rule(std::true_type{}); }, [rule] { return rule(std::false_type{}); }};
}

/// As torch.scatter_reduce: each element of x joined with the elements of `source` that the index sends there. Without
/// `include_self` x counts only where nothing is sent. Equal extremes share the gradient. `prod`, `amax` and `amin` run
/// on the host: a GPU's values are copied there, the results back. Shapes and errors as for scatter_add.
template <Operand X, class D, Operand S>
auto scatter_reduce(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index, const S& source,
                    ScatterReduction how, bool include_self = true) {
  using T = typename tensor_of<X>::value_type;
  static_assert(of_one_type<X, S> && Real<T>, "scatter_reduce: expected floating-point operands of one scalar type");
  if constexpr (NarrowOperand<X>) {
    return to<T>(scatter_reduce(to<float>(x), axis, index, to<float>(source), how, include_self));
  } else {
    const auto& shape = value_of(x).shape();
    const auto zeros = Tensor<T, tensor_of<X>::rank, D>::zeros(shape, value_of(x).device());
    const auto ones = Tensor<T, tensor_of<X>::rank, D>::ones(index.shape(), index.device());
    const auto counts = scatter_add(zeros, axis, index, ones);
    const auto touched = include_self ? zeros > 0 : counts > 0;
    auto sum = scatter_add(masked_fill(x, touched, 0), axis, index, source);
    if (how == ScatterReduction::sum) return sum;
    if (how == ScatterReduction::mean) return decltype(sum)(sum / maximum(counts + (include_self ? 1 : 0), zeros + 1));
    return decltype(sum)(detail::reduce_scattered(x, normalize_axis("scatter_reduce", axis, tensor_of<X>::rank),
                                                  contiguous(index), source, how, touched));
  }
}

}  // namespace chorus
