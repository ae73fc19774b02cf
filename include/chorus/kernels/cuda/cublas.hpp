#pragma once
/// cuBLASLt: descriptors and cached algorithms of matrix products.

#include <cublasLt.h>

#include <array>
#include <chorus/core/cuda/stream.hpp>
#include <chorus/kernels/cuda/plan_log.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace chorus::kernels::cuda {

/// Throws DeviceError with the call, its error and the source location.
inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS) [[unlikely]] {
    chorus::cuda::forget_error();
    fail<DeviceError>("cuBLASLt: ", call, " failed: ", cublasLtGetStatusString(status), ", at ",
                      chorus::cuda::detail::short_path(file), ":", line);
  }
  chorus::cuda::check_left_over(call, file, line);
}
#define CHORUS_CUBLAS_CHECK(...) ::chorus::kernels::cuda::check_cublas(__VA_ARGS__, #__VA_ARGS__, __FILE__, __LINE__)

template <class T>
inline constexpr cudaDataType_t cuda_type = CUDA_R_32F;
template <>
inline constexpr cudaDataType_t cuda_type<double> = CUDA_R_64F;
template <>
inline constexpr cudaDataType_t cuda_type<bf16> = CUDA_R_16BF;
template <>
inline constexpr cudaDataType_t cuda_type<half> = CUDA_R_16F;

