#pragma once
/// How a model's numbers get into a file, and where those of a file go.

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chorus/core/tensor_group.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/io/safetensors_writer.hpp>

namespace chorus::io::detail {

/// What begins with this prefix in a checkpoint is not the model's.
inline constexpr std::string_view training_prefix = "training/";

/// Where a tensor of a file lies in this program: in device memory, or, without a device, on the host. `mean_with`:
/// names of others in the file, with which floating-point numbers take the mean. With `part_count`, so many elements
/// from `part_begin` on are here, and others elsewhere.
template <Device D>
struct TensorPlace {
  std::string name;
  DType dtype;
  std::vector<Index> shape;
  std::optional<D> device;
  void* data;
  std::vector<std::string> mean_with = {};
  std::size_t part_begin = 0;
  std::optional<std::size_t> part_count = {};
  std::shared_ptr<const PartOfParameter> part = {};  // of a tensor that ranks share out

  /// In the file.
  std::vector<Index> whole_shape() const {
    auto whole = shape;
    if (part != nullptr) whole[static_cast<std::size_t>(part->split.axis)] = part->width;
    return whole;
  }
  std::size_t bytes() const { return part_count.value_or(static_cast<std::size_t>(numel(shape))) * size_of(dtype); }
  /// Where they begin in the tensor.
  std::size_t begin_bytes() const { return part_begin * size_of(dtype); }
  void copy_to(void* numbers) const {
    if (device)
      copy_bytes(Cpu{}, numbers, *device, data, bytes());
    else
      copy_bytes(Cpu{}, numbers, Cpu{}, data, bytes());
  }
  /// `numbers`: of the whole tensor.
  void fill(const void* numbers) const {
    std::vector<std::byte> own;
    if (part != nullptr) {
      own.resize(bytes());
      const SplitLayout layout(shape, part->split, part->width);
      const auto size = size_of(dtype);
      layout.for_runs(part->group->part(layout.width, part->split.unit), [&](Index from, Index to, Index count) {
        std::copy_n(static_cast<const std::byte*>(numbers) + static_cast<std::size_t>(from) * size,
                    static_cast<std::size_t>(count) * size, own.data() + static_cast<std::size_t>(to) * size);
      });
      numbers = own.data();
    }
    if (device)
      copy_bytes(*device, data, Cpu{}, numbers, bytes());
    else
      copy_bytes(Cpu{}, data, Cpu{}, numbers, bytes());
  }
};

/// All places of a model.
template <Device D>
std::vector<TensorPlace<D>> model_places(nn::Module& model) {
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

/// Whether a policy keeps a part of each parameter on each rank: all ranks write a file together, each its parts.
template <class Net>
constexpr bool keeps_parts = requires {
  requires Net::keeps_parts;
};

/// What this rank has of the model of such a policy: its parts of parameters, and the buffers, which are all ranks'.
template <Device D, class Net>
std::vector<TensorPlace<D>> places_in_parts(Net& net) {
  std::vector<TensorPlace<D>> places;
  for (const auto& named : net.parameters()) {
    const auto& p = *named.parameter;
    const auto extents = p.whole_extents();
    places.push_back({.name = named.name,
                      .dtype = p.dtype(),
                      .shape = {extents.begin(), extents.end()},
                      .device = p.where(),
                      .data = p.place(),
                      .part_begin = static_cast<std::size_t>(p.part_begin()),
                      .part_count = static_cast<std::size_t>(p.count())});
  }
  for (const auto& named : nn::named_buffers<D>(net.module())) {
    const auto extents = named.buffer->extents();
    places.push_back({named.name, named.buffer->dtype(), {extents.begin(), extents.end()}, named.buffer->where(),
                      named.buffer->memory()});
  }
  return places;
}

/// Throws UsageError where a tensor is one rank's part.
template <Device D>
void check_whole(const TensorPlace<D>& tensor) {
  check<UsageError>(tensor.part == nullptr, "a model's file: '", tensor.name, "' is this rank's part of what ",
                    "TensorParallel shares out: net.save(path) and net.load(path), which all ranks call, are for "
                    "whole ones, and so is the model net.gathered()");
}

/// Says that a model's numbers have changed: to replicas, and to copies in 16 bits.
template <Device D>
void say_changed(nn::Module& model) {
  for (const auto& named : nn::named_parameters<D>(model)) named.parameter->touch();
  for (const auto& named : nn::named_buffers<D>(model)) named.buffer->touch();
}

/// Tensors on their way to a file, brought to the host.
class Outgoing {
 public:
  template <Device D>
  void add(const TensorPlace<D>& tensor) {
    check_whole(tensor);
    add(tensor.name, tensor, [&](std::byte* to) { tensor.copy_to(to); });
  }
  /// Under another name; `copy(to)` copies the numbers.
  template <Device D, class Copy>
  void add(std::string name, const TensorPlace<D>& tensor, const Copy& copy) {
    items_.push_back({std::move(name), tensor.dtype, tensor.shape, std::vector<std::byte>(tensor.bytes())});
    copy(items_.back().bytes.data());
  }
  std::vector<TensorView> views() const {
    std::vector<TensorView> out;
    for (const Item& item : items_) out.push_back({item.name, file_dtype(item.dtype), item.shape, item.bytes});
    return out;
  }

 private:
  struct Item {
    std::string name;
    DType dtype;
    std::vector<Index> shape;
    std::vector<std::byte> bytes;
  };
  std::vector<Item> items_;
};

/// All names that each parameter and buffer has in a model, by the first of them.
inline std::map<std::string, std::vector<std::string>> all_names(nn::Module& model) {
  struct Names final : nn::detail::Walker {
    std::map<const Node*, std::vector<std::string>> of;
    void parameter(std::string_view name, AnyParameter& handle) override { add(name, handle.shared().get()); }
    void buffer(std::string_view name, AnyBuffer& handle) override { add(name, handle.shared().get()); }
    void add(std::string_view name, const Node* node) { of[node].push_back(path(name)); }
  } found;
  found.walk(model);
  std::map<std::string, std::vector<std::string>> out;
  for (auto& [node, names] : found.of) out.emplace(names.front(), names);
  return out;
}

/// Notes which names stand for tensors that are in the file by another name, as safetensors' `save_model` does.
inline void note_tied(Metadata& metadata, nn::Module& model) {
  for (const auto& [first, names] : all_names(model))
    for (const auto& name : names)
      if (name != first) metadata.emplace(name, first);
}

template <Device D>
void save_module(nn::Module& model, const std::string& path, const Metadata& metadata) {
  Outgoing out;
  for (const auto& place : model_places<D>(model)) out.add(place);
  auto noted = metadata;
  note_tied(noted, model);
  write_safetensors(path, out.views(), noted);
}

}  // namespace chorus::io::detail
