#pragma once
/// DataLoader: batches of a dataset as tensors, prepared by background threads while the caller trains on the one
/// before.

#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/prefetch.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/data/transforms.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::data {

/// One rank's share of a global batch: `auto& [images, labels] = batch;`.
struct Batch {
  Tensor<float, 4> images;         ///< [samples, channels, height, width]; samples is 0 where the share is empty
  Tensor<std::int64_t, 1> labels;  ///< [samples]
  Index index = 0;                 ///< number of the batch in its epoch
  Index global_size = 0;           ///< samples in the global batch, over all ranks
  Index first_sample = 0;          ///< place of images[0] in the global batch

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
};

/// Batches of `dataset`, in the order and the shares of `sampler`; the loader keeps a reference to the dataset, which
/// must outlive it. Each pass of `for (auto& [images, labels] : loader)` is an epoch; the same one again unless
/// `set_epoch` says otherwise. Threads live from begin() to the end of the epoch, to the next begin() or to the
/// loader's destruction. What a worker throws is rethrown to the caller, at the batch where it happened.
template <Dataset D>
class DataLoader {
 public:
  /// Throws UsageError where the sampler is for another size, or an option makes no sense.
  DataLoader(const D& dataset, Sampler sampler, LoaderOptions options = {})
      : dataset_(dataset), sampler_(std::move(sampler)), options_(std::move(options)) {
    check<UsageError>(sampler_.dataset_size() == dataset.size(), "DataLoader: the sampler is for ",
                      sampler_.dataset_size(), " samples, the dataset has ", dataset.size());
    check<UsageError>(options_.batch >= 1, "DataLoader: expected a batch of at least 1, got ", options_.batch);
    check<UsageError>(options_.workers >= 0 && options_.workers <= 1024, "DataLoader: expected 0 to 1024 workers, got ",
                      options_.workers);
    check<UsageError>(options_.prefetch >= 1 && options_.prefetch <= 1024,
                      "DataLoader: expected to prefetch 1 to 1024 ", "batches a worker, got ", options_.prefetch);
    batches_ = sampler_.global_batches(options_.batch, options_.drop_last);
    if constexpr (requires {
                    { dataset.normalization() } -> std::convertible_to<Normalize>;
                  })
      if (options_.normalize) options_.transforms.push_back(dataset.normalization());
  }
  DataLoader(const D&&, Sampler, LoaderOptions = {}) = delete;  // the dataset would be gone at once
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Batches in an epoch.
  Index size() const { return batches_; }
  const D& dataset() const { return dataset_; }
  const Sampler& sampler() const { return sampler_; }

  /// Takes the order and the augmentation of another epoch, from the next begin() on; an epoch that is under way ends.
  void set_epoch(Index epoch) {
    running_.reset();
    sampler_.set_epoch(epoch);
  }

  /// Lets the next epoch start at batch `batches`, to go on where an earlier run was left; the one after is whole
  /// again.
  void skip(Index batches) {
    check<UsageError>(batches >= 0 && batches <= batches_, "DataLoader: can't skip ", batches, " batches of ",
                      batches_);
    skip_ = batches;
  }

  /// Reads the batches one by one; all iterators of a loader are the same place.
  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(DataLoader& loader) : loader_(&loader) {}
    Batch& operator*() const { return *loader_->current_; }
    Iterator& operator++() {
      loader_->advance();
      return *this;
    }
    void operator++(int) { loader_->advance(); }
    bool operator==(std::default_sentinel_t) const { return !loader_->current_; }

   private:
    DataLoader* loader_;
  };

  Iterator begin() {
    running_.reset();
    const Index ahead = Index{options_.prefetch} * std::max(options_.workers, 1);
    running_.emplace(std::exchange(skip_, 0), batches_, options_.workers, ahead, [this](Index b) { return make(b); });
    advance();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  void advance() {
    current_.reset();  // its memory is free for the next batch to be made
    if (running_) current_ = running_->next();
    if (!current_) running_.reset();
  }

  /// Called on the workers' threads.
  Batch make(Index b) const {
    const auto samples = sampler_.share(b, options_.batch);
    const ImageShape shape = dataset_.image_shape();
    const auto count = static_cast<Index>(samples.size());
    Batch out{.images = Tensor<float, 4>::empty({count, shape[0], shape[1], shape[2]}),
              .labels = Tensor<std::int64_t, 1>::empty({count}),
              .index = b,
              .global_size = sampler_.global_size(b, options_.batch),
              .first_sample = sampler_.share_begin(b, options_.batch)};
    const auto pixels = static_cast<std::size_t>(shape[0] * shape[1] * shape[2]);
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const Image image{{out.images.data() + i * pixels, pixels}, shape};
      out.labels.data()[i] = dataset_.get(samples[i], image.pixels);
      RandomStream random(sampler_.options().seed, Purpose::augment, samples[i], sampler_.epoch());
      for (const auto& transform : options_.transforms) transform(image, random);
    }
    return out;
  }

  const D& dataset_;
  Sampler sampler_;
  LoaderOptions options_;
  Index batches_ = 0, skip_ = 0;
  std::optional<Batch> current_;
  std::optional<Prefetch<Batch>> running_;  // last: its threads read the members above
};

}  // namespace chorus::inline CHORUS_ABI::data

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
