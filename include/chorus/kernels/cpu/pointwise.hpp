#pragma once
/// Element-wise functors on the CPU. A functor is compiled once for forward and once for backward; for broadcasting,
/// blocks are gathered first.

#include <array>
#include <chorus/autograd/functor_gradient.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/copy.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/functors.hpp>
#include <chorus/kernels/pack.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/kernels/strided_runs.hpp>
#include <chorus/tensor/shape.hpp>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

namespace chorus::kernels {

namespace detail {

// GCC would clone the functions below for the tail, whose count is constant, and round sums of products differently.
#ifdef __clang__
#define CHORUS_ONE_COPY [[gnu::noinline]]
#else
#define CHORUS_ONE_COPY [[gnu::noinline, gnu::noclone]]
#endif

/// Whole Packs only: `count` is a multiple of the width.
template <class F, class T, std::size_t... K>
CHORUS_ONE_COPY void forward_packs(const F& f, Index count, const std::array<const T*, sizeof...(K)>& in_pointers,
                                   T* out, std::index_sequence<K...>) {
  const F function = f;
  const auto in = in_pointers;
  for (Index i = 0; i < count; i += Pack<T>::width) {
    const Pack<T> y = function(Pack<T>::load(in[K] + i)...);
    y.store(out + i);
  }
}

template <class F, class T, std::size_t... K>
CHORUS_ONE_COPY void backward_packs(const F& f, Index count, const std::array<const T*, sizeof...(K)>& in_pointers,
                                    const T* dy, const std::array<T*, sizeof...(K)>& dx_pointers,
                                    const std::array<bool, sizeof...(K)>& accumulate_flags,
                                    std::index_sequence<K...>) {
  const F function = f;
  const auto in = in_pointers;
  const auto dx = dx_pointers;
  const auto accumulate = accumulate_flags;
  const auto put = [](T* to, const Pack<T>& value, bool add) {
    if (to == nullptr) return;
    if (add)
      (Pack<T>::load(to) + value).store(to);
    else
      value.store(to);
  };
  for (Index i = 0; i < count; i += Pack<T>::width) {
    const auto partials = math::gradient(function, Pack<T>::load(dy + i), Pack<T>::load(in[K] + i)...);
    (put(dx[K] == nullptr ? nullptr : dx[K] + i, partials.d[K], accumulate[K]), ...);
  }
}

#undef CHORUS_ONE_COPY

inline constexpr Index block_elements = 512;

template <std::size_t N>
std::array<StridedRuns, N> runs_of(std::span<const Index> shape, const std::array<std::span<const Index>, N>& strides) {
  return [&]<std::size_t... k>(std::index_sequence<k...>) {
    return std::array<StridedRuns, N>{StridedRuns(shape, strides[k])...};
  }
  (std::make_index_sequence<N>());
}

/// The next `count` elements of a strided array: in place if contiguous, else gathered in `buffer`.
template <class T>
const T* neighbours(StridedRuns& runs, Index count, const T* from, T* buffer) {
  if (const auto first = runs.neighbours(count)) return from + *first;
  gather(runs, count, from, buffer);
  return buffer;
}

/// The outermost axis along which no gradient is summed; threads split this axis. Blocks hold whole entries of it, or
/// lie within one, so that the order of sums does not depend on the split.
template <class T, std::size_t N>
class UnsummedAxis {
 public:
  UnsummedAxis(std::span<const Index> shape, const std::array<T*, N>& dx,
               const std::array<std::span<const Index>, N>& dx_strides) {
    std::size_t axis = 0;
    const auto sums = [&] {
      for (std::size_t k = 0; k < N; ++k)
        if (dx[k] != nullptr && dx_strides[k][axis] == 0) return true;
      return false;
    };
    for (; axis < shape.size() && (shape[axis] == 1 || sums()); ++axis) outer_ *= shape[axis];
    inner_ = numel(shape) / outer_;
    if (axis == shape.size()) {  // none: everything is one entry
      inner_ = outer_;
      outer_ = 1;
    } else {
      size_ = shape[axis];
      inner_ /= size_;
    }
  }

