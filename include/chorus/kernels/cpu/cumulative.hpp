#pragma once
/// Cumulative sums and products on the CPU.

#include <algorithm>

#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cumulative.hpp>

namespace chorus::kernels {

namespace detail {
/// Adjacent lines, whose rows are contiguous.
template <Index Most>
struct RunningColumns {
  static constexpr Index most = Most;  ///< the largest `count`
  Index first, stride, count;
  Index at(Index a, Index i) const { return first + a * stride + i; }
};
/// Lines along memory. Several at a time hide the latency of the dependent additions.
template <Index Count>
struct RunningRows {
  static constexpr Index most = Count, count = Count;
  Index first, length;
  Index at(Index a, Index i) const { return first + i * length + a; }
};

/// Calls `f` with all lines in groups: `Most` columns or `Rows` rows at a time.
template <Index Most, Index Rows, class F>
void for_line_groups(AxisShape shape, const F& f) {
  const Index groups = (shape.inner + Most - 1) / Most;
  const Index least = thread_elements / std::max(Index{1}, shape.axis * std::min(shape.inner, Most)) + 1;
  if (shape.inner == 1)
    return parallel_ranges(shape.outer, Rows, least, [&](Index first, Index rows) {
      Index row = first;
      for (; row + Rows <= first + rows; row += Rows) f(RunningRows<Rows>{row * shape.axis, shape.axis});
      for (; row < first + rows; ++row) f(RunningRows<1>{row * shape.axis, shape.axis});
    });
  parallel_ranges(shape.outer * groups, 1, least, [&](Index first, Index n) {
    for (Index group = first; group < first + n; ++group) {
      const Index i = group % groups * Most;
      f(RunningColumns<Most>{group / groups * shape.axis * shape.inner + i, shape.inner,
                             std::min(Most, shape.inner - i)});
    }
  });
}
}  // namespace detail

template <class T>
void cumsum(Cpu, AxisShape shape, const T* x, T* y, bool reverse, bool accumulate) {
  detail::for_line_groups<512, 1>(shape, [=](const auto lines) {
    double sum[decltype(lines)::most];
    for (Index i = 0; i < lines.count; ++i) sum[i] = 0;
    for (Index step = 0; step < shape.axis; ++step) {
      const Index a = reverse ? shape.axis - 1 - step : step;
      for (Index i = 0; i < lines.count; ++i) {
        const Index at = lines.at(a, i);
        sum[i] += static_cast<double>(x[at]);
        y[at] = static_cast<T>(sum[i]) + (accumulate ? y[at] : T{0});
      }
    }
  });
}

template <class T>
void cumprod(Cpu, AxisShape shape, const T* x, T* y) {
  detail::for_line_groups<512, 4>(shape, [=](const auto lines) {
    double product[decltype(lines)::most];
    for (Index i = 0; i < lines.count; ++i) product[i] = 1;
    for (Index a = 0; a < shape.axis; ++a)
      for (Index i = 0; i < lines.count; ++i) {
        const Index at = lines.at(a, i);
        product[i] *= static_cast<double>(x[at]);
        y[at] = static_cast<T>(product[i]);
      }
  });
}

template <class T>
void cumprod_backward(Cpu device, AxisShape shape, const T* x, const T* dy, T* dx, bool accumulate) {
  constexpr Index most = 64;
  if (shape.numel() == 0) return;
  const ThreadScratch<double> after_of_thread(device, shape.axis * most);
  detail::for_line_groups<most, 4>(shape, [=, &after_of_thread](const auto lines) {
    // sum_j>=a dy[j] x[a+1] ... x[j] is computed from the end, so that no division by x is needed.
    double* after = after_of_thread.data();
    double sum[most];
    for (Index i = 0; i < lines.count; ++i) sum[i] = 0;
    for (Index a = shape.axis; a-- > 0;)
      for (Index i = 0; i < lines.count; ++i) {
        const Index at = lines.at(a, i);
        after[a * most + i] = sum[i] += static_cast<double>(dy[at]);
        sum[i] *= static_cast<double>(x[at]);
      }
    double before[most];
    for (Index i = 0; i < lines.count; ++i) before[i] = 1;
    for (Index a = 0; a < shape.axis; ++a)
      for (Index i = 0; i < lines.count; ++i) {
        const Index at = lines.at(a, i);
        dx[at] = static_cast<T>(before[i] * after[a * most + i]) + (accumulate ? dx[at] : T{0});
        before[i] *= static_cast<double>(x[at]);
      }
  });
}

}  // namespace chorus::kernels
