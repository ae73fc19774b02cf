#pragma once
/// DataLoader: batches of a dataset as tensors. Background threads prepare them while the caller trains on the previous
/// batch.

#include <chorus/core/error.hpp>
#include <chorus/data/collate.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/random_stream.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/data/transforms.hpp>
#include <chorus/tensor/tensor.hpp>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::data {

/// One rank's share of a global batch: `auto& [images, labels] = batch;`.
struct Batch {
  Tensor<float, 4> images;         ///< [samples, channels, height, width]; samples is 0 if the share is empty
  Tensor<std::int64_t, 1> labels;  ///< [samples]
  Index index = 0;                 ///< index of the batch in its epoch
  Index global_size = 0;           ///< samples in the global batch, over all ranks
  Index first_sample = 0;          ///< index of images[0] in the global batch
  /// [views, samples, channels, height, width]: LoaderOptions::views independent augmentations of each sample. views[0]
  /// is `images`, views[1] another view of the same samples; views.view(Shape<4>{views * samples, channels, height,
  /// width}) concatenates the views.
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

/// Options of DataLoader.
struct LoaderOptions {
  Index batch = 64;        ///< samples in a global batch, which the ranks share
  int workers = 2;         ///< threads that prepare batches; 0: the caller's thread
  int prefetch = 2;        ///< batches that each worker may prepare in advance
  bool drop_last = false;  ///< skip an incomplete last batch
  // For images only; other datasets draw random numbers in `get(i, random)`.
  bool normalize = true;  ///< apply the dataset's normalisation, if it has one, after the transforms
  std::vector<Transform> transforms = {};
  /// The number of augmented views per sample (two for SimCLR, MoCo), 1 to 1024. The dataset is read once per sample.
  int views = 1;
  /// The seed of random transforms; by default the sampler's. Two loaders with the same sampler seed and different
  /// augmentation seeds have the same samples in the same order, with different augmentation.
  std::optional<std::uint64_t> augmentation_seed = {};
};

namespace detail {

/// A type-erased dataset of images.
struct ImageSource {
  ImageShape image_shape;
  std::function<std::int64_t(Index, std::span<float>)> get;
  LoaderOptions options;

  /// Called on the workers' threads.
  Batch make(const Sampler& sampler, Index b) const;
};

/// Throws UsageError if the sampler is for another dataset size, or an option is invalid.
void check_loader(Index dataset_size, const Sampler& sampler, const LoaderOptions& options);

/// Throws UsageError if options for images are set.
void refuse_image_options(const LoaderOptions& options);

/// Warns once on stderr, on rank 0, that set_epoch is never called.
void warn_of_one_order(const Sampler& sampler);

template <class B>
struct LoaderPass;

/// The part of DataLoader that depends only on the batch type.
template <class B>
class Loader {
 public:
  /// Makes a rank's share of global batch `b`; called on several threads.
  using Make = std::function<B(const Sampler&, Index b)>;

  Loader(Index dataset_size, Sampler sampler, const LoaderOptions& options, Make make);

  /// The number of batches per epoch.
  Index size() const { return batches_; }
  const Sampler& sampler() const { return sampler_; }

  /// Sets the epoch for order and augmentation, from the next begin() on. Running passes don't change.
  void set_epoch(Index epoch);

  /// Makes the next pass start at batch `batches`, to resume a run; later passes are complete again. A pass counts from
  /// its first ++ on: reading only the first batch, by `*loader.begin()`, does not use up the skip. Throws UsageError
  /// for more batches than an epoch has.
  void skip(Index batches);

  /// Iterates over the batches of one pass. Copies of an iterator share the position; another begin() starts another
  /// pass.
  class Iterator {
   public:
    using value_type = B;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(std::shared_ptr<LoaderPass<B>> pass) : pass_(std::move(pass)) {}
    /// Throws UsageError at the end.
    B& operator*() const;
    B* operator->() const { return &**this; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const;

    /// For an outer loader that reads ahead: ++ no longer counts as progress; the outer loader calls `goes_on` when its
    /// reader reaches a second batch.
    void reads_ahead() const;
    void goes_on() const;

   private:
    std::shared_ptr<LoaderPass<B>> pass_;
  };

  /// Starts a pass with its own workers. Warns once on stderr, on rank 0, if shuffled data repeats its order because
  /// set_epoch is not called; reading only a first batch does not count as an epoch.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 protected:
  ~Loader();
  Loader(Loader&&) = default;
  Loader& operator=(Loader&&) = default;

 private:
  struct Plan {
    Make make;
    Index batch;
    int workers, prefetch;
  };
  friend struct LoaderPass<B>;

