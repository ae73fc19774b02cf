#pragma once
/// Who watches the operations of a forward pass, as the conversion to integers does.

#include <chorus/core/dtype.hpp>
#include <memory>
#include <vector>

namespace chorus::detail {

/// An operand or a result.
struct WatchedTensor {
  DType dtype = DType::f32;
  const void* data = nullptr;
  std::vector<Index> shape, strides;
  /// Holds the memory, so that no later tensor is taken for this one.
  std::shared_ptr<const void> keep;

  bool defined() const { return data != nullptr; }
};

/// An operation that has ended.
struct WatchedOperation {
  const char* name;
  /// The operation as `record` got it: an object whose type goes with the name ("conv2d": operations::Conv2d).
  const void* facts;
  std::vector<WatchedTensor> inputs;
  WatchedTensor output;
};

class OperationWatch {
 public:
  virtual ~OperationWatch() = default;
  virtual void ended(const WatchedOperation& operation) = 0;
};

/// The one that watches this thread, or null.
inline thread_local constinit OperationWatch* operation_watch = nullptr;

}  // namespace chorus::detail
