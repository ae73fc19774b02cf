#pragma once
/// Makes batches of images, and checks options.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/data/loader.hpp>
#include <cstddef>
#include <cstdint>

namespace chorus::data::detail {

CHORUS_INLINE void check_loader(Index dataset_size, const Sampler& sampler, const LoaderOptions& options) {
  check<UsageError>(sampler.dataset_size() == dataset_size, "DataLoader: the sampler is for ", sampler.dataset_size(),
                    " samples, the dataset has ", dataset_size);
  check<UsageError>(options.batch >= 1, "DataLoader: expected a batch of at least 1, got ", options.batch);
  check<UsageError>(options.workers >= 0 && options.workers <= 1024, "DataLoader: expected 0 to 1024 workers, got ",
                    options.workers);
  check<UsageError>(options.prefetch >= 1 && options.prefetch <= 1024,
                    "DataLoader: expected to prefetch 1 to 1024 batches a worker, got ", options.prefetch);
  check<UsageError>(options.views >= 1 && options.views <= 1024, "DataLoader: expected 1 to 1024 views, got ",
                    options.views);
}

CHORUS_INLINE void refuse_image_options(const LoaderOptions& options) {
  check<UsageError>(options.transforms.empty() && options.views == 1,
                    "DataLoader: transforms and views need a dataset of images; other datasets draw their random "
                    "numbers in get(i, RandomStream&)");
}

CHORUS_INLINE void warn_of_one_order(const Sampler& sampler) {
  if (sampler.options().shuffle && sampler.options().rank == 0)
    chorus::detail::say(
        "warning: DataLoader: the second epoch has the order of the first: call set_epoch(epoch) in front of each");
}

CHORUS_INLINE Batch ImageSource::make(const Sampler& sampler, Index b) const {
  const auto samples = sampler.share(b, options.batch);
  const ImageShape& shape = image_shape;
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
    out.labels.data()[i] = get(samples[i], first.pixels);
    for (Index view = 1; view < options.views; ++view)
      std::ranges::copy(first.pixels, image_of(view, i).pixels.begin());
    for (Index view = 0; view < options.views; ++view) {
      // Each view draws as another sample would; no dataset has 2^48 samples.
      const Index stream = sampler.stream(b, options.batch, static_cast<Index>(i));
      RandomStream random(seed, Purpose::augment, stream + (view << 48), sampler.epoch());
      for (const auto& transform : options.transforms) transform(image_of(view, i), random);
    }
  }
  return out;
}

}  // namespace chorus::data::detail
