#pragma once
// As much of cuBLASLt as chorus calls, computed on the CPU for floats, doubles, and bf16 whose product is float. It refuses
// other types, biases of doubles, and operands that are not aligned to 8 bytes, so that what stands behind it is tested, too.
#include <cstdint>
#include <cstring>

#include "cuda_runtime_api.h"

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77, CUBLAS_COMPUTE_64F = 70 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4, CUBLASLT_EPILOGUE_BGRADB = 512 };
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
};
enum cublasLtMatrixLayoutAttribute_t {
  CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
  CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2, CUBLASLT_REDUCTION_SCHEME_MASK = 7 };

struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  cublasOperation_t operation_a = CUBLAS_OP_N, operation_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  std::int32_t bias_type = -1;  ///< -1: that of the result
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType_t type;
  std::uint64_t rows, columns;
  std::int64_t pitch;
  std::int32_t count = 1;
  std::int64_t stride = 0;
};
struct cublasLtMatmulPreferenceOpaque_t {
  std::uint32_t alignment = 256, schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
};
struct cublasLtMatmulAlgo_t {};
enum cublasLtMatmulAlgoConfigAttributes_t {
  CUBLASLT_ALGO_CONFIG_ID = 0,
  CUBLASLT_ALGO_CONFIG_TILE_ID = 1,
  CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2,
  CUBLASLT_ALGO_CONFIG_STAGES_ID = 6,
};
inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*,
                                                           cublasLtMatmulAlgoConfigAttributes_t name, void* value,
                                                           std::size_t bytes, std::size_t* written) {
  const auto number = static_cast<std::uint32_t>(name) + 20;
  if (bytes != sizeof number) return CUBLAS_STATUS_INVALID_VALUE;
  return std::memcpy(value, &number, *written = bytes), CUBLAS_STATUS_SUCCESS;
}
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  std::size_t workspaceSize;
  cublasStatus_t state;
};
using cublasLtHandle_t = int*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;

