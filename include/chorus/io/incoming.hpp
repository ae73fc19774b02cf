#pragma once
/// Where numbers of a file go to.

#include <chorus/io/model_file_impl.hpp>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace chorus::io::detail {

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

/// All places of a model.
template <class Model>
auto model_places(Model& model) {
  std::vector<Incoming<typename Model::device_type>> places;
  for_each_tensor<typename Model::device_type>(
      model,
      [&](const std::string& name, DType dtype, std::span<const Index> extents, auto device, void* data) {
        places.push_back({name, dtype, {extents.begin(), extents.end()}, device, data});
      },
      false);
  return places;
}

template <Device D>
void store(const Incoming<D>& place, std::span<const std::byte> numbers) {
  if (place.device)
    copy_bytes(*place.device, place.data, Cpu{}, numbers.data(), numbers.size());
  else
    copy_bytes(Cpu{}, place.data, Cpu{}, numbers.data(), numbers.size());
}

/// Says that a model's numbers have changed: to replicas, and to copies in 16 bits.
template <class Model>
void say_changed(Model& model) {
  for_each_tensor<typename Model::device_type>(
      model, [](auto&&...) {}, true);
}

}  // namespace chorus::io::detail
