#pragma once
/// A fingerprint of a model's parameters, to compare ranks and runs bit by bit.

#include <string>
#include <vector>

#include <chorus/io/sha256.hpp>
#include <chorus/nn/module.hpp>

namespace chorus::io {

/// SHA-256 over the names and numbers of all parameters, in the order of the model's members, as 64 hexadecimal digits.
template <class Model>
std::string parameters_sha256(Model& model) {
  Sha256 hash;
  std::vector<std::byte> numbers;
  for (const auto& named : nn::named_parameters<typename Model::device_type>(model)) {
    nn::check_whole("parameters_sha256", named, "net.gathered(), which all ranks call, has whole ones");
    numbers.resize(named.parameter->size_bytes());
    copy_bytes(Cpu{}, numbers.data(), named.parameter->where(), named.parameter->memory(), numbers.size());
    hash.update(named.name);
    hash.update(numbers);
  }
  return hash.hex();
}

}  // namespace chorus::io
