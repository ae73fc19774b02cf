#pragma once
/// A range of a flat buffer with its type.

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <string_view>

namespace chorus::ddp {

/// Calls `f(float*)` or `f(double*)`. Throws UsageError for other dtypes; `what` names the numbers in the message.
template <class F>
void with_type(std::string_view what, DType type, void* at, const F& f) {
  check<UsageError>(type == DType::f32 || type == DType::f64, what, ": expected F32 or F64, got ", type);
  if (type == DType::f32)
    f(static_cast<float*>(at));
  else
    f(static_cast<double*>(at));
}
template <class F>
void with_type(DType type, void* at, const F& f) {
  with_type("DistributedDataParallel: gradients that are averaged", type, at, f);
}

}  // namespace chorus::ddp
