#pragma once
/// DataLoader: batches of a dataset as tensors, prepared by background threads while the caller trains on the one
/// before.

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

/// Options of DataLoader.
struct LoaderOptions {
  Index batch = 64;        ///< samples in a global batch: shared out among the ranks
  int workers = 2;         ///< threads that prepare batches; 0: the caller's thread does
  int prefetch = 2;        ///< batches that each worker may be ahead
  bool drop_last = false;  ///< leave out a last batch that isn't full
  // Of images alone; other data draw what they need in their `get(i, random)`.
  bool normalize = true;  ///< apply the dataset's own normalisation, where it has one, after the transforms
  std::vector<Transform> transforms = {};
  /// Augmented views of each sample in a batch (two: SimCLR, MoCo), 1 to 1024. The dataset is asked for a sample once.
  int views = 1;
  /// Of the random transforms; else the sampler's. Two loaders with one sampler's seed and other seeds here have the
  /// same samples in the same order, and see each in another way.
  std::optional<std::uint64_t> augmentation_seed = {};
};

namespace detail {

/// What a loader of images needs of its dataset, whatever its type.
struct ImageSource {
  ImageShape image_shape;
  std::function<std::int64_t(Index, std::span<float>)> get;
  LoaderOptions options;

  /// Called on the workers' threads.
  Batch make(const Sampler& sampler, Index b) const;
};

/// Throws UsageError where the sampler is for another size than the dataset's, or an option makes no sense.
void check_loader(Index dataset_size, const Sampler& sampler, const LoaderOptions& options);

/// Throws UsageError for options that are about images.
void refuse_image_options(const LoaderOptions& options);

/// Says once on stderr, on rank 0, that nobody calls set_epoch.
void warn_of_one_order(const Sampler& sampler);

template <class B>
struct LoaderPass;

/// All of DataLoader that depends on the batches' type alone.
template <class B>
class Loader {
 public:
  /// Makes a rank's share of global batch `b`; called on several threads.
  using Make = std::function<B(const Sampler&, Index b)>;

  Loader(Index dataset_size, Sampler sampler, const LoaderOptions& options, Make make);

  /// Batches in an epoch.
  Index size() const { return batches_; }
  const Sampler& sampler() const { return sampler_; }

  /// Takes the order and the augmentation of another epoch, from the next begin() on. Passes that are under way go on
  /// in theirs.
  void set_epoch(Index epoch);

  /// Lets the next pass start at batch `batches`, to go on where an earlier run was left; the one after is whole again.
  /// A pass counts from its first ++ on: whoever looks at the first batch alone, as `*loader.begin()`, takes nothing.
  /// Throws UsageError for more batches than an epoch has.
  void skip(Index batches);

  /// Reads the batches of one pass one by one. Copies of an iterator are the same place; that of another begin() is
  /// one of its own.
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

    /// For a loader around this one that reads ahead: from now on ++ takes nothing, and `goes_on` says that its own
    /// reader has come to a second batch.
    void reads_ahead() const;
    void goes_on() const;

   private:
    std::shared_ptr<LoaderPass<B>> pass_;
  };

  /// Starts a pass of its own, with workers of its own. Says once on stderr, on rank 0, where shuffled data come in one
  /// order again since nobody has called set_epoch; a look at a first batch is no epoch.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 protected:
  ~Loader() = default;
  Loader(Loader&&) = default;
  Loader& operator=(Loader&&) = default;

 private:
  struct Plan {
    Make make;
    Index batch;
    int workers, prefetch;
  };
  friend struct LoaderPass<B>;

  std::shared_ptr<const Plan> plan_;  // passes, which may outlive the loader, have it, too
  Sampler sampler_;
  Index batches_ = 0;
  std::shared_ptr<Index> skip_;  // the place to start at; passes that start there, and go on, set it to 0
  int epochs_unset_ = 0;  // begun since the loader was made, until set_epoch is called
  /// The one begun last: `auto& batch = *loader.begin()` is good until the next begin().
  std::shared_ptr<LoaderPass<B>> newest_;
  std::weak_ptr<LoaderPass<B>> epoch_;    // the one that epochs_unset_ has counted last
  std::weak_ptr<LoaderPass<B>> at_skip_;  // the last one that started at skip_
};

template <class D, class Collate>
inline constexpr bool loads_images = LabelledImages<D>&& std::is_same_v<Collate, DefaultCollate>;

/// What a loader of other data than images makes: what `collate` returns.
template <class D, class Collate>
auto make_batch(const D& dataset, const Collate& collate, const LoaderOptions& options, const Sampler& sampler,
                Index b) {
  constexpr bool whole = collates_whole<Collate>();
  const auto share = sampler.share(b, options.batch), all = sampler.whole(b, options.batch);
  const auto first = sampler.share_begin(b, options.batch), count = static_cast<Index>(share.size());
  // An empty share has the shapes of the batch's first sample.
  const auto read = whole ? all : share.empty() ? all.first(1) : share;
  const Index place = whole || share.empty() ? -first : 0;  // of what is read, from the share's begin on
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

/// Batches of `dataset`, in the order and the shares of `sampler`; the loader keeps a reference to the dataset, which
/// must outlive it. Each pass of `for (auto& [images, labels] : loader)` is an epoch; the same one again unless
/// `set_epoch` says otherwise. Threads live from begin() to the end of the epoch, to the next begin() or to the
/// loader's destruction. What a worker throws is rethrown to the caller, at the batch where it happened.
///
/// A batch of images is a `Batch`. Of other data it is what `collate` returns, which is called on several threads:
/// DefaultCollate's tuple, so that `for (auto& [x, y] : loader)` has tensors [samples, ...]; or a function of one's own
/// of a std::vector of samples, this rank's share. Where a share is empty that is called with one sample, and its
/// tensors are cut to none along the first axis.
template <Dataset D, class Collate = DefaultCollate>
class DataLoader : public detail::Loader<typename detail::BatchOf<D, Collate>::type> {
  using Base = detail::Loader<typename detail::BatchOf<D, Collate>::type>;

 public:
  /// Throws UsageError where the sampler is for another size, or an option makes no sense.
  DataLoader(const D& dataset, Sampler sampler, LoaderOptions options = {}, Collate collate = {})
      : Base(dataset.size(), std::move(sampler), options, make_of(dataset, options, std::move(collate))),
        dataset_(&dataset) {}
  // The dataset would be gone at once.
  DataLoader(const D&&, Sampler, LoaderOptions = {}, Collate = {}) = delete;

  const D& dataset() const { return *dataset_; }

 private:
  static typename Base::Make make_of(const D& dataset, LoaderOptions& options, [[maybe_unused]] Collate collate) {
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

#include <chorus/data/loader_pass.hpp>
#if !CHORUS_COMPILED
#include <chorus/data/loader_impl.hpp>
#else
extern template class chorus::data::detail::Loader<chorus::data::Batch>;
#endif
