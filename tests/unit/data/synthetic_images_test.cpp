#include <algorithm>
#include <atomic>
#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <cmath>
#include <set>
#include <thread>
#include <vector>

#include "files.hpp"

namespace synthetic_images_test {

namespace data = chorus::data;
using data::Split;
using data::SyntheticImages;

std::vector<float> image_of(const data::ImageDataset& dataset, chorus::Index i) {
  const auto shape = dataset.image_shape();
  std::vector<float> image(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]));
  dataset.get(i, image);
  return image;
}

TEST_CASE("generated images depend on seed, split and index alone") {
  const SyntheticImages train(30, 7), longer(40, 7), other_seed(30, 8), test(30, 7, Split::test);
  std::set<std::vector<float>> all;
  for (chorus::Index i = 0; i < 30; ++i) {
    CHECK(image_of(train, i) == image_of(longer, i));
    for (const data::ImageDataset* set :
         {static_cast<const data::ImageDataset*>(&train), static_cast<const data::ImageDataset*>(&other_seed),
          static_cast<const data::ImageDataset*>(&test)})
      all.insert(image_of(*set, i));
  }
  CHECK(all.size() == 90);  // no image twice
}

TEST_CASE("generated labels go round, and the images have the size asked for") {
  const SyntheticImages grey(25, 1, Split::train, {1, 28, 20});
  CHECK(grey.size() == 25);
  CHECK(grey.classes() == 10);
  CHECK(grey.image_shape() == data::ImageShape{1, 28, 20});
  std::vector<float> image(28 * 20);
  for (chorus::Index i = 0; i < 25; ++i) CHECK(grey.get(i, image) == i % 10);
  CHECK(SyntheticImages(0).size() == 0);
  CHECK(SyntheticImages(3, 0, Split::train, {3, 9, 33}).size() == 3);  // odd sizes
}

TEST_CASE("an image is made when it is first read, and once, whoever reads it") {
  std::atomic<int> made[5] = {};
  const data::ImageDataset images{{1, 2, 2}, 5, 10, {}, [&](chorus::Index i, std::span<std::uint8_t> pixels) {
                                    ++made[i];
                                    std::ranges::fill(pixels, static_cast<std::uint8_t>(51 * i));
                                    return static_cast<std::uint8_t>(9 - i);
                                  }};
  const data::ImageDataset copy = images;
  std::atomic<int> right = 0;
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 4; ++reader)
    readers.emplace_back([&, reader] {
      float pixels[4];
      for (const chorus::Index i : {1, 4, 2, 1}) {
        const auto label = (reader % 2 == 0 ? images : copy).get(i, pixels);
        if (label == 9 - i && std::ranges::count(pixels, 51 * static_cast<float>(i) / 255) == 4) ++right;
      }
    });
  for (auto& reader : readers) reader.join();
  CHECK(right == 16);
  CHECK(std::vector<int>(made, made + 5) == std::vector<int>{0, 1, 1, 0, 1});
}

TEST_CASE("a rank makes the images of its own share alone") {
  std::set<chorus::Index> made;
  const data::ImageDataset images{{1, 1, 1}, 12, 10, {}, [&](chorus::Index i, std::span<std::uint8_t>) {
                                    made.insert(i);
                                    return std::uint8_t{};
                                  }};
  const data::Sampler sampler{images.size(), {.rank = 1, .world_size = 3, .seed = 5}};
  data::DataLoader loader{images, sampler, {.batch = 6, .workers = 0, .normalize = false}};
  std::set<chorus::Index> share;
  for (chorus::Index b = 0; b < 2; ++b)
    for (const chorus::Index i : sampler.share(b, 6)) share.insert(i);
  for (auto& batch : loader) CHECK(batch.labels.numel() == 2);
  CHECK(share.size() == 4);
  CHECK(made == share);
}

TEST_CASE("the normalisation of generated images fits them") {
  const SyntheticImages train(500, 3);
  double sum = 0, square = 0;
  for (chorus::Index i = 0; i < train.size(); ++i)
    for (const float pixel : image_of(train, i)) {
      sum += pixel;
      square += double{pixel} * double{pixel};
    }
  const double mean = sum / (500.0 * 3072), stddev = std::sqrt(square / (500.0 * 3072) - mean * mean);
  CHECK(mean == Approx(train.normalization().mean[0]).margin(0.02));
  CHECK(stddev == Approx(train.normalization().stddev[0]).margin(0.02));
}

TEST_CASE("impossible generated images are refused") {
  const auto error = [](chorus::Index count, data::ImageShape shape) {
    return message_of<chorus::UsageError>([&] { SyntheticImages(count, 0, Split::train, shape); });
  };
  CHECK(error(-1, {3, 32, 32}) == "SyntheticImages: expected a count of at least 0, got -1");
  for (const auto& shape : {data::ImageShape{0, 32, 32}, data::ImageShape{3, 7, 32}, data::ImageShape{3, 32, 5000}})
    CHECK(error(1, shape) ==
          chorus::cat("SyntheticImages: expected 1 to 16 channels and sides of 8 to 4096, got shape ", shape));
}

}  // namespace synthetic_images_test
