#pragma once
/// MNIST: 28 x 28 grey images of handwritten digits, in IDX files, plain or compressed. Fashion-MNIST and KMNIST have
/// the same files.

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <string>

namespace chorus::data {

/// Images of shape {1, 28, 28} (or the file's size) and labels from 0 to 9.
class Mnist : public ImageDataset {
 public:
  /// Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (`t10k-...` for the test split), also with a dot
  /// before `idx`; each plain, with `.gz`, or in a folder of the same name (as on Kaggle). Both are in the folder, or
  /// in its `raw` or `MNIST/raw` (as in torchvision). Throws FileError with the path and the folder's contents if a
  /// file is missing or malformed, or if the two don't match.
  explicit Mnist(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// The path of one of MNIST's files, under any of its names; empty if it is missing.
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
