#pragma once
/// Prints the values of variables and parameters, in the format of tensors.

#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/tensor/print.hpp>
#include <string>

namespace chorus {

template <Real T, int Rank, Device D>
void append(std::string& out, const Variable<T, Rank, D>& variable) {
  append(out, to_device(variable.value(), Cpu{}));
}
template <Real T, int Rank, Device D>
void append(std::string& out, const Parameter<T, Rank, D>& parameter) {
  append(out, to_device(parameter.value(), Cpu{}));
}

template <class Stream, Real T, int Rank, Device D>
Stream& operator<<(Stream& stream, const Variable<T, Rank, D>& variable) {
  stream << cat(variable);
  return stream;
}
template <class Stream, Real T, int Rank, Device D>
Stream& operator<<(Stream& stream, const Parameter<T, Rank, D>& parameter) {
  stream << cat(parameter);
  return stream;
}

}  // namespace chorus
