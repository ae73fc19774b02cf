#pragma once
/// Reading a model's numbers from a safetensors file.

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/io/model_file_impl.hpp>
#include <chorus/io/safetensors_reader.hpp>

namespace chorus::inline CHORUS_ABI::io {

namespace detail {

/// A place that a tensor of a file is to fill: in device memory, or, without a device, on the host. `mean_with`: names
/// of others, with which floating-point numbers take the mean.
template <Device D>
struct Incoming {
  std::string name;
  DType dtype;
  std::vector<Index> shape;
  std::optional<D> device;
  void* data;
  std::vector<std::string> mean_with = {};
};

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
      list(missing, name);
    else if (entry->dtype != file_dtype(tensor.dtype) || entry->shape != tensor.shape)
      list(mismatched, name, " (expected ", tensor.dtype, " ", std::span<const Index>(tensor.shape), ", got ",
           entry->dtype, " ", std::span<const Index>(entry->shape), ")");
  };
  for (const auto& tensor : wanted) {
    compare(tensor, tensor.name);
    for (const auto& name : tensor.mean_with) compare(tensor, name);
  }
  for (const TensorEntry& entry : file.entries()) {
    bool known = ignored(entry.name);
    for (const auto& tensor : wanted) known = known || tensor.name == entry.name;
    if (!known) list(unexpected, entry.name);
  }
  std::string problems;
  const auto report = [&](const char* what, const std::string& names) {
    if (!names.empty()) problems += cat("; ", what, ": ", names);
  };
  report("missing", missing);
  report("unexpected", unexpected);
  report("mismatched", mismatched);
  check<FileError>(problems.empty(), "loading ", file.path(), ": the file doesn't fit the model", problems);

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
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (wanted[i].device)
      copy_bytes(*wanted[i].device, wanted[i].data, Cpu{}, numbers[i].data(), numbers[i].size());
    else
      copy_bytes(Cpu{}, wanted[i].data, Cpu{}, numbers[i].data(), numbers[i].size());
}

/// `touch`: they will change.
template <class Model>
auto model_places(Model& model, bool touch = true) {
  std::vector<Incoming<typename Model::device_type>> wanted;
  for_each_tensor<typename Model::device_type>(
      model,
      [&](const std::string& name, DType dtype, std::span<const Index> extents, auto device, void* data) {
        wanted.push_back({name, dtype, {extents.begin(), extents.end()}, device, data});
      },
      touch);
  return wanted;
}

/// PyTorch's DataParallel and DistributedDataParallel save each name with "module." before it: where all of the file's
/// names begin so and the model's don't, what is wanted is called so, too.
template <Device D>
void name_as_wrapped(const SafetensorsReader& file, std::vector<Incoming<D>>& wanted) {
  constexpr std::string_view prefix = "module.";
  const auto wrapped = [&](const auto& tensor) { return std::string_view(tensor.name).starts_with(prefix); };
  if (file.entries().empty() || !std::ranges::all_of(file.entries(), wrapped)) return;
  if (std::ranges::all_of(wanted, wrapped)) return;
  for (auto& tensor : wanted) tensor.name.insert(0, prefix);
}

}  // namespace detail

/// Fills all parameters and buffers of `model` from a file. Throws FileError, and changes nothing, where the file is
/// damaged or its names, shapes or dtypes are not the model's: one message names all that don't fit. A file of one of
/// PyTorch's wrappers, all of whose names begin with "module.", fits like that of what was wrapped.
template <class Model>
void load(Model& model, const std::string& path) {
  const SafetensorsReader file(path);
  auto wanted = detail::model_places(model);
  detail::name_as_wrapped(file, wanted);
  detail::read_all(file, wanted,
                   [](std::string_view name) { return name.starts_with(detail::training_prefix); },
                   [](const auto&, std::span<const std::byte>) {});
}

}  // namespace chorus::inline CHORUS_ABI::io
