#pragma once
/// Matrix products on GPUs: cuBLASLt, and a plain kernel for cases that it does not support.

#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cuda/cublas.hpp>
#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/cuda/precision.hpp>
#include <chorus/kernels/gemm.hpp>

namespace chorus::kernels {

namespace cuda {

/// One thread per element of c.
template <class T, class Out>
struct PlainGemm {
  GemmStack stack;
  compute_type<T> scale;
  bool ta, tb;
  Index m, n, k;
  const T* a;
  Index lda;
  const T* b;
  Index ldb;
  Out* c;
  Index ldc;
  bool accumulate;
  const T* bias;
  __device__ void operator()(Index i) const {
    const Index line = i / n, column = i - line * n, matrix = line / m, row = line - matrix * m;
    const T *left = a + matrix * stack.a, *right = b + matrix * stack.b;
    compute_type<T> sum = 0;
    for (Index p = 0; p < k; ++p)
      sum += get(left, ta ? p * lda + row : row * lda + p) * get(right, tb ? column * ldb + p : p * ldb + column);
    sum *= scale;
    if (bias != nullptr) sum += get(bias, column);
    put(c, matrix * stack.c + row * ldc + column, sum, accumulate);
  }
};

template <class T, class Out>
struct AddBias {
  Index n, ldc;
  Out* c;
  const T* bias;
  __device__ void operator()(Index i) const {
    const Index row = i / n, column = i - row * n;
    put(c, row * ldc + column, get(bias, column), true);
  }
};

/// `vector`: the bias, or the place of the sums. Returns false if cuBLASLt has no algorithm.
template <class T, class Out>
bool cublas_gemm(Cuda device, const GemmProblem& problem, double scale, const T* a, const T* b, Out* c, bool accumulate,
                 const void* vector) {
  using Scale = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const DeviceGuard guard(device);
  auto& context = CublasContext::of(device);
  const std::lock_guard lock(context.mutex);
  GemmPlan& plan = context.plan(device, problem, cuda_type<T>, cuda_type<Out>, vector);
  if (!plan.usable()) return false;
  if (problem.epilogue != Epilogue::none) plan.set_vector(vector);
  const Scratch<std::byte> workspace(device, static_cast<Index>(plan.workspace_bytes()));
  plan.run<Scale>(context.handle, static_cast<Scale>(scale), a, b, c, accumulate, workspace.data(),
                  chorus::cuda::current_stream(device));
  return true;
}

/// All products of a stack in one call, each with the bias unless it is null.
template <class T, class Out>
void gemm_at_once(Cuda device, const GemmStack& stack, double scale, Trans ta, Trans tb, Index m, Index n, Index k,
                  const T* a, Index lda, const T* b, Index ldb, Out* c, Index ldc, bool accumulate, const T* bias,
                  const char* name = "matrix product") {
  // The common alignment of a stack's matrices.
  const auto alignment = [&stack](const auto* first, Index stride) {
    return std::min(alignment_of(first), stack.count > 1 ? alignment_of(first + stride) : alignment_of(nullptr));
  };
  GemmProblem problem{dtype<T>,
                      ta,
                      tb,
                      m,
                      n,
                      k,
                      lda,
                      ldb,
                      ldc,
                      bias != nullptr ? Epilogue::bias : Epilogue::none,
                      tf32_allowed(),
                      alignment(a, stack.a),
                      alignment(b, stack.b),
                      std::min(alignment(c, stack.c), alignment_of(bias)),
                      stack.count,
                      stack.a,
                      stack.b,
                      stack.c,
                      dtype<Out>};
  const Index rows = stack.count * m;
  if (k > 0) {
    if (cublas_gemm(device, problem, scale, a, b, c, accumulate, bias)) return;
    problem.epilogue = Epilogue::none;
    if (bias != nullptr && cublas_gemm<T, Out>(device, problem, scale, a, b, c, accumulate, nullptr)) {
      for_each(device, "bias of a matrix product", rows * n, AddBias<T, Out>{n, ldc, c, bias});
      return;
    }
  }
  for_each(device, name, rows * n,
           PlainGemm<T, Out>{stack, static_cast<compute_type<T>>(scale), ta == Trans::yes, tb == Trans::yes, m, n, k, a,
                             lda, b, ldb, c, ldc, accumulate, bias});
}

}  // namespace cuda

template <Real T, SumOf<T> Out>
void gemm(Cuda device, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb,
          Out* c, Index ldc, bool accumulate, const T* bias_n = nullptr) {
  if (m == 0 || n == 0) return;
  cuda::gemm_at_once(device, {}, 1, ta, tb, m, n, k, a, lda, b, ldb, c, ldc, accumulate, bias_n);
}

/// c = op(a) op(b), or c += with `accumulate`; and sums: [m], of each row of op(a), or sums += with `add_sums`. One
/// call reads `a` once. Returns false and does nothing if cuBLASLt has no algorithm for both together.
template <Real T, SumOf<T> Out>
bool gemm_with_sums(Cuda device, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b,
                    Index ldb, Out* c, Index ldc, bool accumulate, Out* sums, bool add_sums) {
  using cuda::alignment_of;
  if (m == 0 || n == 0 || k == 0) return false;
  const cuda::Scratch<Out> made(device, add_sums ? m : 0);  // cuBLASLt overwrites
  Out* const to = add_sums ? made.data() : sums;
  cuda::GemmProblem problem{dtype<T>, ta, tb, m, n, k, lda, ldb, ldc, cuda::Epilogue::sums, tf32_allowed(),
                            alignment_of(a), alignment_of(b), std::min(alignment_of(c), alignment_of(to))};
  problem.out = dtype<Out>;
  if (!cuda::cublas_gemm(device, problem, 1, a, b, c, accumulate, static_cast<const void*>(to))) return false;
  if (add_sums) kernels::axpy(device, m, static_cast<Out>(1.0f), static_cast<const Out*>(to), sums);
  return true;
}

/// A stack's products, times `scale`; `name` is for errors. At most 65,535 matrices per launch, the limit of a grid's
/// last axes.
template <Real T>
void gemm_stack(Cuda device, const GemmStack& stack, Trans ta, Trans tb, Index m, Index n, Index k, const T* a,
                Index lda, const T* b, Index ldb, T* c, Index ldc, bool accumulate, double scale = 1,
                const char* name = "matrix product") {
  constexpr Index most = 65535;
  if (m == 0 || n == 0) return;
  for (Index i = 0; i < stack.count; i += most) {
    auto some = stack;
    some.count = std::min(most, stack.count - i);
    if (some.count == 1) some = {};
    cuda::gemm_at_once<T, T>(device, some, scale, ta, tb, m, n, k, a + i * stack.a, lda, b + i * stack.b, ldb,
                          c + i * stack.c, ldc, accumulate, nullptr, name);
  }
}

}  // namespace chorus::kernels
