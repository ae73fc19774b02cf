#pragma once
/// Element-wise functors on GPUs: one fused kernel in forward, one in backward. The functors are those of the CPU,
/// called with plain numbers (bf16 and half as float). Gradients of broadcast inputs are summed separately.

#include <array>
#include <chorus/autograd/functor_gradient.hpp>
#include <chorus/kernels/cuda/broadcast.hpp>
#include <chorus/kernels/functors.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/tensor/shape.hpp>
#include <optional>
#include <type_traits>
#include <utility>

namespace chorus::kernels {

namespace cuda {

/// f of plain numbers, passed as Duals without derivatives, so that argument-dependent lookup finds functions.
template <class C, class F, class... X>
__device__ C call(const F& f, X... x) {
  return f(Dual<C, 0>(x)...).value;
}

template <class F, class T, int... K>
__global__ void pointwise(const __grid_constant__ F f, Index count,
                          const __grid_constant__ Many<const T*, sizeof...(K)> in, T* out, bool vector,
                          std::integer_sequence<int, K...>) {
  using C = compute_type<T>;
  for_vectors<Vector<T>::width>(count, [&](Index i, int n) {
    const Vector<T> x[] = {load_vector(in.at[K] + i, n, vector)...};
    Vector<T> y;
#pragma unroll
    for (int l = 0; l < Vector<T>::width; ++l) y.v[l] = static_cast<T>(call<C>(f, static_cast<C>(x[K].v[l])...));
    store_vector(out + i, y, n, vector);
  });
}

template <class T>
__device__ void put_vector(T* to, Index i, const compute_type<T> (&value)[Vector<T>::width], bool accumulate, int n,
                           bool vector) {
  if (to == nullptr) return;
  Vector<T> out;
  if (accumulate) out = load_vector(to + i, n, vector);
#pragma unroll
  for (int l = 0; l < Vector<T>::width; ++l)
    out.v[l] = static_cast<T>(accumulate ? static_cast<compute_type<T>>(out.v[l]) + value[l] : value[l]);
  store_vector(to + i, out, n, vector);
}

template <class F, class T, int... K>
__global__ void pointwise_gradient(const __grid_constant__ F f, Index count,
                                   const __grid_constant__ Many<const T*, sizeof...(K)> in, const T* dy,
                                   const __grid_constant__ Many<T*, sizeof...(K)> dx,
                                   const __grid_constant__ Many<bool, sizeof...(K)> accumulate, bool vector,
                                   std::integer_sequence<int, K...>) {
  using C = compute_type<T>;
  for_vectors<Vector<T>::width>(count, [&](Index i, int n) {
    const auto g = load_vector(dy + i, n, vector);
    const Vector<T> x[] = {load_vector(in.at[K] + i, n, vector)...};
    C d[sizeof...(K)][Vector<T>::width];
#pragma unroll
    for (int l = 0; l < Vector<T>::width; ++l) {
      const auto partials = math::gradient(f, static_cast<C>(g.v[l]), static_cast<C>(x[K].v[l])...);
      ((d[K][l] = partials.d[K]), ...);
    }
    (put_vector(dx.at[K], i, d[K], accumulate.at[K], n, vector), ...);
  });
}

template <class F, class T, int... K>
struct StridedPointwise {
  static constexpr int inputs = sizeof...(K);
  F f;
  StridedMap<inputs> map;
  Many<const T*, inputs> in;
  T* out;
  __device__ void operator()(Index i) const {
    using C = compute_type<T>;
    const auto offsets = map(i);
    put(out, i, call<C>(f, get(in.at[K], offsets.at[K])...));
  }
};

template <class F, class T, int... K>
struct StridedGradient {
  static constexpr int inputs = sizeof...(K);
  F f;
  StridedMap<2 * inputs> map;  // of the inputs, then of their gradients
  Many<const T*, inputs> in;
  const T* dy;
  Many<T*, inputs> dx;
  Many<bool, inputs> accumulate;
  __device__ void operator()(Index i) const {
    const auto offsets = map(i);
    const auto partials = math::gradient(f, get(dy, i), get(in.at[K], offsets.at[K])...);
    ((dx.at[K] != nullptr ? put(dx.at[K], offsets.at[K + inputs], partials.d[K], accumulate.at[K]) : void()), ...);
  }
};

template <std::size_t N, class Call>
void with_indices(const Call& call) {
  call(std::make_integer_sequence<int, static_cast<int>(N)>());
}

}  // namespace cuda

template <class F, class T, std::size_t N>
void pointwise_forward(Cuda device, const F& f, Index count, const std::array<const T*, N>& in, T* out) {
  static_assert(std::is_trivially_copyable_v<F>, "pointwise: expected a functor of plain values only for the GPU");
  if (count == 0) return;
  cuda::with_indices<N>([&]<int... K>(std::integer_sequence<int, K...> each) {
    cuda::launch(device, "pointwise", cuda::blocks_for(cuda::divide_up(count, cuda::Vector<T>::width)),
                 cuda::pointwise<F, T, K...>, f, count, cuda::Many<const T*, sizeof...(K)>{{in[K]...}}, out,
                 cuda::aligned(out, in[K]...), each);
  });
}

template <class F, class T, std::size_t N>
void pointwise_backward(Cuda device, const F& f, Index count, const std::array<const T*, N>& in, const T* dy,
                        const std::array<T*, N>& dx, const std::array<bool, N>& accumulate) {
  static_assert(std::is_trivially_copyable_v<F>, "pointwise: expected a functor of plain values only for the GPU");
  if (count == 0) return;
  cuda::with_indices<N>([&]<int... K>(std::integer_sequence<int, K...> each) {
    cuda::launch(device, "pointwise gradient", cuda::blocks_for(cuda::divide_up(count, cuda::Vector<T>::width)),
                 cuda::pointwise_gradient<F, T, K...>, f, count, cuda::Many<const T*, sizeof...(K)>{{in[K]...}}, dy,
                 cuda::Many<T*, sizeof...(K)>{{dx[K]...}}, cuda::Many<bool, sizeof...(K)>{{accumulate[K]...}},
                 cuda::aligned(dy, in[K]..., dx[K]...), each);
  });
}

template <class F, class T, std::size_t N>
void pointwise_forward(Cuda device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                       const std::array<std::span<const Index>, N>& in_strides, T* out) {
  static_assert(std::is_trivially_copyable_v<F>, "pointwise: expected a functor of plain values only for the GPU");
  cuda::with_indices<N>([&]<int... K>(std::integer_sequence<int, K...>) {
    cuda::for_each(device, "pointwise", numel(shape),
                   cuda::StridedPointwise<F, T, K...>{f, cuda::strided_map<N>(shape, in_strides),
                                                      cuda::Many<const T*, sizeof...(K)>{{in[K]...}}, out});
  });
}

template <class F, class T, std::size_t N>
void pointwise_backward(Cuda device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                        const std::array<std::span<const Index>, N>& in_strides, const T* dy,
                        const std::array<T*, N>& dx, const std::array<std::span<const Index>, N>& dx_strides,
                        const std::array<bool, N>& accumulate) {
  static_assert(std::is_trivially_copyable_v<F>, "pointwise: expected a functor of plain values only for the GPU");
  const Index count = numel(shape);
  std::array<Index, cuda::most_axes> dense{};
  Index step = 1;
  for (std::size_t axis = shape.size(); axis-- > 0; step *= shape[axis]) dense[axis] = step;

  // A gradient to be summed is first written in full, then summed.
  std::array<std::optional<cuda::Scratch<T>>, N> whole;
  std::array<T*, N> targets = dx;
  std::array<bool, N> add = accumulate;
  std::array<std::span<const Index>, 2 * N> strides;
  for (std::size_t k = 0; k < N; ++k) {
    strides[k] = in_strides[k];
    strides[N + k] = dx_strides[k];
    bool sums = count == 0;
    for (std::size_t axis = 0; axis < shape.size(); ++axis)
      sums = sums || (dx_strides[k][axis] == 0 && shape[axis] != 1);
    if (dx[k] == nullptr || !sums) continue;
    whole[k].emplace(device, count);
    targets[k] = whole[k]->data();
    add[k] = false;
    strides[N + k] = std::span<const Index>(dense.data(), shape.size());
  }
  cuda::with_indices<N>([&]<int... K>(std::integer_sequence<int, K...>) {
    cuda::for_each(device, "pointwise gradient", count,
                   cuda::StridedGradient<F, T, K...>{
                       f, cuda::strided_map<2 * N>(shape, strides), cuda::Many<const T*, sizeof...(K)>{{in[K]...}}, dy,
                       cuda::Many<T*, sizeof...(K)>{{targets[K]...}}, cuda::Many<bool, sizeof...(K)>{{add[K]...}}});
  });
  for (std::size_t k = 0; k < N; ++k)
    if (whole[k]) cuda::sum_broadcast(device, shape, whole[k]->data(), dx[k], dx_strides[k], accumulate[k]);
}

}  // namespace chorus::kernels
