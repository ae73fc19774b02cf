#pragma once
/// How DataLoader makes its batches.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/prefetch.hpp>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

namespace chorus::data::detail {

/// One pass over a loader's data: what it reads is its own, or never changes.
struct LoaderPass {
  std::shared_ptr<const Loader::Plan> plan;
  Sampler sampler;
  std::optional<Batch> current = {};
  std::optional<Prefetch<Batch>> running = {};  // last: its threads read the members above

  void advance() {
    current.reset();  // its memory is free for the next batch to be made
    trace::Span span(trace::Lane::loader, "loader", "next batch");
    if (running) current = running->next();
    if (span && current)
      span.describe(trace::place(), "next batch",
                    cat("\"samples\":", current->labels.numel(), ",\"batch\":", current->global_size));
    if (!current) running.reset();
  }
  Batch make(Index b) const;
};

CHORUS_INLINE Loader::Loader(Source source, Sampler sampler, LoaderOptions options) : sampler_(std::move(sampler)) {
  check<UsageError>(sampler_.dataset_size() == source.size, "DataLoader: the sampler is for ", sampler_.dataset_size(),
                    " samples, the dataset has ", source.size);
  check<UsageError>(options.batch >= 1, "DataLoader: expected a batch of at least 1, got ", options.batch);
  check<UsageError>(options.workers >= 0 && options.workers <= 1024, "DataLoader: expected 0 to 1024 workers, got ",
                    options.workers);
  check<UsageError>(options.prefetch >= 1 && options.prefetch <= 1024,
                    "DataLoader: expected to prefetch 1 to 1024 batches a worker, got ", options.prefetch);
  check<UsageError>(options.views >= 1 && options.views <= 1024, "DataLoader: expected 1 to 1024 views, got ",
                    options.views);
  batches_ = sampler_.global_batches(options.batch, options.drop_last);
  if (options.normalize && source.normalization) options.transforms.push_back(*source.normalization);
  plan_ = std::make_shared<const Plan>(Plan{std::move(source), std::move(options)});
}

CHORUS_INLINE void Loader::set_epoch(Index epoch) {
  epochs_unset_ = -1;
  sampler_.set_epoch(epoch);
}

CHORUS_INLINE void Loader::skip(Index batches) {
  check<UsageError>(batches >= 0 && batches <= batches_, "DataLoader: can't skip ", batches, " batches of ", batches_);
  skip_ = batches;
}

CHORUS_INLINE Loader::Iterator Loader::begin() {
  check<UsageError>(plan_ != nullptr, "DataLoader: this loader has been moved away");
  const auto epoch = epoch_.lock();
  // One inside another, or a look at a batch in the middle of one, is no second epoch.
  const bool inside = epoch && epoch->current && epoch.use_count() > (epoch == newest_ ? 2 : 1);
  if (!inside && epochs_unset_ >= 0 && epochs_unset_ < 2 && ++epochs_unset_ == 2 && sampler_.options().shuffle &&
      sampler_.options().rank == 0)
    chorus::detail::say(
        "warning: DataLoader: the second epoch has the order of the first: call set_epoch(epoch) in front of each");
  if (newest_ && newest_.use_count() == 1 + (epoch == newest_)) {  // no iterator has it
    newest_->running.reset();
    newest_->sampler = sampler_;
  } else {
    newest_.reset(new LoaderPass{plan_, sampler_});
  }
  if (!inside) epoch_ = newest_;
  LoaderPass* const pass = newest_.get();
  const auto& options = plan_->options;
  const Index ahead = Index{options.prefetch} * std::max(options.workers, 1);
  pass->running.emplace(std::exchange(skip_, 0), batches_, options.workers, ahead,
                        [pass](Index b) { return pass->make(b); });
  pass->advance();
  return Iterator(newest_);
}

CHORUS_INLINE Batch& Loader::Iterator::operator*() const {
  check<UsageError>(pass_->current.has_value(), "DataLoader: the pass has ended, there is no batch");
  return *pass_->current;
}

CHORUS_INLINE Loader::Iterator& Loader::Iterator::operator++() {
  pass_->advance();
  return *this;
}

CHORUS_INLINE bool Loader::Iterator::operator==(std::default_sentinel_t) const { return !pass_->current; }

/// Called on the workers' threads.
CHORUS_INLINE Batch LoaderPass::make(Index b) const {
  const auto& [source, options] = *plan;
  const auto samples = sampler.share(b, options.batch);
  const ImageShape& shape = source.image_shape;
  const auto count = static_cast<Index>(samples.size());
  Batch out{.images = {},
            .labels = Tensor<std::int64_t, 1>::empty({count}),
            .index = b,
            .global_size = sampler.global_size(b, options.batch),
            .first_sample = sampler.share_begin(b, options.batch),
            .views = Tensor<float, 5>::empty({options.views, count, shape[0], shape[1], shape[2]})};
  out.images = out.views[0];
  const auto pixels = static_cast<std::size_t>(shape[0] * shape[1] * shape[2]);
  const auto image_of = [&](Index view, std::size_t i) {
    return Image{{out.views.data() + (static_cast<std::size_t>(view) * samples.size() + i) * pixels, pixels}, shape};
  };
  const auto seed = options.augmentation_seed.value_or(sampler.options().seed);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const Image first = image_of(0, i);
    out.labels.data()[i] = source.get(samples[i], first.pixels);
    for (Index view = 1; view < options.views; ++view)
      std::ranges::copy(first.pixels, image_of(view, i).pixels.begin());
    for (Index view = 0; view < options.views; ++view) {
      // No dataset has 2^48 samples: each view draws as if it were of another one.
      RandomStream random(seed, Purpose::augment, samples[i] + (view << 48), sampler.epoch());
      for (const auto& transform : options.transforms) transform(image_of(view, i), random);
    }
  }
  return out;
}

}  // namespace chorus::data::detail
