#pragma once
/// Tensors as text (nested brackets, long axes shortened) and shapes as text.

#include <array>
#include <cstddef>
#include <string>

#include <chorus/tensor/tensor.hpp>

namespace chorus {

/// `[[1, 2], [3, 4]]`. Axes of more than 8 entries show the first and last 3.
template <Scalar T, int Rank>
void append(std::string& out, const Tensor<T, Rank, Cpu>& tensor) {
  if (!tensor.defined()) {
    out += "undefined";
  } else if constexpr (Rank == 0) {
    append(out, *tensor.data());
  } else {
    const Index size = tensor.size(0);
    out += '[';
    for (Index i = 0; i < size; ++i) {
      if (i != 0) out += ", ";
      if (size > 8 && i == 3) {
        out += "..., ";
        i = size - 3;
      }
      append(out, tensor[i]);
    }
    out += ']';
  }
}

template <class Stream, Scalar T, int Rank>
Stream& operator<<(Stream& stream, const Tensor<T, Rank, Cpu>& tensor) {
  stream << cat(tensor);
  return stream;
}

}  // namespace chorus

/// Prints a shape, `[2, 3]`. A shape is a std::array, not a type of chorus, so the operator is in the global namespace.
/// A program's own operator for arrays still handles other arrays.
template <class Stream, std::size_t Rank>
requires(Rank <= 8) && requires(Stream& stream, const char* text) { stream << text; }
Stream& operator<<(Stream& stream, const std::array<chorus::Index, Rank>& shape) {
  stream << chorus::cat(shape).c_str();
  return stream;
}