  /// The number of elements in the block that starts at `start`.
  Index block(Index start, Index end) const {
    if (inner_ > block_elements) return std::min({block_elements, inner_ - start % inner_, end - start});
    return std::min(block_elements / inner_ * inner_, end - start);
  }

  /// Calls `f(begin, end)` for ranges of all elements.
  template <class F>
  void for_ranges(Index count, const F& f) const {
    constexpr Index least_in_a_row = 256;  // per range, so that seeking its start costs little
    const Index least = std::max(thread_elements / (outer_ * inner_), least_in_a_row / inner_) + 1;
    const auto range = [&](Index first, Index n) {
      if (n == size_) return f(Index{0}, count);
      for (Index o = 0; o < outer_; ++o) f((o * size_ + first) * inner_, (o * size_ + first + n) * inner_);
    };
    parallel_ranges(size_, 1, least, range, /*most=*/1);
  }

 private:
  Index outer_ = 1, size_ = 1, inner_ = 1;
};

}  // namespace detail

template <class F, class T, std::size_t N>
void pointwise_forward(Cpu, const F& f, Index count, const std::array<const T*, N>& in, T* out) {
  constexpr std::make_index_sequence<N> each;
  const Index whole = count / Pack<T>::width * Pack<T>::width, tail = count - whole;
  parallel_ranges(whole, Pack<T>::width, thread_elements, [&](Index first, Index n) {
    auto from = in;
    for (auto& pointer : from) pointer += first;
    detail::forward_packs(f, n, from, out + first, each);
  });
  if (tail == 0) return;
  // The tail is padded to one Pack, so that an element's result does not depend on its position.
  const std::size_t bytes = static_cast<std::size_t>(tail) * sizeof(T);
  Pack<T> padded[N + 1];
  std::array<const T*, N> pointers;
  for (std::size_t k = 0; k < N; ++k) {
    padded[k] = Pack<T>(0);
    std::memcpy(padded[k].v, in[k] + whole, bytes);
    pointers[k] = padded[k].v;
  }
  detail::forward_packs(f, Pack<T>::width, pointers, padded[N].v, each);
  std::memcpy(out + whole, padded[N].v, bytes);
}

template <class F, class T, std::size_t N>
void pointwise_backward(Cpu, const F& f, Index count, const std::array<const T*, N>& in, const T* dy,
                        const std::array<T*, N>& dx, const std::array<bool, N>& accumulate) {
  constexpr std::make_index_sequence<N> each;
  const Index whole = count / Pack<T>::width * Pack<T>::width, tail = count - whole;
  parallel_ranges(whole, Pack<T>::width, thread_elements, [&](Index first, Index n) {
    auto from = in;
    auto to = dx;
    for (auto& pointer : from) pointer += first;
    for (auto& pointer : to)
      if (pointer != nullptr) pointer += first;
    detail::backward_packs(f, n, from, dy + first, to, accumulate, each);
  });
  if (tail == 0) return;
  const std::size_t bytes = static_cast<std::size_t>(tail) * sizeof(T);
  Pack<T> padded[N], padded_dy(0), padded_dx[N];
  std::array<const T*, N> pointers;
  std::array<T*, N> dx_pointers;
  std::memcpy(padded_dy.v, dy + whole, bytes);
  for (std::size_t k = 0; k < N; ++k) {
    padded[k] = padded_dx[k] = Pack<T>(0);
    std::memcpy(padded[k].v, in[k] + whole, bytes);
    pointers[k] = padded[k].v;
    dx_pointers[k] = dx[k] == nullptr ? nullptr : padded_dx[k].v;
    if (dx[k] != nullptr && accumulate[k]) std::memcpy(padded_dx[k].v, dx[k] + whole, bytes);
  }
  detail::backward_packs(f, Pack<T>::width, pointers, padded_dy.v, dx_pointers, accumulate, each);
  for (std::size_t k = 0; k < N; ++k)
    if (dx[k] != nullptr) std::memcpy(dx[k] + whole, padded_dx[k].v, bytes);
}

template <class F, class T, std::size_t N>
void pointwise_forward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                       const std::array<std::span<const Index>, N>& in_strides, T* out) {
  const auto runs = detail::runs_of(shape, in_strides);
  const Index count = numel(shape);
  bool all_dense = true;
  for (const auto& r : runs) all_dense = all_dense && r.contiguous();
  if (all_dense) return pointwise_forward(device, f, count, in, out);

  parallel_ranges(count, detail::block_elements, thread_elements, [&](Index first, Index elements) {
    alignas(64) T buffers[N][detail::block_elements];
    auto own = runs;
    for (auto& r : own) r.go_to(first);
    for (Index start = first, n = 0; start < first + elements; start += n) {
      n = std::min(detail::block_elements, first + elements - start);
      for (const auto& r : own) n = std::min(n, r.left_of_long_run(n));
      std::array<const T*, N> pointers;
      for (std::size_t k = 0; k < N; ++k) pointers[k] = detail::neighbours(own[k], n, in[k], buffers[k]);
      pointwise_forward(device, f, n, pointers, out + start);
    }
  });
}

