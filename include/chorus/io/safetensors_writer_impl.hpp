#pragma once
/// The layout of a file, as the reference writer writes it.

#include <algorithm>
#include <array>
#include <bit>
#include <chorus/core/error.hpp>
#include <chorus/core/json_string.hpp>
#include <chorus/core/atomic_file.hpp>
#include <chorus/io/data_hash.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io::detail {

CHORUS_INLINE std::string safetensors_header(std::string_view path, std::vector<const TensorView*>& tensors,
                                             const Metadata& metadata) {
  // By alignment, largest first, so that every tensor is aligned in the file; then by name.
  std::sort(tensors.begin(), tensors.end(), [](const TensorView* a, const TensorView* b) {
    return a->dtype != b->dtype ? a->dtype > b->dtype : a->name < b->name;
  });
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":";
    char separator = '{';
    for (const auto& [key, value] : metadata) {
      check<UsageError>(valid_utf8(key) && valid_utf8(value), "saving ", path, ": metadata ", Quoted{key},
                        " is not valid UTF-8");
      json += separator;
      append_json_string(json, key);
      json += ':';
      append_json_string(json, value);
      separator = ',';
    }
    json += '}';
  }

  std::vector<std::string_view> names;
  std::size_t offset = 0;
  const std::string saving = cat("saving ", path);
  for (const TensorView* tensor : tensors) {
    const TensorOfFile who{saving, tensor->name};
    check_tensor_name<UsageError>(who, ReaderLimits{}.name_bytes);
    check<UsageError>(valid_utf8(tensor->name), who, "its name is not valid UTF-8");
    check<UsageError>(tensor->name != "__metadata__", who, "the format reserves that name");
    check<UsageError>(tensor->shape.size() <= ReaderLimits{}.rank, who, "shape ", tensor->shape, " has more than ",
                      ReaderLimits{}.rank, " axes");
    const std::size_t bytes = tensor_bytes<UsageError>(tensor->dtype, tensor->shape, who);
    check<UsageError>(tensor->data.size() == bytes, who, "shape ", tensor->shape, " of ", tensor->dtype, " takes ",
                      bytes, " bytes, but the data have ", tensor->data.size());
    names.push_back(tensor->name);
    if (json.size() > 1) json += ',';
    append_json_string(json, tensor->name);
    json += cat(":{\"dtype\":\"", tensor->dtype, "\",\"shape\":[");
    for (const Index& size : tensor->shape) json += cat(&size == tensor->shape.data() ? "" : ",", size);
    json += cat("],\"data_offsets\":[", offset, ",", offset + bytes, "]}");
    offset += bytes;
  }
  json += '}';

  check_names_differ<UsageError>(saving, std::move(names));
  json.resize((json.size() + 7) / 8 * 8, ' ');
  check<UsageError>(json.size() <= format_header_bytes, saving, ": the header would have ", json.size(),
                    " bytes; the format allows ", format_header_bytes);
  const auto prefix = std::bit_cast<std::array<char, 8>>(std::uint64_t{json.size()});
  json.insert(0, prefix.data(), prefix.size());
  return json;
}

}  // namespace chorus::io::detail

namespace chorus::io {

CHORUS_INLINE void write_safetensors(const std::string& path, std::span<const TensorView> tensors,
                                     const Metadata& metadata) {
  std::vector<const TensorView*> order;
  for (const TensorView& tensor : tensors) order.push_back(&tensor);
  std::string header = detail::safetensors_header(path, order, metadata);
  if (const std::string key(data_hash_key); Sha256::available && metadata.contains(key)) {
    detail::DataHash hash;  // of the data in file order
    for (const TensorView* tensor : order) hash.update(tensor->data);
    Metadata noted = metadata;
    noted.at(key) = hash.hex();
    header = detail::safetensors_header(path, order, noted);
  }
  AtomicFile file(path);
  file.write(header);
  for (const TensorView* tensor : order) file.write(tensor->data);
  file.commit();
}

}  // namespace chorus::io
