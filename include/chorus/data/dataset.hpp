#pragma once
/// The dataset interface of loaders, and ImageDataset: images as bytes in memory.

#include <chorus/core/error.hpp>
#include <chorus/data/random_stream.hpp>
#include <chorus/data/transforms.hpp>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::data {

/// Which part of a dataset.
enum class Split : std::uint8_t { train, test };

constexpr std::string_view name(Split split) { return split == Split::train ? "train" : "test"; }

/// A dataset of labelled images of one size. `get(i, image)` fills `image`, [channels, height, width] with pixels in
/// [0, 1], and returns the label, in [0, classes()). Several threads call it concurrently. It must not block for ever,
/// since a loader waits for it. A loader applies `Normalize normalization() const` by default, if the dataset has it.
template <class D>
concept LabelledImages = requires(const D& dataset, Index i, std::span<float> image) {
  { dataset.size() } -> std::convertible_to<Index>;
  { dataset.classes() } -> std::convertible_to<Index>;
  { dataset.image_shape() } -> std::convertible_to<ImageShape>;
  { dataset.get(i, image) } -> std::convertible_to<std::int64_t>;
};

namespace detail {
inline void check_place(const char* who, Index i, Index size) {
  check<UsageError>(i >= 0 && i < size, who, ": sample ", i, " is not in [0, ", size, ")");
}

template <class D>
concept DrawsSamples = requires(const D& dataset, Index i, RandomStream& random) {
  requires !std::is_void_v<decltype(dataset.get(i, random))>;
};
template <class D>
concept ReadsSamples = requires(const D& dataset, Index i) {
  requires !std::is_void_v<decltype(dataset.get(i))>;
};
}  // namespace detail

/// A dataset of any samples. `get(i)` returns a sample: a number, a Tensor on the CPU, a text, or a pair, tuple or
/// plain struct of these. Several threads call it concurrently. `get(i, random)`, with a `RandomStream& random`, may
/// draw random numbers for augmentation. They depend only on (seed, epoch, sample), not on the thread or rank that
/// prepares the sample.
template <class D>
concept Samples = requires(const D& dataset) {
  { dataset.size() } -> std::convertible_to<Index>;
}
&&(detail::DrawsSamples<D> || detail::ReadsSamples<D>);

/// Anything that a DataLoader accepts.
template <class D>
concept Dataset = LabelledImages<D> || Samples<D>;

namespace detail {
template <Samples D>
auto sample_of(const D& dataset, Index i, RandomStream& random) {
  if constexpr (DrawsSamples<D>)
    return dataset.get(i, random);
  else
    return dataset.get(i);
}
template <class D>
using SampleOf = decltype(sample_of(std::declval<const D&>(), Index{}, std::declval<RandomStream&>()));
}  // namespace detail

/// Images and labels in memory, one byte per pixel and per label; copies share them. Mnist, Cifar10 and SyntheticImages
/// derive from it, so that a program can choose at run time: `ImageDataset train = SyntheticImages{8000, seed};`
class ImageDataset {
 public:
  /// Fills the pixels of image i, [channels, height, width], and returns its label. Called on several threads.
  using Make = std::function<std::uint8_t(Index i, std::span<std::uint8_t> pixels)>;

  /// `pixels`: [labels.size(), channels, height, width]. Throws UsageError if sizes don't match.
  ImageDataset(ImageShape shape, std::vector<std::uint8_t> pixels, std::vector<std::uint8_t> labels, Index classes,
               Normalize normalization)
      : shape_(shape),
        size_(static_cast<Index>(labels.size())),
        classes_(classes),
        normalization_(std::move(normalization)) {
    check<UsageError>(pixels.size() == labels.size() * pixels_per_image(), "ImageDataset: ", pixels.size(),
                      " pixels are not ", labels.size(), " images of shape ", shape_);
    pixels_ = shared(std::move(pixels));
    labels_ = shared(std::move(labels));
  }

  /// `count` images. `make` creates each image at its first access; others take no time and no memory.
  ImageDataset(ImageShape shape, Index count, Index classes, Normalize normalization, Make make)
      : shape_(shape),
        size_(count),
        classes_(classes),
        normalization_(std::move(normalization)),
        // Not initialised, so that untouched pages are never allocated.
        pixels_(new std::uint8_t[static_cast<std::size_t>(count) * pixels_per_image()]),
        labels_(new std::uint8_t[static_cast<std::size_t>(count)]),
        make_(std::move(make)),
        made_(new std::once_flag[static_cast<std::size_t>(count)]) {}

  Index size() const { return size_; }
  Index classes() const { return classes_; }
  const ImageShape& image_shape() const { return shape_; }
  /// Mean and standard deviation of the pixels per channel, as usual for this dataset.
  const Normalize& normalization() const { return normalization_; }

  std::int64_t get(Index i, std::span<float> image) const {
    detail::check_place("dataset", i, size());
    const std::size_t count = pixels_per_image(), at = static_cast<std::size_t>(i);
    check<ShapeError>(image.size() == count, "dataset: expected room for ", count, " pixels, got ", image.size());
    std::uint8_t* bytes = pixels_.get() + at * count;
    if (make_) std::call_once(made_.get()[at], [&] { labels_.get()[at] = make_(i, {bytes, count}); });
    for (std::size_t p = 0; p < count; ++p) image[p] = static_cast<float>(bytes[p]) / 255.0f;
    return labels_.get()[at];
  }

 private:
  using Bytes = std::shared_ptr<std::uint8_t[]>;

  static Bytes shared(std::vector<std::uint8_t>&& bytes) {
    const auto owner = std::make_shared<std::vector<std::uint8_t>>(std::move(bytes));
    return {owner, owner->data()};
  }

  std::size_t pixels_per_image() const { return static_cast<std::size_t>(shape_[0] * shape_[1] * shape_[2]); }

  ImageShape shape_;
  Index size_, classes_;
  Normalize normalization_;
  Bytes pixels_, labels_;
  Make make_;  // empty if all images exist from the start
  std::shared_ptr<std::once_flag[]> made_;
};

}  // namespace chorus::data
