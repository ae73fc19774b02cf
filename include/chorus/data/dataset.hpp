#pragma once
/// What a loader asks of a dataset, and the form that the library's own take: images as bytes in memory.

#include <chorus/core/error.hpp>
#include <chorus/data/transforms.hpp>
#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::data {

/// Which part of a dataset.
enum class Split : std::uint8_t { train, test };

constexpr std::string_view name(Split split) { return split == Split::train ? "train" : "test"; }

/// A numbered collection of labelled images of one size. `get(i, image)` fills `image`, [channels, height, width] with
/// pixels in [0, 1], and returns the label, in [0, classes()); it is called on several threads at once, and it has to
/// return: a loader waits for it. A dataset may also have `Normalize normalization() const`, which a loader applies by
/// default.
template <class D>
concept Dataset = requires(const D& dataset, Index i, std::span<float> image) {
  { dataset.size() } -> std::convertible_to<Index>;
  { dataset.classes() } -> std::convertible_to<Index>;
  { dataset.image_shape() } -> std::convertible_to<ImageShape>;
  { dataset.get(i, image) } -> std::convertible_to<std::int64_t>;
};

/// Images and labels in memory, a byte a pixel and a byte a label. Mnist, Cifar10 and SyntheticImages are ways to fill
/// one, so that a program can choose between them at run time: `ImageDataset train = SyntheticImages{8000, seed};`
class ImageDataset {
 public:
  /// `pixels`: [labels.size(), channels, height, width]. Throws UsageError where the sizes don't fit.
  ImageDataset(ImageShape shape, std::vector<std::uint8_t> pixels, std::vector<std::uint8_t> labels, Index classes,
               Normalize normalization)
      : shape_(shape),
        pixels_(std::move(pixels)),
        labels_(std::move(labels)),
        classes_(classes),
        normalization_(std::move(normalization)) {
    check<UsageError>(pixels_.size() == labels_.size() * pixels_per_image(), "ImageDataset: ", pixels_.size(),
                      " pixels are not ", labels_.size(), " images of shape ", shape_);
  }

  Index size() const { return static_cast<Index>(labels_.size()); }
  Index classes() const { return classes_; }
  const ImageShape& image_shape() const { return shape_; }
  /// Mean and standard deviation of the pixels by channel, as they are commonly used with this dataset.
  const Normalize& normalization() const { return normalization_; }

  std::int64_t get(Index i, std::span<float> image) const {
    check<UsageError>(i >= 0 && i < size(), "dataset: sample ", i, " is not in [0, ", size(), ")");
    const std::size_t count = pixels_per_image(), at = static_cast<std::size_t>(i);
    check<ShapeError>(image.size() == count, "dataset: expected room for ", count, " pixels, got ", image.size());
    const std::uint8_t* bytes = pixels_.data() + at * count;
    for (std::size_t p = 0; p < count; ++p) image[p] = static_cast<float>(bytes[p]) / 255.0f;
    return labels_[at];
  }

 private:
  std::size_t pixels_per_image() const { return static_cast<std::size_t>(shape_[0] * shape_[1] * shape_[2]); }

  ImageShape shape_;
  std::vector<std::uint8_t> pixels_, labels_;
  Index classes_;
  Normalize normalization_;
};

}  // namespace chorus::inline CHORUS_ABI::data