/// The cuBLASLt plan of a product or a stack of products. Row-major C = A B is column-major Cᵀ = Bᵀ Aᵀ: cuBLASLt's A is
/// our B.
class GemmPlan {
 public:
  GemmPlan(cublasLtHandle_t handle, const GemmProblem& problem, cudaDataType_t type, cudaDataType_t out,
           const void* vector)
      : epilogue_(problem.epilogue) {
    const bool exact = type == CUDA_R_64F;
    const cublasComputeType_t compute = exact                                ? CUBLAS_COMPUTE_64F
                                        : type == CUDA_R_32F && problem.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                             : CUBLAS_COMPUTE_32F;
    CHORUS_CUBLAS_CHECK(cublasLtMatmulDescCreate(&operation_, compute, exact ? CUDA_R_64F : CUDA_R_32F));
    const cublasOperation_t left = problem.tb == Trans::yes ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t right = problem.ta == Trans::yes ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, left);
    set(CUBLASLT_MATMUL_DESC_TRANSB, right);
    if (problem.epilogue != Epilogue::none) {
      const bool sums = problem.epilogue == Epilogue::sums;  // our A is its B
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, sums ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BIAS);
      if (!sums && out != type) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);  // else that of the result
      set_vector(vector);
    }
    layout(&a_, type, problem.n, problem.k, problem.ldb, left);
    layout(&b_, type, problem.k, problem.m, problem.lda, right);
    layout(&c_, out, problem.n, problem.m, problem.ldc, CUBLAS_OP_N);
    if (problem.count > 1) {
      stack(a_, problem.count, problem.stride_b);
      stack(b_, problem.count, problem.stride_a);
      stack(c_, problem.count, problem.stride_c);
    }

    cublasLtMatmulPreference_t preference = nullptr;
    CHORUS_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, void (*)(cublasLtMatmulPreference_t)> owner(
        preference, [](cublasLtMatmulPreference_t p) { cublasLtMatmulPreferenceDestroy(p); });
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) {
      CHORUS_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::size_t{32} << 20);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(problem.align_b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(problem.align_a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(problem.align_c));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(problem.align_c));
    if (type == CUDA_R_16F || type == CUDA_R_16BF)  // partial sums stay in float
      prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
             static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, operation_, a_, b_, c_, c_, preference, 1, &choice_, &found);
    // For an epilogue that a type does not support, some versions return "invalid value".
    const bool refused = problem.epilogue != Epilogue::none && status == CUBLAS_STATUS_INVALID_VALUE;
    if (status != CUBLAS_STATUS_NOT_SUPPORTED && !refused) CHORUS_CUBLAS_CHECK(status);
    if (status != CUBLAS_STATUS_SUCCESS) chorus::cuda::forget_error();
    usable_ = status == CUBLAS_STATUS_SUCCESS && found > 0 && choice_.state == CUBLAS_STATUS_SUCCESS;
  }
  GemmPlan(const GemmPlan&) = delete;
  GemmPlan& operator=(const GemmPlan&) = delete;
  ~GemmPlan() {
    for (const cublasLtMatrixLayout_t layout : {a_, b_, c_})
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    if (operation_ != nullptr) cublasLtMatmulDescDestroy(operation_);
  }

  /// False if cuBLASLt has no algorithm for the problem.
  bool usable() const { return usable_; }
  std::size_t workspace_bytes() const { return choice_.workspaceSize; }
  /// The name of the algorithm.
  std::string text() const {
    if (!usable_)
      return cat("cuBLASLt has no algorithm for it; ",
                 epilogue_ == Epilogue::sums ? "a separate kernel computes the sums" : "a plain kernel");
    const auto number = [this](cublasLtMatmulAlgoConfigAttributes_t name) {
      std::uint32_t value = 0;
      std::size_t bytes = 0;
      CHORUS_CUBLAS_CHECK(cublasLtMatmulAlgoConfigGetAttribute(&choice_.algo, name, &value, sizeof value, &bytes));
      return value;
    };
    return cat("cuBLASLt's algorithm ", number(CUBLASLT_ALGO_CONFIG_ID), ", tile ",
               number(CUBLASLT_ALGO_CONFIG_TILE_ID), ", stages ", number(CUBLASLT_ALGO_CONFIG_STAGES_ID), ", split k ",
               number(CUBLASLT_ALGO_CONFIG_SPLITK_NUM), ", workspace ", workspace_bytes(), " bytes");
  }
  /// The address of the bias, or of the sums.
  void set_vector(const void* vector) { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector); }

  /// c = scale a b, or c += with `accumulate`. `Scale` is float, or double for doubles.
  template <class Scale>
  void run(cublasLtHandle_t handle, Scale scale, const void* a, const void* b, void* c, bool accumulate,
           void* workspace, cudaStream_t stream) const {
    const Scale alpha = scale, beta = accumulate ? 1 : 0;
    CHORUS_CUBLAS_CHECK(cublasLtMatmul(handle, operation_, &alpha, b, a_, a, b_, &beta, c, c_, c, c_, &choice_.algo,
                                       workspace, choice_.workspaceSize, stream));
  }

 private:
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t name, const Value& value) {
    CHORUS_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation_, name, &value, sizeof value));
  }
  // The layout of an operand that is [rows, columns] after `operation`.
  static void layout(cublasLtMatrixLayout_t* out, cudaDataType_t type, Index rows, Index columns, Index pitch,
                     cublasOperation_t operation) {
    if (operation == CUBLAS_OP_T) std::swap(rows, columns);
    CHORUS_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(out, type, static_cast<std::uint64_t>(rows),
                                                   static_cast<std::uint64_t>(columns), pitch));
  }
  static void stack(cublasLtMatrixLayout_t layout, Index count, Index stride) {
    const auto say = [&](cublasLtMatrixLayoutAttribute_t name, const auto& value) {
      CHORUS_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, name, &value, sizeof value));
    };
    say(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(count));
    say(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, static_cast<std::int64_t>(stride));
  }

  Epilogue epilogue_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_{};
  bool usable_ = false;
};

/// A device's handle and plans. Never destroyed, since the driver may be unloaded first.
struct CublasContext {
  std::mutex mutex;
  cublasLtHandle_t handle = nullptr;
  std::map<PlanKey, std::unique_ptr<GemmPlan>> plans;

  static CublasContext& of(Cuda device) {
    chorus::cuda::require(device);
    static auto& all = *new std::array<CublasContext, Cuda::max_devices>;
    return all[static_cast<std::size_t>(device.index)];
  }
  /// The caller holds `mutex`, and the device is current. Throws as `require_eager`.
  GemmPlan& plan(Cuda device, const GemmProblem& problem, cudaDataType_t type, cudaDataType_t out,
                 const void* vector) {
    if (handle == nullptr) CHORUS_CUBLAS_CHECK(cublasLtCreate(&handle));
    auto& plan = plans[problem.key()];
    if (plan) return *plan;
    require_eager(device, problem);
    plan = std::make_unique<GemmPlan>(handle, problem, type, out, vector);
    log_plan(device, problem, [&] { return plan->text(); });
    return *plan;
  }
};

}  // namespace chorus::kernels::cuda
