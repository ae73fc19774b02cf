#pragma once
/// MNIST: 28 x 28 grey images of handwritten digits, in a folder of IDX files, plain or compressed. Fashion-MNIST and
/// KMNIST come in the same files.

#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/file.hpp>
#include <chorus/data/idx.hpp>
#include <string>

namespace chorus::inline CHORUS_ABI::data {

/// Images of shape {1, 28, 28} (or what size the file says) and labels from 0 to 9.
class Mnist : public ImageDataset {
 public:
  /// Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (for the test split `t10k-...`), each as it is or
  /// with
  /// `.gz`. Throws FileError with the path where one is missing or malformed, or where they don't fit each other.
  explicit Mnist(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// The plain or compressed form of one of MNIST's files, or nothing where the folder has neither.
  static std::string find(const std::string& folder, Split split, const char* suffix) {
    const std::string plain = cat(folder, "/", split == Split::train ? "train" : "t10k", suffix);
    if (file_exists(plain)) return plain;
    return file_exists(plain + ".gz") ? plain + ".gz" : std::string();
  }
  static constexpr const char* images = "-images-idx3-ubyte";
  static constexpr const char* labels = "-labels-idx1-ubyte";

 private:
  static std::string require(const std::string& folder, Split split, const char* suffix) {
    std::string path = find(folder, split, suffix);
    check<FileError>(!path.empty(), "Mnist: folder ", folder, " has no ", split == Split::train ? "train" : "t10k",
                     suffix, ", neither plain nor .gz");
    return path;
  }

  static ImageDataset read(const std::string& folder, Split split) {
    require_folder("Mnist", folder);
    const std::string image_path = require(folder, split, images), label_path = require(folder, split, labels);
    IdxArray pixels = read_idx(image_path, 3), classes = read_idx(label_path, 1);
    check<FileError>(pixels.sizes[0] == classes.sizes[0], "Mnist: ", image_path, " has ", pixels.sizes[0],
                     " images, but ", label_path, " has ", classes.sizes[0], " labels");
    for (std::size_t i = 0; i < classes.values.size(); ++i)
      check<FileError>(classes.values[i] < 10, "Mnist: ", label_path, ": label ", i, " is ", int{classes.values[i]},
                       ", expected 0 to 9");
    return {{1, pixels.sizes[1], pixels.sizes[2]},
            std::move(pixels.values),
            std::move(classes.values),
            10,
            {{0.1307f}, {0.3081f}}};
  }
};

}  // namespace chorus::inline CHORUS_ABI::data
