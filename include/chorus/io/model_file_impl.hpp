#pragma once
/// How a model's numbers are written to a file.

#include <chorus/io/data_hash.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/io/tensor_place.hpp>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io::detail {

/// Tensors to be written, copied to the host.
class Outgoing {
 public:
  template <Device D>
  void add(const TensorPlace<D>& tensor) {
    check_whole(tensor);
    add(tensor.name, tensor, [&](std::byte* to) { tensor.copy_to(to); });
  }
  /// The same under another name; `copy(to)` copies the numbers.
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

CHORUS_INLINE std::map<std::string, std::vector<std::string>> all_names(nn::Module& model) {
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

CHORUS_INLINE const Metadata& no_metadata() {
  static const Metadata none;
  return none;
}

CHORUS_INLINE void note_model(Metadata& metadata, nn::Module& model) {
  for (const auto& [first, names] : all_names(model))
    for (const auto& name : names)
      if (name != first) metadata.emplace(name, first);
  if constexpr (Sha256::available) metadata.insert({{std::string(data_hash_key), ""}, {"format", "pt"}});
}

template <Device D>
void save_module(nn::Module& model, const std::string& path, const Metadata& metadata) {
  Outgoing out;
  for (const auto& place : model_places<D>(model)) out.add(place);
  auto noted = metadata;
  note_model(noted, model);
  write_safetensors(path, out.views(), noted);
}

}  // namespace chorus::io::detail
