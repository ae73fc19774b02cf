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
  /// `cifar-10-batches-bin` in it. Throws FileError with the path and the contents of the folder if a file is missing,
  /// or if its size or a label is wrong.
  explicit Cifar10(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// The folder of the binary batches: the folder itself, or `cifar-10-batches-bin` in it; nothing if neither has any.
  [[gnu::cold]] static std::string find(const std::string& folder);
  /// Advice for a message if the folder has CIFAR-10 in another form: `; ...`; otherwise empty.
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
