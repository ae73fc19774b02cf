#pragma once
/// MNIST: 28 x 28 grey images of handwritten digits, in a folder of IDX files, plain or compressed. Fashion-MNIST and
/// KMNIST come in the same files.

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <string>

namespace chorus::data {

/// Images of shape {1, 28, 28} (or the file's size) and labels from 0 to 9.
class Mnist : public ImageDataset {
 public:
  /// Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (for the test split `t10k-...`), also with a dot in
  /// front of `idx`, each plain, with `.gz`, or in a folder of its own name, as Kaggle has them. Both lie in the
  /// folder, or in `raw` or `MNIST/raw` in it, as torchvision has them. Throws FileError with the path and the contents
  /// of the folder if one is missing, if one is malformed, or if they don't fit each other.
  explicit Mnist(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// The path of one of MNIST's files, under any of its names; nothing if it is missing.
  static std::string find(const std::string& folder, Split split, const char* suffix);
  static constexpr const char* images = "-images-idx3-ubyte";
  static constexpr const char* labels = "-labels-idx1-ubyte";

 private:
  [[gnu::cold]] static ImageDataset read(const std::string& folder, Split split);
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/mnist_impl.hpp>
#endif
