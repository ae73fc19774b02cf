#pragma once
/// Reading what has to be bit for bit as it was written: checkpoints.

#include <chorus/io/incoming.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace chorus::io::detail {

/// Makes `numbers` the mean of themselves and those of the other tensors of a file.
template <class T, Device D>
void take_mean(const SafetensorsReader& file, const Incoming<D>& tensor, std::span<std::byte> numbers) {
  const auto view = [](std::span<std::byte> bytes) {
    return std::span(reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T));
  };
  const auto mean = view(numbers);
  std::vector<double> sums(mean.begin(), mean.end());
  std::vector<std::byte> other(numbers.size());
  for (const auto& name : tensor.mean_with) {
    file.read(file.at(name), other);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(view(other)[i]);
  }
  for (std::size_t i = 0; i < sums.size(); ++i)
    mean[i] = static_cast<T>(sums[i] / static_cast<double>(tensor.mean_with.size() + 1));
}

/// Checks that the file has exactly these tensors, but for those that `ignored(name)` allows, then reads them all.
/// Throws FileError with every missing, unexpected and mismatched name, and what `judge(wanted, bytes)` throws of a
/// tensor's numbers, before anything is changed.
template <Device D, class Ignored, class Judge>
void read_all(const SafetensorsReader& file, const std::vector<Incoming<D>>& wanted, const Ignored& ignored,
              const Judge& judge) {
  std::string missing, unexpected, mismatched;
  const auto list = [](std::string& to, const auto&... parts) { to += cat(to.empty() ? "" : ", ", parts...); };
  const auto compare = [&](const Incoming<D>& tensor, const std::string& name) {
    const TensorEntry* entry = file.find(name);
    if (entry == nullptr)
      list(missing, printable(name));
    else if (entry->dtype != file_dtype(tensor.dtype) || entry->shape != tensor.shape)
      list(mismatched, printable(name), " (expected ", tensor.dtype, " ", std::span<const Index>(tensor.shape),
           ", got ", entry->dtype, " ", std::span<const Index>(entry->shape), ")");
  };
  for (const auto& tensor : wanted) {
    compare(tensor, tensor.name);
    for (const auto& name : tensor.mean_with) compare(tensor, name);
  }
  for (const TensorEntry& entry : file.entries()) {
    bool known = ignored(entry.name);
    for (const auto& tensor : wanted) known = known || tensor.name == entry.name;
    if (!known) list(unexpected, printable(entry.name));
  }
  std::string problems;
  const auto report = [&](const char* what, const std::string& names) {
    if (!names.empty()) problems += cat("; ", what, ": ", names);
  };
  report("missing", missing);
  report("unexpected", unexpected);
  report("mismatched", mismatched);
  check<FileError>(problems.empty(), "loading ", file.path(), ": the file doesn't fit the model", problems,
                   "; resuming needs the model and the optimizer that were saved (io::load takes the model alone)");

  std::vector<std::vector<std::byte>> numbers;  // all are read before one is stored
  for (const auto& tensor : wanted) {
    const TensorEntry& entry = file.at(tensor.name);
    numbers.emplace_back(entry.bytes);
    file.read(entry, numbers.back());
    check_bools(file, entry, numbers.back());
    if (!tensor.mean_with.empty() && tensor.dtype == DType::f32) take_mean<float>(file, tensor, numbers.back());
    if (!tensor.mean_with.empty() && tensor.dtype == DType::f64) take_mean<double>(file, tensor, numbers.back());
    judge(tensor, std::span<const std::byte>(numbers.back()));
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) store<D>(wanted[i], numbers[i]);
}

}  // namespace chorus::io::detail
