#pragma once
/// How a model's numbers get into a file.

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chorus/io/model_file.hpp>
#include <chorus/io/safetensors_writer.hpp>

namespace chorus::io {

namespace detail {

/// A tensor in device memory that goes into a file, or comes from one. What begins with this prefix in a checkpoint is
/// not the model's.
inline constexpr std::string_view training_prefix = "training/";

/// Tensors on their way to a file, brought to the host.
class Outgoing {
 public:
  template <Device D>
  void add(std::string name, DType dtype, std::vector<Index> shape, D device, const void* data) {
    const auto bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
    items_.push_back({std::move(name), dtype, std::move(shape), std::vector<std::byte>(bytes)});
    copy_bytes(Cpu{}, items_.back().bytes.data(), device, data, bytes);
  }
  /// A tensor with a name, dtype, shape, device (if any) and data.
  template <class Place>
  void add(const Place& tensor) {
    if (tensor.device)
      add(tensor.name, tensor.dtype, tensor.shape, *tensor.device, tensor.data);
    else
      add(tensor.name, tensor.dtype, tensor.shape, Cpu{}, tensor.data);
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

/// Calls `visit(name, dtype, extents, device, data)` for all numbers of a model; `touch` says that they will change.
template <Device D, class Visit>
void for_each_tensor(nn::Module& model, const Visit& visit, bool touch) {
  for (const auto& named : nn::named_parameters<D>(model)) {
    visit(named.name, named.parameter->dtype(), named.parameter->extents(), named.parameter->where(),
          named.parameter->memory());
    if (touch) named.parameter->touch();
  }
  for (const auto& named : nn::named_buffers<D>(model)) {
    visit(named.name, named.buffer->dtype(), named.buffer->extents(), named.buffer->where(), named.buffer->memory());
    if (touch) named.buffer->touch();
  }
}

template <Device D>
void add_model(Outgoing& out, nn::Module& model) {
  for_each_tensor<D>(
      model,
      [&](const std::string& name, DType dtype, std::span<const Index> extents, D device, const void* data) {
        out.add(name, dtype, {extents.begin(), extents.end()}, device, data);
      },
      false);
}

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
  add_model<D>(out, model);
  auto noted = metadata;
  note_tied(noted, model);
  write_safetensors(path, out.views(), noted);
}

}  // namespace detail

}  // namespace chorus::io
