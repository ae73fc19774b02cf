#pragma once
/// Copies, fills and sums of whole arrays on the CPU.

#include <algorithm>
#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/transpose.hpp>
#include <chorus/kernels/strided_runs.hpp>
#include <chorus/tensor/shape.hpp>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>

namespace chorus::kernels {

template <Scalar T>
void fill(Cpu, Index count, T* x, T value) {
  if constexpr (std::floating_point<T>)
    parallel_packets<T>(count, [=](Index i, auto n) { store(x + i, splat(value), n); });
  else
    std::fill_n(x, count, value);
}

template <Scalar From, Scalar To>
void convert(Cpu, Index count, const From* x, To* y) {
  detail::convert_array(count, x, y);
}

template <Real T>
void axpy(Cpu, Index count, T a, const T* x, T* y) {
  if constexpr (Narrow<T>) {
    for (Index i = 0; i < count; ++i) y[i] = a * x[i] + y[i];
  } else {
    const auto factor = splat(a);
    parallel_packets<T>(count,
                        [=](Index i, auto n) { store(y + i, pmadd(factor, load(x + i, n), load(y + i, n)), n); });
  }
}

template <Real T>
void scale(Cpu, Index count, T a, T* x) {
  if constexpr (Narrow<T>) {
    for (Index i = 0; i < count; ++i) x[i] = a * x[i];
  } else {
    const auto factor = splat(a);
    parallel_packets<T>(count, [=](Index i, auto n) { store(x + i, pmul(factor, load(x + i, n)), n); });
  }
}

namespace detail {

/// Gathers the next `count` elements of a strided array.
template <class T>
void gather(StridedRuns& runs, Index count, const T* from, T* to) {
  runs.next(count, [&](Index offset, Index step, Index n) {
    const T* x = from + offset;
    if (step == 1) {
      std::memcpy(to, x, static_cast<std::size_t>(n) * sizeof(T));
    } else if (step == 0) {
      fill(Cpu{}, n, to, *x);
    } else {
      for (Index i = 0; i < n; ++i) to[i] = x[i * step];
    }
    to += n;
  });
}

/// The inverse: writes (or adds) `count` adjacent elements to their positions.
template <bool Accumulate, class T>
void scatter(StridedRuns& runs, Index count, const T* from, T* to) {
  runs.next(count, [&](Index offset, Index step, Index n) {
    T* y = to + offset;
    if constexpr (!Accumulate) {
      if (step == 1)
        std::memcpy(y, from, static_cast<std::size_t>(n) * sizeof(T));
      else
        for (Index i = 0; i < n; ++i) y[i * step] = from[i];
    } else {
      if (step == 1)
        axpy(Cpu{}, n, T{1}, from, y);
      else if (step == 0)
        *y += Sum<T>::fold(reduce_packets<T>(Index{0}, n, splat(T{0}), Sum<T>{},
                                             [&](Index i, auto lanes_used) { return load(from + i, lanes_used); }));
      else
        for (Index i = 0; i < n; ++i) y[i * step] += from[i];
    }
    from += n;
  });
}

/// Whether the innermost axis repeats each number a few times. Runs along such an axis would be too short.
inline bool repeats(const StridedRuns& runs) { return runs.rank() > 1 && runs.stride(0) == 0 && runs.size(0) <= 16; }

/// gather and scatter (which adds) for such an array of `count` elements.
template <class T>
void gather_repeats(const StridedRuns& runs, Index count, const T* from, T* to) {
  const Index times = runs.size(0);
  runs.without_innermost().next(count / times, [&](Index offset, Index step, Index n) {
    const T* x = from + offset;
    if (times == 2)  // common for upsampled images
      for (Index i = 0; i < n; ++i) to[2 * i] = to[2 * i + 1] = x[i * step];
    else
      for (Index i = 0; i < n; ++i) std::fill_n(to + i * times, times, x[i * step]);
    to += n * times;
  });
}
template <class T>
void scatter_repeats(const StridedRuns& runs, Index count, const T* from, T* to) {
  const Index times = runs.size(0);
  runs.without_innermost().next(count / times, [&](Index offset, Index step, Index n) {
    T* y = to + offset;
    if (times == 2) {
      for (Index i = 0; i < n; ++i) y[i * step] += from[2 * i] + from[2 * i + 1];
    } else {
      for (Index i = 0; i < n; ++i) {
        T sum = 0;
        for (Index j = 0; j < times; ++j) sum += from[i * times + j];
        y[i * step] += sum;
      }
    }
    from += n * times;
  });
}

/// dst[i][j] = src[j][i] for i < rows, j < columns, in tiles that fit into the cache; floats in register squares.
template <class T>
void transpose(Index rows, Index columns, const T* src, Index src_stride, T* dst, Index dst_stride) {
  constexpr Index tile = 64;
  const auto one_by_one = [&](Index i0, Index i_end, Index j0, Index j_end) {
    for (Index i = i0; i < i_end; ++i)
      for (Index j = j0; j < j_end; ++j) dst[i * dst_stride + j] = src[j * src_stride + i];
  };
  for (Index i0 = 0; i0 < rows; i0 += tile)
    for (Index j0 = 0; j0 < columns; j0 += tile) {
      const Index i_end = std::min(i0 + tile, rows), j_end = std::min(j0 + tile, columns);
      if constexpr (std::is_same_v<T, float>) {
        constexpr Index w = lanes<T>;
        const Index i_whole = i0 + (i_end - i0) / w * w, j_whole = j0 + (j_end - j0) / w * w;
        for (Index j = j0; j < j_whole; j += w)
          for (Index i = i0; i < i_whole; i += w) {
            Square<T> square;
            for (Index k = 0; k < w; ++k) square.packet[k] = load(src + (j + k) * src_stride + i, Whole<T>{});
            transpose<T>(square);
            for (Index k = 0; k < w; ++k) store(dst + (i + k) * dst_stride + j, square.packet[k], Whole<T>{});
          }
        one_by_one(i_whole, i_end, j0, j_end);
        one_by_one(i0, i_whole, j_whole, j_end);
      } else {
        one_by_one(i0, i_end, j0, j_end);
      }
    }
}

/// A view whose innermost axis is strided, while another axis, `unit`, has stride 1. For each index of the other axes,
/// these two are copied as a matrix transpose.
struct TransposedView {
  Index rows, columns, src_stride, dst_stride;  // of the matrix
  Index matrices = 1;
  std::size_t rest = 0;
  std::array<Index, max_rank> shape{}, src{}, dst{};  // sizes and strides of the other axes, the innermost first