  std::shared_ptr<const Plan> plan_;  // shared with passes, which may outlive the loader
  Sampler sampler_;
  Index batches_ = 0;
  std::shared_ptr<Index> skip_;  // the start batch; passes that start there and continue reset it to 0
  int epochs_unset_ = 0;  // epochs begun before the first call of set_epoch
  /// The newest pass: `auto& batch = *loader.begin()` is valid until the next begin().
  std::shared_ptr<LoaderPass<B>> newest_;
  std::weak_ptr<LoaderPass<B>> epoch_;    // the last pass that epochs_unset_ counted
  std::weak_ptr<LoaderPass<B>> at_skip_;  // the last pass that started at skip_
};

template <class D, class Collate>
inline constexpr bool loads_images = LabelledImages<D>&& std::is_same_v<Collate, DefaultCollate>;

/// A batch of data other than images: the result of `collate`.
template <class D, class Collate>
auto make_batch(const D& dataset, const Collate& collate, const LoaderOptions& options, const Sampler& sampler,
                Index b) {
  constexpr bool whole = collates_whole<Collate>();
  const auto share = sampler.share(b, options.batch), all = sampler.whole(b, options.batch);
  const auto first = sampler.share_begin(b, options.batch), count = static_cast<Index>(share.size());
  // An empty share takes its shapes from the batch's first sample.
  const auto read = whole ? all : share.empty() ? all.first(1) : share;
  const Index place = whole || share.empty() ? -first : 0;  // of the first sample read, relative to the share
  std::vector<SampleOf<D>> samples;
  samples.reserve(read.size());
  for (std::size_t i = 0; i < read.size(); ++i) {
    const auto stream = sampler.stream(b, options.batch, place + static_cast<Index>(i));
    RandomStream random(options.augmentation_seed.value_or(sampler.options().seed), Purpose::augment, stream,
                        sampler.epoch());
    samples.push_back(sample_of(dataset, read[i], random));
  }
  const Index begin = whole ? first : 0;
  return collated(collate, std::move(samples), begin, begin + count);
}

template <class D, class Collate>
struct BatchOf {
  using type = decltype(make_batch(std::declval<const D&>(), std::declval<const Collate&>(),
                                   std::declval<const LoaderOptions&>(), std::declval<const Sampler&>(), Index{}));
};
template <class D, class Collate>
requires loads_images<D, Collate>
struct BatchOf<D, Collate> {
  using type = Batch;
};

}  // namespace detail

/// Batches of `dataset`, with the order and shares of `sampler`. The dataset must outlive the loader. Each pass of `for
/// (auto& [images, labels] : loader)` is an epoch, always the same one unless `set_epoch` is called. Threads live from
/// begin() to the end of the epoch, the next begin() or the loader's destruction. A worker's exception is rethrown to
/// the caller at its batch.
///
/// A batch of images is a `Batch`. Other data gives the result of `collate`, which several threads call:
/// DefaultCollate's tuple, so that `for (auto& [x, y] : loader)` has tensors [samples, ...], or your function of a
/// std::vector of samples, this rank's share. For an empty share that function gets one sample, and its tensors are cut
/// to length 0 along the first axis.
template <Dataset D, class Collate = DefaultCollate>
class DataLoader : public detail::Loader<typename detail::BatchOf<D, Collate>::type> {
  using Base = detail::Loader<typename detail::BatchOf<D, Collate>::type>;

 public:
  /// Throws UsageError if the sampler is for another size, or an option is invalid.
  DataLoader(const D& dataset, Sampler sampler, LoaderOptions options = {}, Collate collate = {})
      : Base(dataset.size(), std::move(sampler), options, make_of(dataset, options, std::move(collate))),
        dataset_(&dataset) {}
  // Deleted, since a temporary dataset would be destroyed at once.
  DataLoader(const D&&, Sampler, LoaderOptions = {}, Collate = {}) = delete;

  const D& dataset() const { return *dataset_; }

 private:
  static typename Base::Make make_of(const D& dataset, LoaderOptions& options, Collate collate);

  const D* dataset_;
};

// Outside of the class: where the library has it, a program doesn't even instantiate it.
template <Dataset D, class Collate>
auto DataLoader<D, Collate>::make_of(const D& dataset, LoaderOptions& options, [[maybe_unused]] Collate collate) ->
    typename Base::Make {
  if constexpr (detail::loads_images<D, Collate>) {
    if constexpr (requires {
                    { dataset.normalization() } -> std::convertible_to<Normalize>;
                  })
      if (options.normalize) options.transforms.push_back(dataset.normalization());
    return [source = detail::ImageSource{
                dataset.image_shape(), [&dataset](Index i, std::span<float> image) { return dataset.get(i, image); },
                options}](const Sampler& sampler, Index b) { return source.make(sampler, b); };
  } else {
    detail::refuse_image_options(options);
    return [&dataset, options, collate = std::move(collate)](const Sampler& sampler, Index b) {
      return detail::make_batch(dataset, collate, options, sampler, b);
    };
  }
}

}  // namespace chorus::data

// Structured bindings of a batch are its images and labels.
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

#include <chorus/data/loader_pass.hpp>
#if !CHORUS_COMPILED
#include <chorus/data/loader_impl.hpp>
#else
extern template class chorus::data::detail::Loader<chorus::data::Batch>;
#endif
