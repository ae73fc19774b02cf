#include <atomic>
#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "../comm/processes.hpp"
#include "files.hpp"

namespace loader_test {

namespace data = chorus::data;
using chorus::Index;
using data::DataLoader;
using data::Sampler;

/// Sample i is a one-pixel image of value i with label i; one sample throws.
struct Numbers {
  Index count;
  Index broken = -1;

  Index size() const { return count; }
  Index classes() const { return count; }
  data::ImageShape image_shape() const { return {1, 1, 1}; }
  std::int64_t get(Index i, std::span<float> image) const {
    if (i == broken) throw chorus::FileError("sample is unreadable");
    image[0] = static_cast<float>(i);
    return i;
  }
};

template <class Loader>
std::vector<std::int64_t> labels_of(Loader& loader) {
  std::vector<std::int64_t> out;
  for (auto& [images, labels] : loader)
    for (Index i = 0; i < labels.numel(); ++i) {
      REQUIRE(images(i, 0, 0, 0) == static_cast<float>(labels(i)));
      out.push_back(labels(i));
    }
  return out;
}

TEST_CASE("an epoch has each sample once, in the sampler's order, for any number of workers") {
  const Numbers numbers{103};
  const int workers = GENERATE(0, 1, 2, 5);
  DataLoader loader{numbers, Sampler{103, {.seed = 4}}, {.batch = 10, .workers = workers}};
  CHECK(loader.size() == 11);
  for (const int epoch : {0, 1, 1, 7}) {
    loader.set_epoch(epoch);
    const auto labels = labels_of(loader);
    const auto order = loader.sampler().order();
    CHECK(labels == std::vector<std::int64_t>(order.begin(), order.end()));
  }
}

TEST_CASE("a batch knows its place; the last one may be smaller or left out") {
  const Numbers numbers{25};
  DataLoader loader{numbers, Sampler{25, {.rank = 1, .world_size = 3, .shuffle = false}}, {.batch = 8}};
  std::vector<Index> indices, sizes, globals, firsts;
  for (auto& batch : loader) {
    indices.push_back(batch.index);
    globals.push_back(batch.global_size);
    firsts.push_back(batch.first_sample);
    sizes.push_back(batch.images.size(0));
    CHECK(batch.images.shape() == chorus::Shape<4>{batch.labels.size(0), 1, 1, 1});
  }
  CHECK(indices == std::vector<Index>{0, 1, 2, 3});
  CHECK(globals == std::vector<Index>{8, 8, 8, 1});
  CHECK(firsts == std::vector<Index>{3, 3, 3, 1});
  CHECK(sizes == std::vector<Index>{3, 3, 3, 0});

  DataLoader dropping{numbers, Sampler{25}, {.batch = 8, .drop_last = true}};
  CHECK(dropping.size() == 3);
  CHECK(labels_of(dropping).size() == 24);
}

TEST_CASE("an epoch can start at a later batch") {
  const Numbers numbers{50};
  DataLoader loader{numbers, Sampler{50}, {.batch = 8}};
  const auto whole = labels_of(loader);
  loader.skip(4);
  CHECK(labels_of(loader) == std::vector<std::int64_t>(whole.begin() + 32, whole.end()));
  CHECK(labels_of(loader) == whole);
  loader.skip(7);
  CHECK(labels_of(loader).empty());
  CHECK(message_of<chorus::UsageError>([&] { loader.skip(8); }) == "DataLoader: can't skip 8 batches of 7");
}

TEST_CASE("a look at the loader takes nothing of the place to go on from") {
  const Numbers numbers{50};
  const int workers = GENERATE(0, 2);
  const data::LoaderOptions options{.batch = 8, .workers = workers};
  const auto of_epoch = [&](Index epoch) {
    DataLoader whole{numbers, Sampler{50}, {.batch = 8}};
    whole.set_epoch(epoch);
    return labels_of(whole);
  };
  const auto rest_of = [&](Index epoch) {
    const auto all = of_epoch(epoch);
    return std::vector<std::int64_t>(all.begin() + 32, all.end());
  };
  const auto go_on = [&](const auto& look) {
    DataLoader loader{numbers, Sampler{50}, options};
    loader.skip(4);
    look(loader);
    loader.set_epoch(1);
    look(loader);
    look(loader);
    CHECK(labels_of(loader) == rest_of(1));
    CHECK(labels_of(loader) == of_epoch(1));
    loader.set_epoch(2);
    CHECK(labels_of(loader) == of_epoch(2));
  };
  go_on([](auto&) {});
  go_on([](auto& loader) { CHECK((*loader.begin()).index == 4); });
  go_on([](auto& loader) {
    auto place = loader.begin();
    if (place != loader.end()) CHECK(place->index == 4);
  });
  go_on([](auto& loader) {
    for (auto& batch : loader) {
      CHECK(batch.index == 4);
      break;
    }
  });
  DataLoader loader{numbers, Sampler{50}, options};
  loader.set_epoch(2);
  auto kept = loader.begin();
  go_on([&](auto& other) { kept = other.begin(); });

  // A running pass continues from the new start only, and a loop inside of the first batch is complete.
  loader.skip(4);
  auto old = loader.begin();
  loader.skip(5);
  ++old;
  for (auto& batch : loader) {
    CHECK(batch.index >= 5);
    if (batch.index == 5) CHECK(labels_of(loader) == of_epoch(2));
  }
  CHECK(labels_of(loader) == of_epoch(2));

  // A pass that is left in its first batch has used up the skip when the next epoch begins.
  loader.skip(4);
  for ([[maybe_unused]] auto& batch : loader) break;
  loader.set_epoch(3);
  CHECK(labels_of(loader) == of_epoch(3));

  // In a loader that reads ahead, the outer reader's progress counts.
  loader.skip(4);
  {
    auto ahead = loader.begin();
    ahead.reads_ahead();
    ++ahead;
    CHECK(ahead->index == 5);
  }
  CHECK((*loader.begin()).index == 4);
  auto ahead = loader.begin();
  ahead.reads_ahead();
  ahead.goes_on();
  CHECK((*loader.begin()).index == 0);
}

TEST_CASE("a loop may be left early, and a loader destroyed in mid-epoch") {
  const Numbers numbers{1000};
  const int workers = GENERATE(0, 1, 3);
  DataLoader loader{numbers, Sampler{1000, {.shuffle = false}}, {.batch = 10, .workers = workers}};
  for (int stop_after = 0; stop_after < 5; ++stop_after) {
    int count = 0;
    for (auto& [images, labels] : loader) {
      CHECK(labels(0) == 10 * count);
      if (count++ == stop_after) break;
    }
  }
  CHECK(labels_of(loader).size() == 1000);
  for ([[maybe_unused]] auto& batch : loader) break;
}

TEST_CASE("what a worker throws reaches the caller in its place, and the loader can be used again") {
  const Numbers numbers{100, 57};
  const int workers = GENERATE(0, 1, 3);
  DataLoader loader{numbers, Sampler{100, {.shuffle = false}}, {.batch = 10, .workers = workers}};
  for (int attempt = 0; attempt < 2; ++attempt) {
    std::size_t seen = 0;
    const auto read = [&] {
      for (auto& [images, labels] : loader) seen += static_cast<std::size_t>(labels.numel());
    };
    CHECK(message_of<chorus::FileError>(read) == "sample is unreadable");
    CHECK(seen == 50);
  }
}

TEST_CASE("workers are ahead by a bounded number of batches") {
  struct Counting : Numbers {
    mutable std::atomic<int> got{0};
    std::int64_t get(Index i, std::span<float> image) const {
      ++got;
      return Numbers::get(i, image);
    }
  };
  const Counting numbers{{100}};
  DataLoader loader{numbers, Sampler{100}, {.batch = 1, .workers = 2, .prefetch = 3}};
  int taken = 0;
  for ([[maybe_unused]] auto& batch : loader) {
    ++taken;
    CHECK(numbers.got <= taken + 6);
    if (taken == 3) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  CHECK(numbers.got == 100);
}

TEST_CASE("a later epoch reuses the memory of the first") {
  const data::SyntheticImages images(300, 1);
  DataLoader loader{images, Sampler{300}, {.batch = 32}};
  const auto epoch = [&] {
    for ([[maybe_unused]] auto& batch : loader) {
    }
  };
  auto& allocator = chorus::CachingAllocator<chorus::Cpu>::of(chorus::Cpu{});
  for (int i = 0; i < 3; ++i) epoch();
  // At most: one batch in use, four waiting, two in preparation; images and labels, of whole and last batches.
  const auto before = allocator.system_allocations();
  for (int i = 0; i < 20; ++i) epoch();
  CHECK(allocator.system_allocations() - before < 8);
}

TEST_CASE("the dataset's normalisation is applied last, after the transforms") {
  const data::SyntheticImages images(20, 1);
  std::vector<float> raw(3072);
  images.get(0, raw);
  DataLoader plain{images, Sampler{20, {.shuffle = false}}, {.normalize = false}};
  CHECK((*plain.begin()).images(0, 0, 0, 0) == raw[0]);
  DataLoader normal{images, Sampler{20, {.shuffle = false}}};
  CHECK((*normal.begin()).images(0, 0, 0, 0) == Approx((raw[0] - 0.3f) / 0.2f).margin(1e-6));
  const auto black = [](const data::Image& image, data::RandomStream&) { std::ranges::fill(image.pixels, 0.0f); };
  DataLoader dark{images, Sampler{20}, {.transforms = {black}}};
  CHECK((*dark.begin()).images(0, 0, 0, 0) == Approx(-1.5f));
}

TEST_CASE("augmentation depends on seed, epoch and sample, not on rank, worker or batch size") {
  const data::SyntheticImages images(60, 1);
  // Maps samples to augmented pixels, over all ranks.
  const auto augmented = [&](int world, Index batch, int workers, Index epoch, std::uint64_t seed) {
    std::vector<std::vector<float>> out(60);
    for (int rank = 0; rank < world; ++rank) {
      DataLoader loader{
          images,
          Sampler{60, {.rank = rank, .world_size = world, .seed = seed}},
          {.batch = batch, .workers = workers, .transforms = {data::RandomCrop{}, data::RandomHorizontalFlip{}}}};
      loader.set_epoch(epoch);
      for (auto& b : loader) {
        const auto samples = loader.sampler().share(b.index, batch);
        for (std::size_t i = 0; i < samples.size(); ++i)
          out[static_cast<std::size_t>(samples[i])] = b.images[static_cast<Index>(i)].to_vector();
      }
    }
    return out;
  };
  const auto one = augmented(1, 16, 0, 2, 9);
  CHECK(one == augmented(3, 7, 2, 2, 9));
  CHECK(one != augmented(1, 16, 0, 3, 9));
  CHECK(one != augmented(1, 16, 0, 2, 8));
}

TEST_CASE("loops over one loader have nothing to do with each other: one in another, a look, two side by side") {
  const Numbers numbers{50};
  const int workers = GENERATE(0, 1, 3);
  DataLoader loader{numbers, Sampler{50, {.seed = 2}}, {.batch = 8, .workers = workers}};
  loader.set_epoch(0);
  const auto whole = labels_of(loader);
  REQUIRE(whole.size() == 50);

  std::vector<std::int64_t> outer;
  const auto add = [](std::vector<std::int64_t>& to, const data::Batch& batch) {
    for (const auto label : batch.labels.to_vector()) to.push_back(label);
  };
  for (auto& batch : loader) {
    add(outer, batch);
    REQUIRE(outer.size() <= 50);
    if (batch.index == 2) CHECK(labels_of(loader) == whole);
    if (batch.index == 4) CHECK((*loader.begin()).index == 0);
    for ([[maybe_unused]] auto& other : loader)
      if (other.index == 1) break;
  }
  CHECK(outer == whole);

  std::vector<std::int64_t> first, second;
  auto a = loader.begin(), b = loader.begin();
  ++b;
  for (; b != loader.end(); ++a, ++b) add(first, *a), add(second, *b);
  add(first, *a);
  CHECK(first == std::vector<std::int64_t>(whole.begin(), whole.begin() + 50));
  CHECK(second == std::vector<std::int64_t>(whole.begin() + 8, whole.end()));
  CHECK(message_of<chorus::UsageError>([&] { *b; }) == "DataLoader: the pass has ended, no batch is left");
  ++b;
  CHECK(b == loader.end());
}

TEST_CASE("a pass goes on in its own epoch, its batches stay what they were, and it may outlive its loader") {
  const Numbers numbers{30};
  const int workers = GENERATE(0, 2);
  const data::Transform draw = [](const data::Image& image, data::RandomStream& random) {
    image.pixels[0] = random.uniform();
  };
  const data::LoaderOptions options{.batch = 4, .workers = workers, .transforms = {draw}};
  auto loader = std::make_unique<DataLoader<Numbers>>(numbers, Sampler{30, {.seed = 5}}, options);
  using Seen = std::vector<std::pair<std::vector<std::int64_t>, std::vector<float>>>;
  const auto seen = [](const data::Batch& batch) {
    return std::pair{batch.labels.to_vector(), batch.images.to_vector()};
  };
  Seen epochs[2];
  for (const int epoch : {0, 1}) {
    loader->set_epoch(epoch);
    for (const auto& batch : *loader) epochs[epoch].push_back(seen(batch));
  }
  CHECK(epochs[0] != epochs[1]);

  loader->set_epoch(0);
  std::vector<data::Batch> kept;
  auto place = loader->begin();
  kept.push_back(*place);
  loader->set_epoch(1);
  auto moved = std::move(*loader);
  CHECK(message_of<chorus::UsageError>([&] { loader->begin(); }) == "DataLoader: this loader was moved from");
  loader.reset();
  auto later = moved.begin();
  for (++place; place != std::default_sentinel; ++place) kept.push_back(*place);
  Seen first, second;
  for (const auto& batch : kept) first.push_back(seen(batch));
  for (; later != moved.end(); ++later) second.push_back(seen(*later));
  CHECK(first == epochs[0]);
  CHECK(second == epochs[1]);
}

TEST_CASE("a look at a batch lasts until the next one") {
  const Numbers numbers{30};
  DataLoader loader{numbers, Sampler{30, {.shuffle = false}}, {.batch = 4}};
  auto& [images, labels] = *loader.begin();
  CHECK(labels(3) == 3);
  loader.set_epoch(1);
  CHECK(images(2, 0, 0, 0) == 2);
}

TEST_CASE("views of a sample are augmented independently, and the same for any number of workers and ranks") {
  const data::SyntheticImages images(40, 1);
  const std::vector<data::Transform> crop{data::RandomCrop{}, data::RandomHorizontalFlip{}};
  // Maps samples and views to pixels, over all ranks.
  const auto augmented = [&](int world, int workers, int views) {
    std::vector<std::vector<float>> out(static_cast<std::size_t>(40 * views));
    for (int rank = 0; rank < world; ++rank) {
      DataLoader loader{images,
                        Sampler{40, {.rank = rank, .world_size = world, .seed = 3}},
                        {.batch = 7, .workers = workers, .transforms = crop, .views = views}};
      for (auto& b : loader) {
        CHECK(b.views.shape() == chorus::Shape<5>{views, b.labels.numel(), 3, 32, 32});
        CHECK(b.images.data() == b.views.data());
        const auto samples = loader.sampler().share(b.index, 7);
        for (Index view = 0; view < views; ++view)
          for (std::size_t i = 0; i < samples.size(); ++i)
            out[static_cast<std::size_t>(samples[i] + 40 * view)] = b.views[view][static_cast<Index>(i)].to_vector();
      }
    }
    return out;
  };
  const auto one = augmented(1, 0, 1), three = augmented(1, 0, 3);
  CHECK((three == augmented(3, 2, 3)));
  CHECK(std::equal(one.begin(), one.end(), three.begin()));
  int same = 0;
  for (std::size_t i = 0; i < 40; ++i)
    same += three[i] == three[i + 40] || three[i + 40] == three[i + 80] || three[i] == three[i + 80];
  CHECK(same < 4);  // of 81 offsets and 2 flips each

  DataLoader plain{images, Sampler{40}, {.batch = 40, .views = 2}};
  for (auto& batch : plain) CHECK((batch.views[0].to_vector() == batch.views[1].to_vector()));
}

TEST_CASE("a seed of its own for the augmentation leaves the order as it is") {
  const data::SyntheticImages images(40, 1);
  const auto loaded = [&](std::optional<std::uint64_t> seed) {
    DataLoader loader{
        images, Sampler{40, {.seed = 9}}, {.batch = 40, .transforms = {data::RandomCrop{}}, .augmentation_seed = seed}};
    const auto& batch = *loader.begin();
    return std::pair{batch.labels.to_vector(), batch.images.to_vector()};
  };
  const auto own = loaded({}), same = loaded(9), other = loaded(10);
  CHECK(own.first == same.first);
  CHECK(own.first == other.first);
  CHECK((own.second == same.second && own.second != other.second));  // too many to print
}

TEST_CASE("a second epoch in the order of the first is warned of, once, on rank 0") {
  const auto said = [](const data::SamplerOptions& options, bool sets) {
    return test::Ranks(1,
                       [&](const chorus::comm::World&) {  // in a process of its own
                         return test::with_stderr([&] {
                           const Numbers numbers{20};
                           DataLoader loader{numbers, Sampler{20, options}, {.batch = 5}};
                           for (int epoch = 0; epoch < 3; ++epoch) {
                             if (sets) loader.set_epoch(0);
                             labels_of(loader);
                           }
                           return "";
                         });
                       })
        .texts()[0];
  };
  CHECK(said({}, false) ==
        "chorus: warning: DataLoader: the second epoch has the order of the first: call set_epoch(epoch) in front of "
        "each\n");
  CHECK(said({}, true).empty());
  CHECK(said({.shuffle = false}, false).empty());
  CHECK(said({.rank = 1, .world_size = 2}, false).empty());
  auto looks = test::Ranks(1, [](const chorus::comm::World&) {
    return test::with_stderr([] {
      const Numbers numbers{20};
      DataLoader loader{numbers, Sampler{20}, {.batch = 5}};
      for ([[maybe_unused]] auto& batch : loader) loader.begin();
      return "";
    });
  });
  CHECK(looks.texts()[0].empty());  // one epoch
  auto before = test::Ranks(1, [](const chorus::comm::World&) {
    return test::with_stderr([] {
      const Numbers numbers{20};
      DataLoader loader{numbers, Sampler{20}, {.batch = 5}};
      *loader.begin();
      *loader.begin();
      labels_of(loader);
      return "";
    });
  });
  CHECK(before.texts()[0].empty());
}

TEST_CASE("an empty dataset has no batches") {
  const Numbers none{0};
  DataLoader loader{none, Sampler{0}};
  CHECK(loader.size() == 0);
  CHECK(labels_of(loader).empty());
}

TEST_CASE("senseless loaders are refused") {
  const Numbers numbers{10};
  const auto error = [&](Sampler sampler, data::LoaderOptions options) {
    return message_of<chorus::UsageError>([&] { DataLoader{numbers, std::move(sampler), std::move(options)}; });
  };
  CHECK(error(Sampler{9}, {}) == "DataLoader: the sampler is for 9 samples, the dataset has 10");
  CHECK(error(Sampler{10}, {.batch = 0}) == "DataLoader: expected a batch of at least 1, got 0");
  CHECK(error(Sampler{10}, {.workers = -1}) == "DataLoader: expected 0 to 1024 workers, got -1");
  CHECK(error(Sampler{10}, {.prefetch = 0}) == "DataLoader: expected to prefetch 1 to 1024 batches a worker, got 0");
  CHECK(error(Sampler{10}, {.views = 0}) == "DataLoader: expected 1 to 1024 views, got 0");
}

}  // namespace loader_test
