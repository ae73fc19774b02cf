#pragma once
/// Keys of cached cuBLASLt and cuDNN plans. Needs no CUDA headers.

#include <algorithm>
#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/trans.hpp>
#include <compare>
#include <cstddef>
#include <initializer_list>

namespace chorus::kernels::cuda {

struct PlanKey {
  std::array<Index, 18> numbers{};

  PlanKey(std::initializer_list<Index> list) { std::copy(list.begin(), list.end(), numbers.begin()); }
  friend auto operator<=>(const PlanKey& a, const PlanKey& b) { return a.numbers <=> b.numbers; }
  friend bool operator==(const PlanKey& a, const PlanKey& b) { return a.numbers == b.numbers; }
};

/// Additional work of a product: adding a bias to each row of c, or computing the sum of each row of op(a).
enum class Epilogue : int { none, bias, sums };

/// Row-major matrix products (see kernels/gemm.hpp). Alignments hold for the addresses of all matrices, in bytes.
struct GemmProblem {
  DType dtype;
  Trans ta, tb;
  Index m, n, k, lda, ldb, ldc;
  Epilogue epilogue;
  bool tf32;
  int align_a, align_b, align_c;
  Index count = 1, stride_a = 0, stride_b = 0, stride_c = 0;
  DType out = dtype;  ///< type of the result

  PlanKey key() const {
    return {static_cast<Index>(dtype) * 64 + static_cast<Index>(out),
            ta == Trans::yes,
            tb == Trans::yes,
            m,
            n,
            k,
            lda,
            ldb,
            ldc,
            static_cast<Index>(epilogue),
            tf32,
            align_a,
            align_b,
            align_c,
            count,
            stride_a,
            stride_b,
            stride_c};
  }
};

enum class ConvolutionPass : int { forward, backward_input, backward_weight };

/// A convolution of contiguous tensors, whose last axis is the width.
struct ConvolutionProblem {
  ConvolutionPass pass;
  DType dtype;
  bool tf32;
  Conv2dShape shape;
  DType weight = dtype;  ///< type of the weight or its gradient

  PlanKey key() const {
    const Conv2dShape& s = shape;
    const Index types = static_cast<Index>(dtype) * 64 + static_cast<Index>(weight);
    return {static_cast<Index>(pass) * 8192 + types * 2 + Index{tf32},
            s.batch,
            s.in_channels,
            s.height,
            s.width,
            s.out_channels,
            s.kernel_h,
            s.kernel_w,
            s.stride_h,
            s.stride_w,
            s.padding_h,
            s.padding_w,
            s.dilation_h,
            s.dilation_w,
            s.groups};
  }
};

}  // namespace chorus::kernels::cuda
