#pragma once
/// A fingerprint of a model's parameters, to compare ranks and runs bit by bit.

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <chorus/io/sha256.hpp>
#include <chorus/io/write_in_parts_impl.hpp>
#include <chorus/nn/module.hpp>

namespace chorus::io {

/// SHA-256 over the names and numbers of all parameters, in the order of the model's members, as 64 hexadecimal digits.
template <class Model>
std::string parameters_sha256(Model& model) {
  Sha256 hash;
  std::vector<std::byte> numbers;
  for (const auto& named : nn::named_parameters<typename Model::device_type>(model)) {
    nn::check_whole("parameters_sha256", named, "all ranks call it with the net");
    numbers.resize(named.parameter->size_bytes());
    copy_bytes(Cpu{}, numbers.data(), named.parameter->where(), named.parameter->memory(), numbers.size());
    hash.update(named.name);
    hash.update(numbers);
  }
  return hash.hex();
}

/// The fingerprint of a policy's model, the same on all ranks, even if each has parts of it. All ranks call it.
template <detail::IsNet Net>
std::string parameters_sha256(Net& net) {
  if constexpr (!detail::keeps_parts<Net>) {
    return parameters_sha256(net.module());
  } else {
    using D = typename Net::device_type;
    auto& ranks = net.communicator();
    const auto places = detail::places_in_parts<D>(net);
    const detail::TensorsOfAll<D> tensors(ranks, places);
    Sha256 hash;  // rank 0's
    std::vector<std::byte> whole;
    for (const auto& named : nn::named_parameters<D>(net.module())) {
      const auto tensor = std::find_if(tensors.items().begin(), tensors.items().end(),
                                       [&](const auto& item) { return item.view.name == named.name; });
      whole.resize(tensor->view.data.size());
      detail::for_all_ranges<D>(ranks, *tensor, [&](std::size_t begin, std::span<const std::byte> bytes) {
        std::copy(bytes.begin(), bytes.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin));
      });
      hash.update(named.name);
      hash.update(whole);
    }
    return comm::broadcast_object(ranks, hash.hex());
  }
}

}  // namespace chorus::io
