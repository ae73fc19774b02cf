#pragma once
/// The places of a model's tensors, for writing them to a file and reading them.

#include <algorithm>
#include <chorus/core/tensor_group.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::io::detail {

/// In a checkpoint, names with this prefix are not the model's.
inline constexpr std::string_view training_prefix = "training/";

/// The place of a file's tensor in this program: in device memory, or, without a device, on the host. `mean_with`:
/// names of other tensors in the file, with which floating-point numbers are averaged. Ranks may share the tensor: with
/// `part` this rank has some entries of an axis; with `part_count` it has that many elements of these, or of the whole,
/// from `part_begin` on.
template <Device D>
struct TensorPlace {
  std::string name;
  DType dtype;
  std::vector<Index> shape;  ///< of the whole tensor
  std::optional<D> device;
  void* data;
  std::vector<std::string> mean_with = {};
  std::size_t part_begin = 0;
  std::optional<std::size_t> part_count = {};
  std::shared_ptr<const PartOfParameter> part = {};
  bool writes = true;  ///< among ranks with the same tensor, one writes

  std::size_t whole_bytes() const { return static_cast<std::size_t>(numel(shape)) * size_of(dtype); }
  /// The number of elements in this process.
  std::size_t count() const {
    if (part_count) return *part_count;
    return static_cast<std::size_t>(part != nullptr ? part->layout().numbers(part->mine()) : numel(shape));
  }
  std::size_t bytes() const { return count() * size_of(dtype); }

  /// Calls `f(in_whole, here, bytes)`, all in bytes, for each contiguous run in this process: its offset in the file's
  /// tensor and among this process's numbers.
  template <class F>
  void for_runs(const F& f) const {
    const auto size = size_of(dtype);
    const auto begin = static_cast<Index>(part_begin), end = begin + static_cast<Index>(count());
    const auto run = [&](Index in_whole, Index in_part, Index numbers) {
      const Index from = std::max(in_part, begin), to = std::min(in_part + numbers, end);
      if (from < to)
        f(static_cast<std::size_t>(in_whole + from - in_part) * size, static_cast<std::size_t>(from - begin) * size,
          static_cast<std::size_t>(to - from) * size);
    };
    if (part == nullptr) return run(0, 0, numel(shape));
    part->layout().for_runs(part->mine(), run);
  }
  void copy_to(void* numbers) const {
    if (device)
      copy_bytes(Cpu{}, numbers, *device, data, bytes());
    else
      copy_bytes(Cpu{}, numbers, Cpu{}, data, bytes());
  }
  /// `numbers`: this process's.
  void fill(const void* numbers) const {
    if (device)
      copy_bytes(*device, data, Cpu{}, numbers, bytes());
    else
      copy_bytes(Cpu{}, data, Cpu{}, numbers, bytes());
  }
  /// Extracts this process's numbers from the whole tensor's.
  std::vector<std::byte> own_of(std::span<const std::byte> whole) const {
    std::vector<std::byte> own(bytes());
    for_runs([&](std::size_t in_whole, std::size_t here, std::size_t count) {
      std::copy_n(whole.data() + in_whole, count, own.data() + here);
    });
    return own;
  }
};

/// The places of all tensors of a model.
template <Device D>
[[gnu::cold]] std::vector<TensorPlace<D>> model_places(nn::Module& model) {
  std::vector<TensorPlace<D>> places;
  const auto add = [&](const std::string& name, auto& tensor) {
    const auto extents = tensor.extents();
    places.push_back({name, tensor.dtype(), {extents.begin(), extents.end()}, tensor.where(), tensor.memory()});
  };
  for (const auto& named : nn::named_parameters<D>(model)) {
    add(named.name, *named.parameter);
    places.back().part = named.parameter->part();
  }
  for (const auto& named : nn::named_buffers<D>(model)) add(named.name, *named.buffer);
  return places;
}

/// A policy.
template <class Net>
concept IsNet = requires(Net& net) {
  typename Net::policy_type;
  net.module();
};

/// Whether ranks have parts of the model: all write a file together, each its parts. Such a policy has
/// `writes_part(sharded, layers)`: whether this rank writes its part of a tensor that is cut in these ways.
template <class Net>
constexpr bool keeps_parts = requires(const Net& net) {
  net.writes_part(true, true);
};

template <Device D, class Net>
void choose_writers(const Net& net, std::vector<TensorPlace<D>>& places) {
  for (auto& place : places) place.writes = net.writes_part(place.part_count.has_value(), place.part != nullptr);
}

/// The places of this rank's part of the model under such a policy: its parts of parameters, and the buffers.
template <Device D, class Net>
std::vector<TensorPlace<D>> places_in_parts(Net& net) {
  std::vector<TensorPlace<D>> places;
  for (const auto& named : net.parameters()) {
    const auto& p = *named.parameter;
    if (!p.is_here()) continue;
    const auto extents = p.extents();
    places.push_back({.name = named.name,
                      .dtype = p.dtype(),
                      .shape = {extents.begin(), extents.end()},
                      .device = p.where(),
                      .data = p.place(),
                      .part = p.part()});
    if (!p.is_part()) continue;
    places.back().part_begin = static_cast<std::size_t>(p.part_begin());
    places.back().part_count = static_cast<std::size_t>(p.count());
  }
  for (const auto& named : nn::named_buffers<D>(net.module())) {
    if (!named.buffer->is_here()) continue;
    const auto extents = named.buffer->extents();
    places.push_back({named.name,
                      named.buffer->dtype(),
                      {extents.begin(), extents.end()},
                      named.buffer->where(),
                      named.buffer->memory()});
  }
  choose_writers(net, places);
  return places;
}

/// Throws UsageError if the tensor is only one rank's part.
template <Device D>
void check_whole(const TensorPlace<D>& tensor) {
  check<UsageError>(tensor.part == nullptr, "io::save, io::load: '", tensor.name,
                    "' is split by TensorParallel, and this rank has a part: pass the net, on all ranks");
}

/// Invalidates replicas and 16-bit copies after a model's numbers have changed.
template <Device D>
void say_changed(nn::Module& model) {
  for (const auto& named : nn::named_parameters<D>(model)) named.parameter->touch_by_hand();
  for (const auto& named : nn::named_buffers<D>(model)) named.buffer->touch_by_hand();
}

}  // namespace chorus::io::detail
