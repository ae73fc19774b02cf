#pragma once
/// Single tensors in safetensors files, of any dtype of Tensor: bf16 and half take 2 bytes.

#include <algorithm>
#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/tensor/tensor.hpp>
#include <span>
#include <string>
#include <string_view>

namespace chorus::io {

/// A dense tensor on the host in the form of `write_safetensors`; the tensor must outlive the view. Throws UsageError
/// if it is not contiguous.
template <Scalar T, int Rank>
TensorView view_of(std::string name, const Tensor<T, Rank, Cpu>& tensor) {
  check<UsageError>(tensor.is_contiguous(), "saving ", name, ": a tensor of shape ", tensor.shape(), " and strides ",
                    tensor.strides(), " is not contiguous");
  return {std::move(name), file_dtype(dtype<T>), tensor.shape(),
          std::as_bytes(std::span(tensor.data(), static_cast<std::size_t>(tensor.numel())))};
}

/// The tensor of that name. Throws FileError if it is missing, if it has another dtype or number of axes, or if a BOOL
/// is neither 0 nor 1.
template <Scalar T, int Rank>
Tensor<T, Rank, Cpu> read_tensor(const SafetensorsReader& file, std::string_view name) {
  const TensorEntry& entry = file.at(name);
  check<FileError>(entry.dtype == file_dtype(dtype<T>) && entry.shape.size() == static_cast<std::size_t>(Rank),
                   "loading ", file.path(), ": tensor ", name, ": expected ", dtype<T>, " with ", Rank, " axes, got ",
                   entry.dtype, " ", std::span<const Index>(entry.shape));
  Shape<Rank> shape{};
  std::copy_n(entry.shape.begin(), Rank, shape.begin());
  auto out = Tensor<T, Rank, Cpu>::empty(shape);
  const auto bytes = std::as_writable_bytes(std::span(out.data(), static_cast<std::size_t>(out.numel())));
  file.read(entry, bytes);
  detail::check_bools(file, entry, bytes);
  return out;
}

}  // namespace chorus::io
