#pragma once
/// Element-wise functors over bf16 and half on the CPU, computed in float.

#include <algorithm>
#include <array>
#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/kernels/strided_runs.hpp>
#include <chorus/tensor/shape.hpp>
#include <span>
#include <utility>

namespace chorus::kernels {

namespace detail {
inline constexpr Index narrow_block = 512;
}  // namespace detail

template <class F, Narrow T, std::size_t N>
void pointwise_forward(Cpu device, const F& f, Index count, const std::array<const T*, N>& in, T* out) {
  using namespace detail;
  parallel_ranges(count, narrow_block, thread_elements, [&](Index first, Index elements) {
    alignas(64) float buffers[N + 1][narrow_block];
    std::array<const float*, N> pointers;
    std::copy_n(buffers, N, pointers.begin());
    for (Index start = first; start < first + elements; start += narrow_block) {
      const Index n = std::min(narrow_block, first + elements - start);
      for (std::size_t k = 0; k < N; ++k) convert_array(n, in[k] + start, buffers[k]);
      pointwise_forward(device, f, n, pointers, buffers[N]);
      convert_array(n, buffers[N], out + start);
    }
  });
}

template <class F, Narrow T, std::size_t N>
void pointwise_backward(Cpu device, const F& f, Index count, const std::array<const T*, N>& in, const T* dy,
                        const std::array<T*, N>& dx, const std::array<bool, N>& accumulate) {
  using namespace detail;
  constexpr bool linear = requires { requires F::linear; };  // the derivatives don't depend on the inputs
  parallel_ranges(count, narrow_block, thread_elements, [&](Index first, Index elements) {
    alignas(64) float buffers[N][narrow_block], grads[N][narrow_block], gradient[narrow_block];
    std::array<const float*, N> pointers;
    std::array<float*, N> grad_pointers;
    for (std::size_t k = 0; k < N; ++k) {
      pointers[k] = buffers[k];
      if (linear) std::fill_n(buffers[k], narrow_block, 0.0f);
      grad_pointers[k] = dx[k] == nullptr ? nullptr : grads[k];
    }
    for (Index start = first; start < first + elements; start += narrow_block) {
      const Index n = std::min(narrow_block, first + elements - start);
      convert_array(n, dy + start, gradient);
      for (std::size_t k = 0; k < N; ++k) {
        if (!linear) convert_array(n, in[k] + start, buffers[k]);
        if (dx[k] != nullptr && accumulate[k]) convert_array(n, dx[k] + start, grads[k]);
      }
      pointwise_backward(device, f, n, pointers, static_cast<const float*>(gradient), grad_pointers, accumulate);
      for (std::size_t k = 0; k < N; ++k)
        if (dx[k] != nullptr) convert_array(n, grads[k], dx[k] + start);
    }
  });
}

/// With broadcasting, whole arrays are converted.
template <class F, Narrow T, std::size_t N>
void pointwise_forward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                       const std::array<std::span<const Index>, N>& in_strides, T* out) {
  const Index count = numel(shape);
  if (count == 0) return;
  const auto run = [&]<std::size_t... K>(std::index_sequence<K...>) {
    in_float(
        [&](Cpu, float* result, auto*... arrays) {
          pointwise_forward(device, f, shape, std::array<const float*, N>{arrays...}, in_strides, result);
        },
        device, writes(out, count), reads(in[K], extent(shape, in_strides[K]))...);
  };
  run(std::make_index_sequence<N>());
}

/// The same; sums over repeated axes are rounded only at the end.
template <class F, Narrow T, std::size_t N>
void pointwise_backward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                        const std::array<std::span<const Index>, N>& in_strides, const T* dy,
                        const std::array<T*, N>& dx, const std::array<std::span<const Index>, N>& dx_strides,
                        const std::array<bool, N>& accumulate) {
  const Index count = numel(shape);
  if (count == 0) {
    for (std::size_t k = 0; k < N; ++k) {
      Index own = 1;
      for (std::size_t axis = 0; axis < shape.size(); ++axis) own *= dx_strides[k][axis] == 0 ? 1 : shape[axis];
      if (dx[k] != nullptr && !accumulate[k]) fill(device, own, dx[k], T{});
    }
    return;
  }
  const auto run = [&]<std::size_t... K>(std::index_sequence<K...>) {
    in_float(
        [&](Cpu, const float* gradient, auto*... arrays) {
          const std::array<float*, 2 * N> all{arrays...};
          std::array<const float*, N> inputs;
          std::array<float*, N> grads;
          std::copy_n(all.begin(), N, inputs.begin());
          std::copy_n(all.begin() + N, N, grads.begin());
          pointwise_backward(device, f, shape, inputs, in_strides, gradient, grads, dx_strides, accumulate);
        },
        device, reads(dy, count), reads(in[K], extent(shape, in_strides[K]))...,
        writes(dx[K], extent(shape, dx_strides[K]), accumulate[K])...);
  };
  run(std::make_index_sequence<N>());
}

}  // namespace chorus::kernels
