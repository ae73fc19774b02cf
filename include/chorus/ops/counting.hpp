#pragma once
/// unique, searchsorted, bincount, histogram. They run on the host: a GPU's values are copied there, the results back.
/// None has a gradient.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/sort.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// The result of `unique`: the distinct values in ascending order, for each element the index of its value, and the
/// count of each value.
template <class Values, class Inverse, class Counts>
struct Unique {
  Values values;
  Inverse inverse;
  Counts counts;
};

namespace detail {
// Ascending order, NaN last.
template <class T>
bool comes_before(T a, T b) {
  return a < b || (b != b && a == a);
}
template <class T, class D>
Tensor<T, 1, D> list_on(D device, const std::vector<T>& list) {
  return Tensor<T, 1, D>::from(std::span<const T>(list), {static_cast<Index>(list.size())}, device);
}
template <Operand X>
auto on_host(const char* operation, const X& x) {
  check_defined(operation, value_of(x));
  return to_device(contiguous(value_of(x)), Cpu{});
}
}  // namespace detail

/// The distinct values of x: values [count], inverse like x, counts [count]. Each NaN is distinct.
template <Operand X>
auto unique(const X& x) {
  using T = typename tensor_of<X>::value_type;
  using C = compute_type<T>;
  using D = typename tensor_of<X>::device_type;
  const auto input = detail::on_host("unique", x);
  const T* const in = input.data();
  const auto order = argsort(to<C>(input).view(Shape<1>{input.numel()}));
  std::vector<std::int64_t> firsts, counts;
  auto inverse = Tensor<std::int64_t, tensor_of<X>::rank>::empty(input.shape());
  for (const auto i : std::span(order.data(), static_cast<std::size_t>(order.numel()))) {
    if (firsts.empty() || static_cast<C>(in[firsts.back()]) != static_cast<C>(in[i])) {
      firsts.push_back(i);
      counts.push_back(0);
    }
    ++counts.back();
    inverse.data()[i] = static_cast<std::int64_t>(firsts.size()) - 1;
  }
  auto values = Tensor<T, 1>::empty({static_cast<Index>(firsts.size())});
  for (std::size_t i = 0; i < firsts.size(); ++i) values.data()[i] = in[firsts[i]];
  const D device = value_of(x).device();
  return Unique<Tensor<T, 1, D>, Tensor<std::int64_t, tensor_of<X>::rank, D>, Tensor<std::int64_t, 1, D>>{
      to_device(values, device), to_device(inverse, device), detail::list_on(device, counts)};
}

/// For each value the insertion index in `sorted`, [count], that keeps the order: before equal elements, or with
/// `right` after them. NaN is the largest. Throws UsageError if `sorted` is not in order.
template <Operand S, Operand V>
auto searchsorted(const S& sorted, const V& values, bool right = false) {
  static_assert(tensor_of<S>::rank == 1, "searchsorted: expected a vector of sorted numbers");
  static_assert(of_one_type<S, V>, "searchsorted: operands have different scalar types; to<float>(x) converts one");
  using C = compute_type<typename tensor_of<S>::value_type>;
  const auto order = detail::on_host("searchsorted", sorted);
  const auto wanted = detail::on_host("searchsorted", values);
  const auto before = [](const auto& a, const auto& b) {
    return detail::comes_before(static_cast<C>(a), static_cast<C>(b));
  };
  const auto *first = order.data(), *last = first + order.numel();
  const auto* const wrong = std::is_sorted_until(first, last, before);
  check<UsageError>(wrong == last, "searchsorted: expected numbers in ascending order, got a smaller one at index ",
                    static_cast<Index>(wrong - first));
  auto out = Tensor<std::int64_t, tensor_of<V>::rank>::empty(wanted.shape());
  for (Index i = 0; i < out.numel(); ++i) {
    const auto value = wanted.data()[i];
    out.data()[i] =
        (right ? std::upper_bound(first, last, value, before) : std::lower_bound(first, last, value, before)) - first;
  }
  return to_device(out, value_of(values).device());
}

/// The count of each of 0, 1, ...: [max(largest + 1, at_least)]. Throws UsageError for negative values.
template <Device D>
Tensor<std::int64_t, 1, D> bincount(const Tensor<std::int64_t, 1, D>& x, Index at_least = 0) {
  const auto input = detail::on_host("bincount", x);
  check<UsageError>(at_least >= 0, "bincount: expected a length of at least 0, got ", at_least);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(at_least));
  for (Index i = 0; i < input.numel(); ++i) {
    const std::int64_t value = input.data()[i];
    check<UsageError>(value >= 0, "bincount: expected numbers of at least 0, got ", value);
    if (static_cast<std::size_t>(value) >= counts.size()) counts.resize(static_cast<std::size_t>(value) + 1);
    ++counts[static_cast<std::size_t>(value)];
  }
  return detail::list_on(x.device(), counts);
}

/// The result of `histogram`: counts [bins] and edges [bins + 1]. A bin includes its left edge, the last one also its
/// right edge.
template <class Counts, class Edges>
struct Histogram {
  Counts counts;
  Edges edges;
};

/// Counts the elements of x in `bins` bins of equal width from `low` to `high` and ignores those outside. If both are
/// equal, the bins span the smallest to the largest element. Throws UsageError if low > high, if bins < 1, and if a
/// limit is not finite.
template <Operand X>
auto histogram(const X& x, Index bins, double low = 0, double high = 0) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  static_assert(Real<T>, "histogram: expected floating-point numbers");
  const auto input = detail::on_host("histogram", x);
  const auto number = [&](Index i) { return static_cast<double>(input.data()[i]); };
  check<UsageError>(bins >= 1, "histogram: expected at least 1 bin, got ", bins);
  if (low == high && input.numel() > 0) {
    low = high = number(0);
    for (Index i = 0; i < input.numel(); ++i) {
      check<UsageError>(std::isfinite(number(i)), "histogram: expected finite numbers, or limits, got ", number(i));
      low = std::min(low, number(i));
      high = std::max(high, number(i));
    }
  }
  if (low == high) {
    low -= 0.5;
    high += 0.5;
  }
  check<UsageError>(low < high && std::isfinite(low) && std::isfinite(high),
                    "histogram: expected limits in ascending order, got ", low, " and ", high);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(bins));
  std::vector<double> edges(counts.size() + 1);
  for (std::size_t i = 0; i < edges.size(); ++i)
    edges[i] = low + (high - low) * static_cast<double>(i) / static_cast<double>(bins);
  edges.back() = high;
  for (Index i = 0; i < input.numel(); ++i) {
    if (!(number(i) >= low && number(i) <= high)) continue;
    const auto after = std::upper_bound(edges.begin(), edges.end(), number(i)) - edges.begin();
    ++counts[static_cast<std::size_t>(std::min<Index>(after, bins) - 1)];
  }
  std::vector<T> rounded(edges.size());
  std::transform(edges.begin(), edges.end(), rounded.begin(), [](double edge) { return static_cast<T>(edge); });
  const D device = value_of(x).device();
  return Histogram<Tensor<std::int64_t, 1, D>, Tensor<T, 1, D>>{detail::list_on(device, counts),
                                                                detail::list_on(device, rounded)};
}

}  // namespace chorus
