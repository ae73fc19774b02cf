#pragma once
/// A safetensors file that several ranks write together: each writes its parts of tensors.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/config.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/io/tensor_place.hpp>
#include <string>
#include <type_traits>
#include <vector>

namespace chorus::io::detail {

/// Every rank calls it with its part of the model, and writes the places with `writes`. All write into one temporary
/// file, which rank 0 then renames like AtomicFile, atomically. If a rank does not see that file, because there is no
/// common file system, all parts go through rank 0, one tensor at a time. `through_rank_0`: always do so. Rank 0's
/// metadata are written. If a rank fails, all throw FileError with its reason, after the file has been removed.
template <Device D, class Communicator>
void write_in_parts(Communicator& ranks, const std::string& path, const std::vector<TensorPlace<D>>& places,
                    const Metadata& metadata, bool through_rank_0 = false);

/// For io::save.
template <class Net>
void save_in_parts(Net& net, const std::string& path, Metadata metadata) {
  using Own = std::remove_reference_t<decltype(net.communicator())>;
  using Communicator = std::conditional_t<std::is_base_of_v<comm::AnyCommunicator, Own>, comm::AnyCommunicator, Own>;
  static_assert(CHORUS_DEFINES_DEVICE_TEMPLATES || std::is_same_v<Communicator, comm::AnyCommunicator>,
                "io::save: the library chorus::compiled writes for nets over comm::AnyCommunicator");
  note_model(metadata, net.module());
  using D = typename Net::device_type;
  write_in_parts<D, Communicator>(net.communicator(), path, places_in_parts<D>(net), metadata);
}

}  // namespace chorus::io::detail

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/io/write_in_parts_impl.hpp>
#endif
