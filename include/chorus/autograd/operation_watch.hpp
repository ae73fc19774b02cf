#pragma once
/// Observers of a forward pass's operations, as used for the conversion to integers.

#include <chorus/core/dtype.hpp>
#include <memory>
#include <vector>

namespace chorus::detail {

/// An operand or a result.
struct WatchedTensor {
  DType dtype = DType::f32;
  const void* data = nullptr;
  std::vector<Index> shape, strides;
  /// Keeps the memory alive, so that no later tensor has the same address.
  std::shared_ptr<const void> keep;

  bool defined() const { return data != nullptr; }
};

/// A finished operation.
struct WatchedOperation {
  const char* name;
  /// The operation as passed to `record`; its type follows from the name ("conv2d": operations::Conv2d).
  const void* facts;
  std::vector<WatchedTensor> inputs;
  WatchedTensor output;
};

class OperationWatch {
 public:
  virtual ~OperationWatch() = default;
  virtual void ended(const WatchedOperation& operation) = 0;
};

/// This thread's observer, or null.
inline thread_local constinit OperationWatch* operation_watch = nullptr;

}  // namespace chorus::detail
