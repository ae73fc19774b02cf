#pragma once
/// CIFAR-10: 32 x 32 colour images of ten classes, in its binary format: records of one label byte and 3072 pixels,
/// red, green, blue (A. Krizhevsky: "Learning multiple layers of features from tiny images", 2009).

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace chorus::data {

/// Images of shape {3, 32, 32} and labels from 0 to 9.
class Cifar10 : public ImageDataset {
 public:
  /// Reads `data_batch_1.bin` to `data_batch_5.bin` (`test_batch.bin` for the test split) from the folder or its
  /// subfolder `cifar-10-batches-bin`. Throws FileError with the path and the folder's contents if a file is missing,
  /// or if its size or a label is invalid.
  explicit Cifar10(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// The folder with the binary batches: the folder itself or its `cifar-10-batches-bin`; empty if neither has any.
  [[gnu::cold]] static std::string find(const std::string& folder);
  /// Advice for error messages if the folder has CIFAR-10 in another format: `; ...`; otherwise empty.
  [[gnu::cold]] static std::string advice(const std::string& folder);

 private:
  static constexpr std::size_t pixels_per_image = 3 * 32 * 32;

  [[gnu::cold]] static ImageDataset read(const std::string& folder, Split split);

  [[gnu::cold]] static void read_batch(const std::string& path, std::vector<std::uint8_t>& pixels,
                                       std::vector<std::uint8_t>& labels);
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/cifar10_impl.hpp>
#endif
