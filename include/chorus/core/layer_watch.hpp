#pragma once
/// Observers of a forward pass's layers and multiply-adds, for model summaries.

#include <cstdint>
#include <string>

namespace chorus::detail {

class LayerWatch {
 public:
  virtual ~LayerWatch() = default;
  /// A layer's call begins. Calls that begin before its end are nested in it.
  virtual void begins(const void* layer) = 0;
  /// The innermost call has ended. `output`: the output's shape as text.
  virtual void ended(const std::string& output) = 0;
  /// An operation in the innermost call did that many multiply-adds.
  virtual void multiply_adds(std::int64_t count) = 0;
};

/// This thread's observer, or null.
inline thread_local constinit LayerWatch* layer_watch = nullptr;

inline void count_multiply_adds(std::int64_t count) {
  if (layer_watch != nullptr) [[unlikely]]
    layer_watch->multiply_adds(count);
}

}  // namespace chorus::detail