inline const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_EXECUTION_FAILED ? "the function failed to launch on the GPU" : "not supported";
}
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return *handle = new int, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute, cudaDataType_t) {
  return *out = new cublasLtMatmulDescOpaque_t{compute}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return delete d, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t name,
                                                     const void* value, std::size_t bytes) {
  switch (name) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      std::memcpy(&d->operation_a, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
      std::memcpy(&d->operation_b, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      std::memcpy(&d->epilogue, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      std::memcpy(&d->bias, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      std::memcpy(&d->bias_type, value, bytes);
      break;
  }
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType_t type, std::uint64_t rows,
                                                 std::uint64_t columns, std::int64_t pitch) {
  return *out = new cublasLtMatrixLayoutOpaque_t{type, rows, columns, pitch}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t name,
                                                       const void* value, std::size_t bytes) {
  const bool counts = name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
  if (bytes != (counts ? sizeof l->count : sizeof l->stride)) return CUBLAS_STATUS_INVALID_VALUE;
  return std::memcpy(counts ? static_cast<void*>(&l->count) : &l->stride, value, bytes), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return delete l, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  return *out = new cublasLtMatmulPreferenceOpaque_t, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  return delete p, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                           cublasLtMatmulPreferenceAttributes_t name, const void* value,
                                                           std::size_t) {
  if (name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return CUBLAS_STATUS_SUCCESS;
  if (name == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
    return std::memcpy(&p->schemes, value, sizeof p->schemes), CUBLAS_STATUS_SUCCESS;
  std::uint32_t alignment = 0;
  std::memcpy(&alignment, value, sizeof alignment);
  if (alignment < p->alignment) p->alignment = alignment;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t c,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t p, int,
                                                     cublasLtMatmulHeuristicResult_t* out, int* found) {
  // As CUDA 13.3's, which do what a capture forbids.
  if (emulation::captures() > 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  const bool bias = d->epilogue != CUBLASLT_EPILOGUE_DEFAULT;
  const bool narrow = a->type == CUDA_R_16F || a->type == CUDA_R_16BF;
  if (narrow && p->schemes != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) {
    std::fprintf(stderr, "emulated cuBLASLt: partial sums of numbers of 2 bytes may be rounded\n");
    std::abort();
  }
  const bool widens = a->type == CUDA_R_16BF && c->type == CUDA_R_32F;
  if (p->alignment < 8 || (narrow && !widens)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (bias && a->type == CUDA_R_64F) return CUBLAS_STATUS_INVALID_VALUE;
  *out = {{}, 1024, CUBLAS_STATUS_SUCCESS};
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

namespace emulation {
struct Bf16 {
  std::uint16_t bits;
  operator double() const {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float number = 0;
    std::memcpy(&number, &wide, sizeof wide);
    return double{number};
  }
};

template <class In, class T>
void matmul(const cublasLtMatmulDescOpaque_t& d, const void* alpha, const void* a,
            const cublasLtMatrixLayoutOpaque_t& la, const void* b, const cublasLtMatrixLayoutOpaque_t& lb,
            const void* beta, void* c, const cublasLtMatrixLayoutOpaque_t& lc) {
  const bool ta = d.operation_a == CUBLAS_OP_T, tb = d.operation_b == CUBLAS_OP_T;
  const auto depth = static_cast<std::int64_t>(ta ? la.rows : la.columns);
  if (depth != static_cast<std::int64_t>(tb ? lb.columns : lb.rows) || (ta ? la.columns : la.rows) != lc.rows ||
      (tb ? lb.rows : lb.columns) != lc.columns || la.count != lc.count || lb.count != lc.count) {
    std::fprintf(stderr, "emulated cuBLASLt: layouts do not fit\n");
    std::abort();
  }
  const auto bias = [&d](std::int64_t i) {
    return d.bias_type == CUDA_R_16BF ? static_cast<T>(static_cast<double>(static_cast<const Bf16*>(d.bias)[i]))
                                      : static_cast<const T*>(d.bias)[i];
  };
  if (d.epilogue == CUBLASLT_EPILOGUE_BGRADB)
    for (std::int64_t j = 0; j < static_cast<std::int64_t>(lc.columns); ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < depth; ++p)
        sum += static_cast<double>(static_cast<const In*>(b)[tb ? p * lb.pitch + j : j * lb.pitch + p]);
      static_cast<T*>(const_cast<void*>(d.bias))[j] = static_cast<T>(sum);
    }
  for (std::int32_t matrix = 0; matrix < lc.count; ++matrix) {
    const In *x = static_cast<const In*>(a) + matrix * la.stride, *y = static_cast<const In*>(b) + matrix * lb.stride;
    T* z = static_cast<T*>(c) + matrix * lc.stride;
    for (std::int64_t j = 0; j < static_cast<std::int64_t>(lc.columns); ++j)
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(lc.rows); ++i) {
        double sum = 0;
        for (std::int64_t p = 0; p < depth; ++p)
          sum +=
              static_cast<double>(x[ta ? i * la.pitch + p : p * la.pitch + i]) *
              static_cast<double>(y[tb ? p * lb.pitch + j : j * lb.pitch + p]);
        T& out = z[j * lc.pitch + i];
        const T scaled = *static_cast<const T*>(beta) == 0 ? T{0} : *static_cast<const T*>(beta) * out;
        out = static_cast<T>(sum) * *static_cast<const T*>(alpha) + scaled;
        if (d.epilogue == CUBLASLT_EPILOGUE_BIAS) out += bias(i);
      }
  }
}
}  // namespace emulation

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t la, const void* b, cublasLtMatrixLayout_t lb,
                                     const void* beta, const void*, cublasLtMatrixLayout_t, void* c,
                                     cublasLtMatrixLayout_t lc, const cublasLtMatmulAlgo_t*, void*, std::size_t,
                                     cudaStream_t stream) {
  if (emulation::fails(emulation::counters().failing_products, cudaErrorInvalidValue))
    return CUBLAS_STATUS_EXECUTION_FAILED;
  static_cast<void>(emulation::fails(emulation::counters().products_that_leave_an_error, cudaErrorInvalidValue));
  // What the descriptors, alpha and beta say is taken now, as the library does.
  const bool wide = la->type == CUDA_R_64F;
  double factors[2] = {};
  std::memcpy(&factors[0], alpha, wide ? sizeof(double) : sizeof(float));
  std::memcpy(&factors[1], beta, wide ? sizeof(double) : sizeof(float));
  stream->run([wide, factors, desc = *d, a, la = *la, b, lb = *lb, c, lc = *lc] {
    if (wide)
      emulation::matmul<double, double>(desc, &factors[0], a, la, b, lb, &factors[1], c, lc);
    else if (la.type == CUDA_R_16BF)
      emulation::matmul<emulation::Bf16, float>(desc, &factors[0], a, la, b, lb, &factors[1], c, lc);
    else
      emulation::matmul<float, float>(desc, &factors[0], a, la, b, lb, &factors[1], c, lc);
  });
  return CUBLAS_STATUS_SUCCESS;
}
