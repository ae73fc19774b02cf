#pragma once
/// A watch over the layers of a forward pass and their multiply-adds, for a model's summary.

#include <cstdint>
#include <string>

namespace chorus::detail {

class LayerWatch {
 public:
  virtual ~LayerWatch() = default;
  /// A layer's call begins. Calls that begin before it ends are within it.
  virtual void begins(const void* layer) = 0;
  /// The innermost call has ended. `output`: its shape, for people.
  virtual void ended(const std::string& output) = 0;
  /// An operation of the innermost call has done that number of multiply-adds.
  virtual void multiply_adds(std::int64_t count) = 0;
};

/// The watch of this thread, or null.
inline thread_local constinit LayerWatch* layer_watch = nullptr;

inline void count_multiply_adds(std::int64_t count) {
  if (layer_watch != nullptr) [[unlikely]]
    layer_watch->multiply_adds(count);
}

}  // namespace chorus::detail
