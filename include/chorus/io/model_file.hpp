#pragma once
/// Models as safetensors files: every parameter and buffer under its path, with PyTorch's name (`conv1.weight`). The
/// same file loads under any policy and on any number of devices.

#include <chorus/core/config.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <chorus/nn/module.hpp>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace chorus::io {

namespace detail {
const Metadata& no_metadata();
/// All names of each parameter and buffer in a model, by its first name.
[[gnu::cold]] std::map<std::string, std::vector<std::string>> all_names(nn::Module& model);
/// Records the names of tensors that the file has under another name, like safetensors' `save_model`; and, if the build
/// has OpenSSL, a checksum, which the writer sets, and PyTorch's format, which some readers require.
[[gnu::cold]] void note_model(Metadata& metadata, nn::Module& model);
template <Device D>
void save_module(nn::Module& model, const std::string& path, const Metadata& metadata);
template <class Net>
void save_in_parts(Net& net, const std::string& path, Metadata metadata);
}  // namespace detail

/// Writes all parameters and buffers of `model`, atomically: a failure leaves an older file unchanged. Tied ones are
/// written once; the metadata list their other names, like safetensors' `save_model`. If the build has OpenSSL, they
/// have a checksum of the data (see data_hash_key), which `load` compares. Throws FileError.
template <class Model>
void save(Model& model, const std::string& path, const Metadata& metadata = detail::no_metadata()) {
  static_assert(std::is_base_of_v<nn::Module, Model>, "io::save: expected a model; under a policy save net.module()");
  detail::save_module<typename Model::device_type>(model, path, metadata);
}

/// The same for a policy's model: one call on all ranks, under every policy. Rank 0 writes. If each rank has parts of
/// the parameters, all write their parts into the one file; under LocalSgd they average first. If one rank throws, the
/// others throw, too, here or in their next collective call.
template <class Net>
requires requires(Net& net) {
  typename Net::policy_type;
  net.module();
}
void save(Net& net, const std::string& path, const Metadata& metadata = detail::no_metadata()) {
  if constexpr (requires { net.writes_part(true, true); }) {
    detail::save_in_parts(net, path, metadata);
  } else {
    if constexpr (requires { net.synchronise(); }) net.synchronise();  // LocalSgd: ranks' models differ
    if constexpr (requires { net.communicator().rank(); })
      if (net.communicator().rank() != 0) return;
    save(net.module(), path, metadata);
  }
}

}  // namespace chorus::io

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/io/model_file_impl.hpp>
#endif
