#pragma once
/// Matrix products on GPUs: cuBLASLt, and a plain kernel for what it doesn't do.

#include <chorus/kernels/cuda/cublas.hpp>
#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/cuda/precision.hpp>
#include <chorus/kernels/gemm.hpp>

namespace chorus::kernels {

namespace cuda {

/// One element of c a thread.
template <class T>
struct PlainGemm {
  bool ta, tb;
  Index n, k;
  const T* a;
  Index lda;
  const T* b;
  Index ldb;
  T* c;
  Index ldc;
  bool accumulate;
  const T* bias;
  __device__ void operator()(Index i) const {
    const Index row = i / n, column = i - row * n;
    compute_type<T> sum = bias != nullptr ? get(bias, column) : compute_type<T>(0);
    for (Index p = 0; p < k; ++p)
      sum += get(a, ta ? p * lda + row : row * lda + p) * get(b, tb ? column * ldb + p : p * ldb + column);
    put(c, row * ldc + column, sum, accumulate);
  }
};

template <class T>
struct AddBias {
  Index n, ldc;
  T* c;
  const T* bias;
  __device__ void operator()(Index i) const {
    const Index row = i / n, column = i - row * n;
    put(c, row * ldc + column, get(bias, column), true);
  }
};

/// False where cuBLASLt has no algorithm for it.
template <class T>
bool cublas_gemm(Cuda device, const GemmProblem& problem, const T* a, const T* b, T* c, bool accumulate,
                 const T* bias) {
  using Scale = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const DeviceGuard guard(device);
  auto& context = CublasContext::of(device);
  const std::lock_guard lock(context.mutex);
  GemmPlan& plan = context.plan(problem, cuda_type<T>, bias);
  if (!plan.usable()) return false;
  if (problem.bias) plan.set_bias(bias);
  const Scratch<std::byte> workspace(device, static_cast<Index>(plan.workspace_bytes()));
  plan.run<Scale>(context.handle, a, b, c, accumulate, workspace.data(), chorus::cuda::current_stream(device));
  return true;
}

}  // namespace cuda

template <Real T>
void gemm(Cuda device, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb,
          T* c, Index ldc, bool accumulate, const T* bias_n = nullptr) {
  if (m == 0 || n == 0) return;
  const int align_c = std::min(cuda::alignment_of(c), cuda::alignment_of(bias_n));
  cuda::GemmProblem problem{dtype<T>,
                            ta,
                            tb,
                            m,
                            n,
                            k,
                            lda,
                            ldb,
                            ldc,
                            bias_n != nullptr,
                            tf32_allowed(),
                            cuda::alignment_of(a),
                            cuda::alignment_of(b),
                            align_c};
  if (k > 0) {
    if (cuda::cublas_gemm(device, problem, a, b, c, accumulate, bias_n)) return;
    problem.bias = false;
    if (bias_n != nullptr && cuda::cublas_gemm<T>(device, problem, a, b, c, accumulate, nullptr)) {
      cuda::for_each(device, "bias of a matrix product", m * n, cuda::AddBias<T>{n, ldc, c, bias_n});
      return;
    }
  }
  cuda::for_each(
      device, "matrix product", m * n,
      cuda::PlainGemm<T>{ta == Trans::yes, tb == Trans::yes, n, k, a, lda, b, ldb, c, ldc, accumulate, bias_n});
}

}  // namespace chorus::kernels
