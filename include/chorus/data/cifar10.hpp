#pragma once
/// CIFAR-10: 32 x 32 colour images of ten kinds of things, in its binary form: records of one label byte and 3072
/// pixels, red, green, blue (A. Krizhevsky: "Learning multiple layers of features from tiny images", 2009).

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
  /// Reads `data_batch_1.bin` to `data_batch_5.bin` (for the test split `test_batch.bin`) from the folder or from
  /// `cifar-10-batches-bin` in it. Throws FileError with the path where one is missing, and says what is there, or
  /// where its size or a label is wrong.
  explicit Cifar10(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// Where the binary batches lie: the folder, or `cifar-10-batches-bin` in it; nothing where neither has any.
  static std::string find(const std::string& folder);
  /// What to do where the folder has CIFAR-10 in another form, for a message: `; ...`; else nothing.
  static std::string advice(const std::string& folder);

 private:
  static constexpr std::size_t pixels_per_image = 3 * 32 * 32;

  static ImageDataset read(const std::string& folder, Split split);

  static void read_batch(const std::string& path, std::vector<std::uint8_t>& pixels, std::vector<std::uint8_t>& labels);
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/cifar10_impl.hpp>
#endif
