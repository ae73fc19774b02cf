#pragma once
/// A model's safetensors file, or several of them with an index, as Hugging Face writes large models.

#include <chorus/core/descriptor.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/io/data_hash.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io {

/// The tensors of one file, or of all files that an index names. An index has a name that ends in `.index.json`, and a
/// `weight_map` from tensors to files beside it.
class SafetensorsFiles {
 public:
  /// Throws FileError if a file is missing or damaged, if its checksum (see data_hash_key) differs, if a file lacks a
  /// tensor that the index has, and if two files have one name.
  explicit SafetensorsFiles(const std::string& path) : path_(path) {
    if (path.ends_with(".index.json"))
      open_all();
    else
      open(path);
  }

  const std::string& path() const { return path_; }
  std::span<const TensorEntry> entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }
  /// The tensor of that name, or nullptr.
  const TensorEntry* find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found != by_name_.end() ? &entries_[found->second] : nullptr;
  }
  /// Copies a tensor's bytes: see SafetensorsReader.
  void read(const TensorEntry& entry, std::span<std::byte> to) const {
    owners_[static_cast<std::size_t>(&entry - entries_.data())]->read(entry, to);
  }

 private:
  const SafetensorsReader& open(const std::string& path) {
    const auto& file = *readers_.emplace_back(std::make_unique<SafetensorsReader>(path));
    detail::check_data_hash(file);
    for (const TensorEntry& entry : file.entries()) {
      const auto [there, is_new] = by_name_.emplace(entry.name, entries_.size());
      if (!is_new)
        fail<FileError>("loading ", printable(path_, 4096), ": tensor ", Quoted{entry.name}, " is in ",
                        printable(owners_[there->second]->path(), 4096), " and in ", printable(path, 4096));
      entries_.push_back(entry);
      owners_.push_back(&file);
    }
    metadata_.insert(file.metadata().begin(), file.metadata().end());
    return file;
  }

  void open_all() {
    using json = nlohmann::json;
    const std::string who = cat("loading ", printable(path_, 4096));
    const RegularFile file(path_, who);
    constexpr std::uint64_t most = std::uint64_t{64} << 20;
    check<FileError>(file.size() <= most, who, ": an index of ", file.size(), " bytes; the limit is ", most);
    std::string text(static_cast<std::size_t>(file.size()), '\0');
    file.read(0, std::as_writable_bytes(std::span(text)), who, ": reading");
    const auto index = json::parse(text, nullptr, /*allow_exceptions=*/false);
    const bool has_map = index.is_object() && index.contains("weight_map") && index["weight_map"].is_object();
    check<FileError>(has_map, who, ": expected a JSON object with a weight_map from tensors to files");
    std::map<std::string, std::vector<std::string>> tensors_of;
    for (const auto& [tensor, name] : index["weight_map"].items()) {
      const auto in = name.is_string() ? name.get<std::string>() : "";
      const bool is_name = in.ends_with(".safetensors") && in.find_first_of("/\\\0") == in.npos;
      check<FileError>(is_name, who, ": tensor ", Quoted{tensor},
                       ": expected the name of a .safetensors file without a folder, got ", printable(name.dump()));
      tensors_of[in].push_back(tensor);
    }
    const auto folder = path_.substr(0, path_.rfind('/') + 1);
    for (const auto& [name, tensors] : tensors_of) {
      const auto& reader = open(folder + name);
      for (const auto& tensor : tensors)
        check<FileError>(reader.find(tensor) != nullptr, who, ": tensor ", Quoted{tensor}, " is not in ",
                         printable(name));
    }
  }

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsReader>> readers_;
  std::vector<TensorEntry> entries_;
  std::vector<const SafetensorsReader*> owners_;  // of each entry
  std::map<std::string, std::size_t, std::less<>> by_name_;
  Metadata metadata_;
};

}  // namespace chorus::io
