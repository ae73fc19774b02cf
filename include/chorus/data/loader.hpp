#pragma once
/// DataLoader: batches of a dataset as tensors, prepared by background threads while the caller trains on the one
/// before.

#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/data/transforms.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::data {

/// One rank's share of a global batch: `auto& [images, labels] = batch;`.
struct Batch {
  Tensor<float, 4> images;         ///< [samples, channels, height, width]; samples is 0 where the share is empty
  Tensor<std::int64_t, 1> labels;  ///< [samples]
  Index index = 0;                 ///< number of the batch in its epoch
  Index global_size = 0;           ///< samples in the global batch, over all ranks
  Index first_sample = 0;          ///< place of images[0] in the global batch
  /// [views, samples, channels, height, width]: each sample as often as LoaderOptions::views says, augmented
  /// independently. views[0] is `images`, views[1] another view of the same samples, and
  /// views.view(Shape<4>{views * samples, channels, height, width}) has one view after the other.
  Tensor<float, 5> views = {};

  template <std::size_t I>
  auto& get() {
    return std::get<I>(std::tie(images, labels));
  }
  template <std::size_t I>
  auto& get() const {
    return std::get<I>(std::tie(images, labels));
  }
};

struct LoaderOptions {
  Index batch = 64;        ///< samples in a global batch: shared out among the ranks
  int workers = 2;         ///< threads that prepare batches; 0: the caller's thread does
  int prefetch = 2;        ///< batches that each worker may be ahead
  bool drop_last = false;  ///< leave out a last batch that isn't full
  bool normalize = true;   ///< apply the dataset's own normalisation, where it has one, after the transforms
  std::vector<Transform> transforms = {};
  /// Augmented views of each sample in a batch (two: SimCLR, MoCo), 1 to 1024. The dataset is asked for a sample once.
  int views = 1;
  /// Of the random transforms; else the sampler's. Two loaders with one sampler's seed and other seeds here have the
  /// same samples in the same order, and see each in another way.
  std::optional<std::uint64_t> augmentation_seed = {};
};

namespace detail {

/// What a loader needs of its dataset, whatever its type.
struct Source {
  Index size;
  ImageShape image_shape;
  std::function<std::int64_t(Index, std::span<float>)> get;
  std::optional<Normalize> normalization;
};

struct LoaderPass;

/// All of DataLoader that doesn't depend on the dataset's type.
class Loader {
 public:
  Loader(Source source, Sampler sampler, LoaderOptions options);

  /// Batches in an epoch.
  Index size() const { return batches_; }
  const Sampler& sampler() const { return sampler_; }

  /// Takes the order and the augmentation of another epoch, from the next begin() on. Passes that are under way go on
  /// in theirs.
  void set_epoch(Index epoch);

  /// Lets the pass of the next begin() start at batch `batches`, to go on where an earlier run was left; the one after
  /// is whole again.
  void skip(Index batches);

  /// Reads the batches of one pass one by one. Copies of an iterator are the same place; that of another begin() is
  /// one of its own.
  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(std::shared_ptr<LoaderPass> pass) : pass_(std::move(pass)) {}
    /// Throws UsageError at the end.
    Batch& operator*() const;
    Batch* operator->() const { return &**this; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const;

   private:
    std::shared_ptr<LoaderPass> pass_;
  };

  /// Starts a pass of its own, with workers of its own. Says once on stderr, on rank 0, where shuffled data come in one
  /// order again since nobody has called set_epoch.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 protected:
  ~Loader() = default;
  Loader(Loader&&) = default;
  Loader& operator=(Loader&&) = default;

 private:
  struct Plan {
    Source source;
    LoaderOptions options;
  };
  friend struct LoaderPass;

  std::shared_ptr<const Plan> plan_;  // passes, which may outlive the loader, have it, too
  Sampler sampler_;
  Index batches_ = 0, skip_ = 0;
  int epochs_unset_ = 0;  // begun since the loader was made, until set_epoch is called
  /// The one begun last: `auto& batch = *loader.begin()` is good until the next begin().
  std::shared_ptr<LoaderPass> newest_;
  std::weak_ptr<LoaderPass> epoch_;  // the one that epochs_unset_ has counted last
};

}  // namespace detail

/// Batches of `dataset`, in the order and the shares of `sampler`; the loader keeps a reference to the dataset, which
/// must outlive it. Each pass of `for (auto& [images, labels] : loader)` is an epoch; the same one again unless
/// `set_epoch` says otherwise. Threads live from begin() to the end of the epoch, to the next begin() or to the
/// loader's destruction. What a worker throws is rethrown to the caller, at the batch where it happened.
template <Dataset D>
class DataLoader : public detail::Loader {
 public:
  /// Throws UsageError where the sampler is for another size, or an option makes no sense.
  DataLoader(const D& dataset, Sampler sampler, LoaderOptions options = {})
      : Loader(source_of(dataset), std::move(sampler), std::move(options)), dataset_(&dataset) {}
  DataLoader(const D&&, Sampler, LoaderOptions = {}) = delete;  // the dataset would be gone at once

  const D& dataset() const { return *dataset_; }

 private:
  static detail::Source source_of(const D& dataset) {
    detail::Source source{dataset.size(), dataset.image_shape(),
                          [&dataset](Index i, std::span<float> image) { return dataset.get(i, image); }, std::nullopt};
    if constexpr (requires {
                    { dataset.normalization() } -> std::convertible_to<Normalize>;
                  })
      source.normalization = dataset.normalization();
    return source;
  }

  const D* dataset_;
};

}  // namespace chorus::data

// A batch takes part in structured bindings as its images and labels.
template <>
struct std::tuple_size<chorus::data::Batch> : std::integral_constant<std::size_t, 2> {};
template <>
struct std::tuple_element<0, chorus::data::Batch> {
  using type = chorus::Tensor<float, 4>;
};
template <>
struct std::tuple_element<1, chorus::data::Batch> {
  using type = chorus::Tensor<std::int64_t, 1>;
};

#if !CHORUS_COMPILED
#include <chorus/data/loader_impl.hpp>
#endif
