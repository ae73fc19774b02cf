#pragma once
/// Tensors as text: nested brackets, long axes shortened. And shapes.

#include <array>
#include <cstddef>
#include <string>

#include <chorus/tensor/tensor.hpp>

namespace chorus {

/// `[[1, 2], [3, 4]]`. For an axis of over 8 entries the first and last 3 are shown.
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

/// A shape, `[2, 3]`. It is an array of integers and no type of chorus: the operator is in the global namespace, and a
/// program's own operator for all arrays still serves the others.
template <class Stream, std::size_t Rank>
requires(Rank <= 8) && requires(Stream& stream, const char* text) { stream << text; }
Stream& operator<<(Stream& stream, const std::array<chorus::Index, Rank>& shape) {
  stream << chorus::cat(shape).c_str();
  return stream;
}
