#pragma once
/// Lab 9: what the student's code is.

#include "../counted.hpp"
#include "../lab.hpp"

namespace memory_lab {

inline constexpr const char* title = "Lab 9: where memory goes, and checkpoints";

/// What a layer reads or makes, in memory that is counted as activations. Copies are handles of the same numbers, which
/// are freed with the last one; `value = {}` lets go of one.
using Value = lab::Counted;

/// Layers in a row. It checks and counts the calls.
class Layers {
 public:
  virtual ~Layers() = default;
  virtual int count() const = 0;
  /// The output of a layer for its input `x`: new memory.
  virtual Value forward(int layer, const Value& x) = 0;
  /// The gradient of the loss by the last layer's output `y`: new memory.
  virtual Value loss(const Value& y) = 0;
  /// Adds to the layer's gradient, and returns the gradient by its input `x`, which is new memory. `dy`: the gradient
  /// by its output.
  virtual Value backward(int layer, const Value& x, const Value& dy) = 0;
};

struct Code {
  std::function<void(Layers& layers, const Value& input, int segment)> step;
};
/// Measures the memory of a model in training, with and without checkpoints, and judges the code.
void check(lab::Lab& lab, const Code& code);

}  // namespace memory_lab