template <class F, class T, std::size_t N>
void pointwise_backward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                        const std::array<std::span<const Index>, N>& in_strides, const T* dy,
                        const std::array<T*, N>& dx, const std::array<std::span<const Index>, N>& dx_strides,
                        const std::array<bool, N>& accumulate) {
  const auto in_runs = detail::runs_of(shape, in_strides), dx_runs = detail::runs_of(shape, dx_strides);
  const Index count = numel(shape);
  bool all_dense = true;
  auto add = accumulate;
  for (std::size_t k = 0; k < N; ++k) {
    all_dense = all_dense && in_runs[k].contiguous() && (dx[k] == nullptr || dx_runs[k].contiguous());
    if (dx[k] == nullptr || add[k]) continue;
    // Sums start from zero.
    Index own = 1;
    bool sums = false;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      if (dx_strides[k][axis] != 0) own *= shape[axis];
      sums = sums || (dx_strides[k][axis] == 0 && shape[axis] != 1);
    }
    if (sums) {
      fill(device, own, dx[k], T{0});
      add[k] = true;
    }
  }
  if (count == 0) return;
  if (all_dense) return pointwise_backward(device, f, count, in, dy, dx, add);

  constexpr bool linear = requires { requires F::linear; };
  const detail::UnsummedAxis<T, N> axis(shape, dx, dx_strides);
  const auto go_back = [&](Index begin, Index end) {
    alignas(64) T buffers[N][detail::block_elements], dx_buffers[N][detail::block_elements];
    auto from = in_runs, to = dx_runs;
    for (auto& r : from) r.go_to(begin);
    for (auto& r : to) r.go_to(begin);
    for (Index start = begin, n = 0; start < end; start += n) {
      n = axis.block(start, end);
      for (std::size_t k = 0; k < N; ++k)
        n = std::min({n, from[k].left_of_long_run(n), dx[k] == nullptr ? n : to[k].left_of_long_run(n)});
      std::array<const T*, N> pointers;
      std::array<T*, N> dx_pointers;
      std::array<bool, N> add_now;
      for (std::size_t k = 0; k < N; ++k) {
        // A linear functor's gradient reads no input.
        pointers[k] = linear ? dy + start : detail::neighbours(from[k], n, in[k], buffers[k]);
        const auto direct = dx[k] == nullptr ? std::nullopt : to[k].neighbours(n);
        dx_pointers[k] = dx[k] == nullptr ? nullptr : direct ? dx[k] + *direct : dx_buffers[k];
        add_now[k] = direct && add[k];
      }
      pointwise_backward(device, f, n, pointers, dy + start, dx_pointers, add_now);
      for (std::size_t k = 0; k < N; ++k) {
        if (dx_pointers[k] != dx_buffers[k]) continue;
        if (add[k])
          detail::scatter<true>(to[k], n, dx_buffers[k], dx[k]);
        else
          detail::scatter<false>(to[k], n, dx_buffers[k], dx[k]);
      }
    }
  };
  axis.for_ranges(count, go_back);
}

}  // namespace chorus::kernels
