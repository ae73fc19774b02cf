#pragma once
/// MixUp and CutMix: datasets whose samples are mixtures of two samples of another one.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/random_stream.hpp>
#include <chorus/data/transforms.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>
#include <utility>
#include <vector>

namespace chorus::data {

/// Options of MixUp and CutMix.
struct MixOptions {
  float alpha = 1;        ///< the share of the first image is drawn from Beta(alpha, alpha)
  float probability = 1;  ///< of a sample to be mixed
  /// For datasets such as Cifar10, which have none of their own: applied to each of the two images, before they are
  /// mixed.
  std::vector<Transform> transforms = {};
};

namespace detail {

/// The logarithm of a number from the gamma distribution (G. Marsaglia and W. Tsang, 2000,
/// https://doi.org/10.1145/358407.358414).
inline double log_gamma_draw(double alpha, RandomStream& random) {
  const auto uniform = [&] { return 1 - static_cast<double>(random.uniform()); };  // in (0, 1]
  const double boost = alpha < 1 ? std::log(uniform()) / alpha : 0;
  const double d = (alpha < 1 ? alpha + 1 : alpha) - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::numbers::pi * uniform());
    const double v = std::pow(1 + c * x, 3);
    if (v > 0 && std::log(uniform()) < x * x / 2 + d - d * v + d * std::log(v)) return std::log(d * v) + boost;
  }
}

/// A number from Beta(alpha, alpha).
inline double beta_draw(double alpha, RandomStream& random) {
  const double a = log_gamma_draw(alpha, random), b = log_gamma_draw(alpha, random);
  return 1 / (1 + std::exp(b - a));
}

/// What MixUp and CutMix have in common.
template <Dataset D>
class MixedImages {
 public:
  /// The images' size, and the classes' probabilities.
  using Sample = std::pair<Tensor<float, 3>, Tensor<float, 1>>;

  Index size() const { return dataset_->size(); }
  Index classes() const { return classes_; }

 protected:
  MixedImages(const char* who, const D& dataset, Index classes, MixOptions options)
      : who_(who), dataset_(&dataset), classes_(classes), options_(std::move(options)) {
    check<UsageError>(classes >= 1, who, ": expected at least one class, got ", classes);
    check<UsageError>(options_.alpha > 0, who, ": expected an alpha above 0, got ", options_.alpha);
    if constexpr (!LabelledImages<D>)
      check<UsageError>(options_.transforms.empty(), who,
                        ": transforms are for datasets such as Cifar10; give them to this dataset instead");
  }

  /// `mix(first, second, share)` writes the mixture into `first`, and returns the share of its old pixels.
  template <class Mix>
  Sample mixed(Index i, RandomStream& random, const Mix& mix) const {
    auto [image, label] = one(i, random);
    auto target = Tensor<float, 1>::zeros({classes_});
    double share = 1;
    if (random.uniform() < options_.probability) {
      const Index partner = random.below(size());
      const double drawn = beta_draw(options_.alpha, random);
      const auto [other, other_label] = one(partner, random);
      check<ShapeError>(other.shape() == image.shape(), who_, ": expected images of one shape, got ", image.shape(),
                        " of sample ", i, " and ", other.shape(), " of sample ", partner);
      share = mix(image, other, drawn);
      target(other_label) += static_cast<float>(1 - share);
    }
    target(label) += static_cast<float>(share);
    return {std::move(image), std::move(target)};
  }

 private:
  /// A copy of the image, and its label.
  std::pair<Tensor<float, 3>, std::int64_t> one(Index i, RandomStream& random) const {
    Tensor<float, 3> image;
    std::int64_t label = 0;
    if constexpr (LabelledImages<D>) {
      const auto& shape = dataset_->image_shape();
      image = Tensor<float, 3>::empty({shape[0], shape[1], shape[2]});
      const std::span<float> pixels(image.data(), static_cast<std::size_t>(image.numel()));
      label = dataset_->get(i, pixels);
      for (const auto& transform : options_.transforms) transform(Image{pixels, shape}, random);
    } else {
      const auto& [its_image, its_label] = sample_of(*dataset_, i, random);
      image = clone(its_image);
      label = its_label;
    }
    check<UsageError>(label >= 0 && label < classes_, who_, ": expected classes 0 to ", classes_ - 1, ", got ", label,
                      " of sample ", i);
    return {std::move(image), label};
  }

  const char* who_;
  const D* dataset_;
  Index classes_;
  MixOptions options_;
};

}  // namespace detail

/// Averages of two images and of their classes (https://arxiv.org/abs/1710.09412). A sample is a pair: the image, and
/// the probabilities of the classes, for `cross_entropy(net(images), targets)`. The partner, any sample of the dataset,
/// and the share are drawn from the sample's own stream, so that they are the same under every policy.
template <Dataset D>
class MixUp : public detail::MixedImages<D> {
 public:
  /// The dataset has images and labels, and must outlive this. Throws UsageError for an alpha that is not positive.
  MixUp(const D& dataset, Index classes, MixOptions options = {})
      : detail::MixedImages<D>("MixUp", dataset, classes, std::move(options)) {}
  MixUp(const D&&, Index, MixOptions = {}) = delete;

  /// Throws ShapeError if the two images have different shapes, UsageError for a label that is not a class.
  auto get(Index i, RandomStream& random) const {
    return this->mixed(i, random, [](const auto& first, const auto& second, double share) {
      const auto own = static_cast<float>(share), others = static_cast<float>(1 - share);
      for (Index k = 0; k < first.numel(); ++k) first.data()[k] = own * first.data()[k] + others * second.data()[k];
      return share;
    });
  }
};

/// Images with a rectangle of another one; classes have the shares of their pixels (https://arxiv.org/abs/1905.04899).
/// The rectangle's sides are sqrt(1 - share) of the image's; its centre is uniform, and what is outside is cut off. All
/// else is as with MixUp.
template <Dataset D>
class CutMix : public detail::MixedImages<D> {
 public:
  /// The dataset has images and labels, and must outlive this. Throws UsageError for an alpha that is not positive.
  CutMix(const D& dataset, Index classes, MixOptions options = {})
      : detail::MixedImages<D>("CutMix", dataset, classes, std::move(options)) {}
  CutMix(const D&&, Index, MixOptions = {}) = delete;

  /// Throws ShapeError if the two images have different shapes, UsageError for a label that is not a class.
  auto get(Index i, RandomStream& random) const {
    return this->mixed(i, random, [&](const auto& first, const auto& second, double share) {
      const Index height = first.size(1), width = first.size(2);
      const Index y = random.below(height), x = random.below(width);
      const auto half = [&](Index side) {
        return static_cast<Index>(std::sqrt(1 - share) * static_cast<double>(side) / 2);
      };
      const Index top = std::max<Index>(y - half(height), 0), bottom = std::min(y + half(height), height);
      const Index left = std::max<Index>(x - half(width), 0), right = std::min(x + half(width), width);
      for (Index c = 0; c < first.size(0); ++c)
        for (Index row = top; row < bottom; ++row) {
          const Index at = (c * height + row) * width + left;
          std::copy_n(second.data() + at, right - left, first.data() + at);
        }
      return 1 - static_cast<double>((bottom - top) * (right - left)) / static_cast<double>(height * width);
    });
  }
};

}  // namespace chorus::data
