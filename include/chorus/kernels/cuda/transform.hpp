#pragma once
/// Element-wise functions of any scalar types on GPUs.

#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/transform.hpp>

namespace chorus::kernels {

namespace cuda {

template <class F, class Out, class A>
struct Transform1 {
  F f;
  Out* out;
  const A* a;
  __device__ void operator()(Index i) const { out[i] = static_cast<Out>(f(get(a, i))); }
};
template <class F, class Out, class A, class B>
struct Transform2 {
  F f;
  Out* out;
  const A* a;
  const B* b;
  __device__ void operator()(Index i) const { out[i] = static_cast<Out>(f(get(a, i), get(b, i))); }
};
template <class F, class Out, class A, class B, class C>
struct Transform3 {
  F f;
  Out* out;
  const A* a;
  const B* b;
  const C* c;
  __device__ void operator()(Index i) const { out[i] = static_cast<Out>(f(get(a, i), get(b, i), get(c, i))); }
};

}  // namespace cuda

template <class F, Scalar Out, Scalar A>
void transform(Cuda device, const F& f, Index count, Out* out, const A* a) {
  cuda::for_each(device, "transform", count, cuda::Transform1<F, Out, A>{f, out, a});
}
template <class F, Scalar Out, Scalar A, Scalar B>
void transform(Cuda device, const F& f, Index count, Out* out, const A* a, const B* b) {
  cuda::for_each(device, "transform", count, cuda::Transform2<F, Out, A, B>{f, out, a, b});
}
template <class F, Scalar Out, Scalar A, Scalar B, Scalar C>
void transform(Cuda device, const F& f, Index count, Out* out, const A* a, const B* b, const C* c) {
  cuda::for_each(device, "transform", count, cuda::Transform3<F, Out, A, B, C>{f, out, a, b, c});
}

}  // namespace chorus::kernels
