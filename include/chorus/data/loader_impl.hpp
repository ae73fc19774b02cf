#pragma once
/// How DataLoader makes its batches.

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/prefetch.hpp>

namespace chorus::inline CHORUS_ABI::data::detail {

CHORUS_INLINE Loader::Loader(Source source, Sampler sampler, LoaderOptions options)
    : source_(std::move(source)), sampler_(std::move(sampler)), options_(std::move(options)) {
  check<UsageError>(sampler_.dataset_size() == source_.size, "DataLoader: the sampler is for ", sampler_.dataset_size(),
                    " samples, the dataset has ", source_.size);
  check<UsageError>(options_.batch >= 1, "DataLoader: expected a batch of at least 1, got ", options_.batch);
  check<UsageError>(options_.workers >= 0 && options_.workers <= 1024, "DataLoader: expected 0 to 1024 workers, got ",
                    options_.workers);
  check<UsageError>(options_.prefetch >= 1 && options_.prefetch <= 1024,
                    "DataLoader: expected to prefetch 1 to 1024 batches a worker, got ", options_.prefetch);
  batches_ = sampler_.global_batches(options_.batch, options_.drop_last);
  if (options_.normalize && source_.normalization) options_.transforms.push_back(*source_.normalization);
}

CHORUS_INLINE Loader::~Loader() = default;

CHORUS_INLINE void Loader::set_epoch(Index epoch) {
  running_.reset();
  epochs_unset_ = -1;
  sampler_.set_epoch(epoch);
}

CHORUS_INLINE void Loader::skip(Index batches) {
  check<UsageError>(batches >= 0 && batches <= batches_, "DataLoader: can't skip ", batches, " batches of ", batches_);
  skip_ = batches;
}

CHORUS_INLINE Loader::Iterator Loader::begin() {
  running_.reset();
  if (epochs_unset_ >= 0 && epochs_unset_ < 2 && ++epochs_unset_ == 2 && sampler_.options().shuffle &&
      sampler_.options().rank == 0)
    chorus::detail::say(
        "warning: DataLoader: the second epoch has the order of the first: call set_epoch(epoch) in front of each");
  const Index ahead = Index{options_.prefetch} * std::max(options_.workers, 1);
  running_ = std::make_unique<Prefetch<Batch>>(std::exchange(skip_, 0), batches_, options_.workers, ahead,
                                               [this](Index b) { return make(b); });
  advance();
  return Iterator(*this);
}

CHORUS_INLINE void Loader::advance() {
  current_.reset();  // its memory is free for the next batch to be made
  if (running_) current_ = running_->next();
  if (!current_) running_.reset();
}

/// Called on the workers' threads.
CHORUS_INLINE Batch Loader::make(Index b) const {
  const auto samples = sampler_.share(b, options_.batch);
  const ImageShape& shape = source_.image_shape;
  const auto count = static_cast<Index>(samples.size());
  Batch out{.images = Tensor<float, 4>::empty({count, shape[0], shape[1], shape[2]}),
            .labels = Tensor<std::int64_t, 1>::empty({count}),
            .index = b,
            .global_size = sampler_.global_size(b, options_.batch),
            .first_sample = sampler_.share_begin(b, options_.batch)};
  const auto pixels = static_cast<std::size_t>(shape[0] * shape[1] * shape[2]);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const Image image{{out.images.data() + i * pixels, pixels}, shape};
    out.labels.data()[i] = source_.get(samples[i], image.pixels);
    RandomStream random(sampler_.options().seed, Purpose::augment, samples[i], sampler_.epoch());
    for (const auto& transform : options_.transforms) transform(image, random);
  }
  return out;
}

}  // namespace chorus::inline CHORUS_ABI::data::detail