  TransposedView(const StridedRuns& runs, std::size_t unit)
      : rows(runs.size(unit)), columns(runs.size(0)), src_stride(runs.stride(0)), dst_stride(0) {
    Index stride = 1;
    for (std::size_t axis = 0; axis < runs.rank(); stride *= runs.size(axis++)) {
      if (axis == unit) dst_stride = stride;
      if (axis == 0 || axis == unit) continue;
      shape[rest] = runs.size(axis);
      src[rest] = runs.stride(axis);
      dst[rest++] = stride;
      matrices *= runs.size(axis);
    }
  }

  template <class T>
  void copy(Index first, Index count, const T* from, T* to) const {
    for (Index i = first; i < first + count; ++i) {
      Index number = i, src_offset = 0, dst_offset = 0;
      for (std::size_t axis = 0; axis < rest; number /= shape[axis++]) {
        src_offset += number % shape[axis] * src[axis];
        dst_offset += number % shape[axis] * dst[axis];
      }
      transpose(rows, columns, from + src_offset, src_stride, to + dst_offset, dst_stride);
    }
  }
};

/// `runs` as such a view, if possible.
inline std::optional<TransposedView> transposed_view(const StridedRuns& runs) {
  std::size_t unit = 1;
  while (unit < runs.rank() && runs.stride(unit) != 1) ++unit;
  if (unit >= runs.rank() || runs.stride(0) == 0) return std::nullopt;
  return TransposedView(runs, unit);
}

/// copy_strided on one thread.
template <Scalar T>
void copy_alone(std::span<const Index> shape, const T* src, std::span<const Index> src_strides, T* dst) {
  const Index count = numel(shape);
  StridedRuns runs(shape, src_strides);
  if (repeats(runs)) return gather_repeats(runs, count, src, dst);
  if (const auto view = transposed_view(runs)) return view->copy(0, view->matrices, src, dst);
  gather(runs, count, src, dst);
}

}  // namespace detail

template <Scalar T>
void copy_strided(Cpu, std::span<const Index> shape, const T* src, std::span<const Index> src_strides, T* dst) {
  const Index count = numel(shape);
  if (count == 0) return;
  if (num_threads() == 1 || count < 2 * thread_elements || shape.size() > static_cast<std::size_t>(max_rank))
    return detail::copy_alone(shape, src, src_strides, dst);
  // If there are many matrices, each thread copies its own, so that no two threads share a cache line.
  const auto view = detail::transposed_view(StridedRuns(shape, src_strides));
  if (view && view->matrices >= 4 * num_threads()) {
    const Index least = thread_elements / (view->rows * view->columns) + 1;
    return parallel_ranges(view->matrices, 1, least, [&](Index first, Index n) { view->copy(first, n, src, dst); });
  }
  // Otherwise each thread has a range of the first axis longer than 1.
  const auto axis = static_cast<std::size_t>(
      std::find_if(shape.begin(), shape.end(), [](Index size) { return size != 1; }) - shape.begin());
  const Index size = shape[axis], row = count / size;
  parallel_ranges(size, 1, thread_elements / row + 1, [&](Index first, Index n) {
    std::array<Index, max_rank> part{};
    std::copy(shape.begin(), shape.end(), part.begin());
    part[axis] = n;
    detail::copy_alone(std::span<const Index>(part.data(), shape.size()), src + first * src_strides[axis], src_strides,
                       dst + first * row);
  });
}

template <Scalar T>
void scatter_strided(Cpu device, std::span<const Index> shape, const T* src, T* dst, std::span<const Index> dst_strides,
                     bool accumulate) {
  const Index count = numel(shape);
  if (count == 0) return;
  StridedRuns runs(shape, dst_strides);
  if (!accumulate) return detail::scatter<false>(runs, count, src, dst);
  if constexpr (std::floating_point<T>) {
    if (detail::repeats(runs)) return detail::scatter_repeats(runs, count, src, dst);
    detail::scatter<true>(runs, count, src, dst);
  } else if constexpr (Narrow<T>) {
    in_float([](const auto&... a) { scatter_strided(a...); }, device, shape, reads(src, count),
             writes(dst, extent(shape, dst_strides), /*keep=*/true), dst_strides, true);
  } else {
    fail<UsageError>("scatter_strided: cannot accumulate ", dtype<T>);
  }
}

}  // namespace chorus::kernels
