#pragma once
/// A range of a flat buffer as what it is.

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <cstddef>

namespace chorus::ddp {

/// Calls `f(float*)` or `f(double*)`.
template <class F>
void with_type(DType type, std::byte* at, const F& f) {
  check<UsageError>(type == DType::f32 || type == DType::f64, "DistributedDataParallel: gradients of dtype ", type,
                    " can't be averaged; expected F32 or F64");
  if (type == DType::f32)
    f(reinterpret_cast<float*>(at));
  else
    f(reinterpret_cast<double*>(at));
}

}  // namespace chorus::ddp
