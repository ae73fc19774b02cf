#pragma once
/// ImageFolder: folders of PNG and JPEG files, a class a folder. The CMake target chorus::images links libpng and
/// libjpeg.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/file.hpp>
#include <chorus/data/images/color.hpp>
#include <chorus/data/images/decode.hpp>
#include <chorus/data/images/framed.hpp>
#include <chorus/data/images/frames.hpp>
#include <chorus/data/images/mixing.hpp>
#include <chorus/data/transforms.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace chorus::data {

/// Options of ImageFolder.
struct ImageFolderOptions {
  /// Which part of a picture is read, and of which size it becomes: RandomResizedCrop, CenterCrop, Resize or a function
  /// of your own. Without one, the whole picture as it is; batches then need pictures of one size.
  Framing frame = {};
  /// What follows, in [0, 1]: RandomHorizontalFlip, ColorJitter, RandomCrop, ..., last Normalize.
  std::vector<Transform> transforms = {};
};

/// As torchvision's ImageFolder: the classes are the folders in `folder`, sorted by name, and their samples all `.jpg`,
/// `.jpeg` and `.png` files in them and below, sorted by path. Sample i is the pair of a Tensor [3, height, width] and
/// the class. Files are read and decoded when they are used, by the loader's workers. Random frames and transforms draw
/// from the sample's own stream.
class ImageFolder {
 public:
  /// A file and the number of its class.
  using Entry = std::pair<std::string, std::int64_t>;

  /// Throws FileError if there is no folder of a class, if one has no image, or if one has images of another format.
  explicit ImageFolder(const std::string& folder, ImageFolderOptions options = {}) : options_(std::move(options)) {
    require_folder("ImageFolder", folder);
    for (const auto& [name, is_folder] : list(folder))
      if (is_folder) classes_.push_back(name);
    check<FileError>(!classes_.empty(), "ImageFolder: expected a folder for each class in ", printable(folder),
                     ", got none", list_folder(folder));
    std::vector<std::string> around = {real_path(folder)};
    for (std::size_t i = 0; i < classes_.size(); ++i) {
      const std::string of_class = cat(folder, "/", classes_[i]);
      const std::size_t before = samples_.size();
      walk(of_class, static_cast<std::int64_t>(i), around);
      check<FileError>(samples_.size() > before, "ImageFolder: expected .jpg, .jpeg or .png files in each class's ",
                       "folder, got none in ", printable(of_class), list_folder(of_class));
      // As torchvision: by the folder's path, then by name.
      const auto parts = [](const Entry& sample) {
        const std::size_t slash = sample.first.rfind('/');
        return std::pair(sample.first.substr(0, slash), sample.first.substr(slash));
      };
      std::sort(samples_.begin() + static_cast<std::ptrdiff_t>(before), samples_.end(),
                [&](const Entry& a, const Entry& b) { return parts(a) < parts(b); });
    }
  }

  Index size() const { return static_cast<Index>(samples_.size()); }
  /// The names of the classes; a label is a place in this list.
  const std::vector<std::string>& classes() const { return classes_; }
  const std::vector<Entry>& samples() const { return samples_; }

  /// Reads and decodes the file. Throws FileError with its path.
  std::pair<Tensor<float, 3>, std::int64_t> get(Index i, RandomStream& random) const {
    detail::check_place("ImageFolder", i, size());
    const auto& [path, label] = samples_[static_cast<std::size_t>(i)];
    const Picture picture = read_image(path);
    auto image = framed(picture, options_.frame ? options_.frame(picture.height(), picture.width(), random)
                                                : detail::whole_picture(picture.height(), picture.width()));
    const Image pixels{{image.data(), static_cast<std::size_t>(image.numel())},
                       {image.size(0), image.size(1), image.size(2)}};
    for (const auto& transform : options_.transforms) transform(pixels, random);
    return {std::move(image), label};
  }

 private:
  /// What a folder holds, and which of it are folders; sorted by the names' bytes.
  static std::vector<std::pair<std::string, bool>> list(const std::string& folder) {
    std::vector<std::pair<std::string, bool>> out;
    std::error_code trouble;
    for (std::filesystem::directory_iterator at(folder, trouble), end; !trouble && at != end; at.increment(trouble))
      out.emplace_back(at->path().filename().string(), is_folder(at->path().string()));
    check<FileError>(!trouble, "ImageFolder: ", printable(folder), ": ", trouble.message());
    std::sort(out.begin(), out.end());
    return out;
  }
  static std::string real_path(const std::string& folder) {
    std::error_code trouble;
    const auto path = std::filesystem::canonical(folder, trouble);
    check<FileError>(!trouble, "ImageFolder: ", printable(folder), ": ", trouble.message());
    return path.string();
  }

  /// `around`: the real paths of the folders around this one. Links to folders are followed.
  void walk(const std::string& folder, std::int64_t label, std::vector<std::string>& around) {
    around.push_back(real_path(folder));
    check<FileError>(std::find(around.begin(), around.end() - 1, around.back()) == around.end() - 1,
                     "ImageFolder: ", printable(folder), " is a link to a folder around it");
    for (const auto& [name, is_folder] : list(folder)) {
      const std::string path = cat(folder, "/", name);
      if (is_folder) {
        walk(path, label, around);
        continue;
      }
      std::string ending = name.substr(std::min(name.rfind('.'), name.size()));
      for (char& letter : ending)
        if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
      if (ending == ".jpg" || ending == ".jpeg" || ending == ".png") samples_.emplace_back(path, label);
      // Not passed over, since torchvision reads them.
      for (const char* other : {".bmp", ".pgm", ".ppm", ".tif", ".tiff", ".webp"})
        check<FileError>(ending != other, "ImageFolder: ", printable(path),
                         ": expected .jpg, .jpeg or .png files; convert or remove it");
    }
    around.pop_back();
  }

  ImageFolderOptions options_;
  std::vector<std::string> classes_;
  std::vector<Entry> samples_;
};

}  // namespace chorus::data
