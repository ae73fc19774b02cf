#pragma once
/// A folder of NumPy arrays as a dataset.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/file.hpp>
#include <chorus/io/npy.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace chorus::io {

/// The `.npy` files of a folder, sorted by name: sample i is the i-th array, read on demand, and its class. Classes are
/// the folder's subfolders, numbered by sorted name, as in torchvision's ImageFolder; without subfolders all samples
/// have class 0.
template <Scalar T, int Rank>
class NpyFolder {
 public:
  /// Throws FileError if the folder can't be read, has no such file, or has files next to subfolders with files.
  explicit NpyFolder(const std::string& folder) {
    data::require_folder("NpyFolder", folder);
    std::vector<std::string> subfolders;
    list(folder, 0, &subfolders);
    const bool plain = !files_.empty();
    std::sort(subfolders.begin(), subfolders.end());
    for (const auto& name : subfolders) {
      const std::size_t before = files_.size();
      list(cat(folder, "/", name), static_cast<std::int64_t>(classes_.size()), nullptr);
      if (files_.size() == before) continue;
      check<FileError>(!plain, "NpyFolder: ", printable(folder), " has .npy files, and so has ", printable(name),
                       " in it: expected them in the folder, or in subfolders, one for each class");
      classes_.push_back(name);
    }
    check<FileError>(!files_.empty(), "NpyFolder: expected .npy files in ", printable(folder),
                     " or in its subfolders, got none", data::list_folder(folder));
  }

  Index size() const { return static_cast<Index>(files_.size()); }
  /// Names of the subfolders; none if the files are in the folder itself.
  const std::vector<std::string>& classes() const { return classes_; }
  /// Throws FileError if the file is not an array of T with that number of axes.
  std::pair<Tensor<T, Rank>, std::int64_t> get(Index i) const {
    data::detail::check_place("NpyFolder", i, size());
    const auto& [path, label] = files_[static_cast<std::size_t>(i)];
    return {load_npy<T, Rank>(path), label};
  }

 private:
  void list(const std::string& folder, std::int64_t label, std::vector<std::string>* subfolders) {
    const std::size_t first = files_.size();
    std::error_code trouble;
    for (std::filesystem::directory_iterator at(folder, trouble), end; !trouble && at != end; at.increment(trouble)) {
      const std::string name = at->path().filename().string();
      if (subfolders != nullptr && data::is_folder(at->path().string()))
        subfolders->push_back(name);
      else if (name.ends_with(".npy"))
        files_.emplace_back(at->path().string(), label);
    }
    check<FileError>(!trouble, "NpyFolder: ", printable(folder), ": ", trouble.message());
    std::sort(files_.begin() + static_cast<std::ptrdiff_t>(first), files_.end());
  }

  std::vector<std::pair<std::string, std::int64_t>> files_;
  std::vector<std::string> classes_;
};

}  // namespace chorus::io
