#pragma once
/// Assigns the names of a file's tensors to the names of a model's tensors.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/io/load_options.hpp>
#include <chorus/io/tensor_place.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io::detail {

/// All names of a model's tensors; tied ones have several.
using NameSet = std::set<std::string, std::less<>>;

/// Maps names in the file to the model's: applies the user's function, then removes the prefixes of PyTorch's wrappers.
class FileNames {
 public:
  FileNames(const auto& file, const NameSet& model, const Rename& rename)
      : model_(model), rename_(rename) {
    std::vector<std::string> names;
    for (const TensorEntry& entry : file.entries())
      if (auto name = own_name(entry.name); !name.empty()) names.push_back(std::move(name));
    // A model may itself use the prefix of DataParallel and DistributedDataParallel: it is removed only if all names
    // have it.
    const auto is_wrapped = [&](const std::string& name) {
      return name.starts_with(parallel) && !model.contains(name);
    };
    for (; !names.empty() && std::ranges::all_of(names, is_wrapped); ++wrappers_)
      for (auto& name : names) name.erase(0, parallel.size());
  }

  /// The model's name of the tensor; "" if it is skipped.
  std::string operator()(std::string_view in_file) const {
    auto name = own_name(in_file);
    for (int i = 0; i < wrappers_ && name.starts_with(parallel); ++i) name.erase(0, parallel.size());
    return name;
  }

 private:
  static constexpr std::string_view parallel = "module.";

  std::string own_name(std::string_view in_file) const {
    if (in_file.starts_with(training_prefix)) return {};
    std::string name = rename_ ? rename_(in_file) : std::string(in_file);
    if (model_.contains(name)) return name;
    // No model has members with these names: torch.compile, FSDP, activation checkpointing, Lightning and DeepSpeed add
    // them.
    for (const std::string_view wrapper :
         {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module."})
      for (std::size_t at = 0; (at = name.find(wrapper, at)) != name.npos;)
        if (at == 0 || name[at - 1] == '.')
          name.erase(at, wrapper.size());
        else
          ++at;
    return name;
  }

  const NameSet& model_;
  const Rename& rename_;
  int wrappers_ = 0;
};

/// The tensors of a file by their names in the model.
class FileTensors {
 public:
  /// Throws FileError if two tensors map to one name.
  FileTensors(const auto& file, const NameSet& model, const Rename& rename) {
    const FileNames model_name(file, model, rename);
    for (const TensorEntry& entry : file.entries()) {
      const auto name = model_name(entry.name);
      if (name.empty() && !entry.name.empty()) continue;  // skipped
      if (!model.contains(name)) {
        unexpected_.push_back({name, entry.name});
        continue;
      }
      const auto [there, is_new] = tensors_.emplace(name, &entry);
      check<FileError>(is_new, "loading ", file.path(), ": the tensors ", Quoted{there->second->name}, " and ",
                       Quoted{entry.name}, " both match the model's ", Quoted{name},
                       "; a LoadOptions::rename that returns \"\" for one of them leaves it out");
    }
    // Python's save_model writes tied tensors once, and records their other names in the metadata.
    for (const auto& [name, other] : file.metadata())
      if (const TensorEntry* entry = file.find(other); entry != nullptr && !model_name(name).empty())
        tensors_.emplace(model_name(name), entry);
  }

  /// The tensor of that name, or nullptr.
  const TensorEntry* find(std::string_view name) const {
    const auto found = tensors_.find(name);
    return found != tensors_.end() ? found->second : nullptr;
  }
  struct Unexpected {
    std::string name, in_file;
  };
  /// The tensors that the model does not have.
  const std::vector<Unexpected>& unexpected() const { return unexpected_; }

 private:
  std::map<std::string, const TensorEntry*, std::less<>> tensors_;
  std::vector<Unexpected> unexpected_;
};

}  // namespace chorus::io::detail
