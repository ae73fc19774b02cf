#include <catch.hpp>
#include <chorus/data/transforms.hpp>
#include <set>

#include "files.hpp"

namespace transforms_test {

namespace data = chorus::data;
using chorus::Index;
using data::Image;
using data::RandomStream;

constexpr data::ImageShape shape{2, 4, 5};

/// 1 to 40, so that padding differs from pixels.
std::vector<float> numbered() {
  std::vector<float> out(40);
  std::iota(out.begin(), out.end(), 1.0f);
  return out;
}
RandomStream stream(Index sample, Index epoch = 0, std::uint64_t seed = 1) {
  return {seed, data::Purpose::augment, sample, epoch};
}

TEST_CASE("a stream depends on seed, purpose, place and lap") {
  std::set<std::uint32_t> first_words;
  for (const Index sample : {Index{0}, Index{1}, Index{1} << 32})
    for (const Index epoch : {0, 1})
      for (const std::uint64_t seed : {0u, 1u})
        for (const auto purpose : {data::Purpose::augment, data::Purpose::generate})
          first_words.insert(RandomStream(seed, purpose, sample, epoch).word());
  CHECK(first_words.size() == 24);
  auto a = stream(5), b = stream(5);
  for (int i = 0; i < 20; ++i) CHECK(a.word() == b.word());
}

TEST_CASE("whole random numbers are uniform") {
  auto random = stream(0);
  std::array<int, 7> counts{};
  for (int i = 0; i < 7000; ++i) ++counts[static_cast<std::size_t>(random.below(7))];
  double chi_square = 0;
  for (const int count : counts) chi_square += (count - 1000.0) * (count - 1000.0) / 1000;
  CHECK(chi_square < 22.5);  // 6 degrees of freedom, p = 0.001
}

TEST_CASE("normalisation is per channel") {
  auto pixels = numbered();
  auto random = stream(0);
  data::Normalize{{1, 2}, {2, 4}}(Image{pixels, shape}, random);
  CHECK(pixels[2] == Approx((3 - 1) / 2.0));
  CHECK(pixels[20] == Approx((21 - 2) / 4.0));
  CHECK(message_of<chorus::ShapeError>([&] {
          data::Normalize{{1}, {2}}(Image{pixels, shape}, random);
        }) == "Normalize: expected a mean and a stddev for each of 2 channels, got 1 and 1");
}

TEST_CASE("a flip mirrors each row, in about half of the cases") {
  int flipped = 0;
  for (Index sample = 0; sample < 400; ++sample) {
    auto pixels = numbered();
    auto random = stream(sample);
    data::RandomHorizontalFlip{}(Image{pixels, shape}, random);
    if (pixels == numbered()) continue;
    ++flipped;
    for (std::size_t i = 0; i < 40; ++i) REQUIRE(pixels[i] == static_cast<float>(i / 5 * 5 + (4 - i % 5) + 1));
  }
  CHECK(flipped > 150);
  CHECK(flipped < 250);

  auto pixels = numbered();
  auto random = stream(0);
  data::RandomHorizontalFlip{.probability = 0}(Image{pixels, shape}, random);
  CHECK(pixels == numbered());
}

TEST_CASE("a crop is a window of the padded image") {
  // Every shift occurs, and each result is the original shifted by it, with zeros from outside.
  constexpr Index padding = 2;
  std::set<std::pair<Index, Index>> shifts;
  for (Index sample = 0; sample < 400; ++sample) {
    auto pixels = numbered();
    auto random = stream(sample);
    data::RandomCrop{padding}(Image{pixels, shape}, random);
    auto draws = stream(sample);
    const Index down = draws.below(2 * padding + 1) - padding, right = draws.below(2 * padding + 1) - padding;
    shifts.insert({down, right});
    for (Index c = 0; c < 2; ++c)
      for (Index y = 0; y < 4; ++y)
        for (Index x = 0; x < 5; ++x) {
          const Index from_y = y + down, from_x = x + right;
          const bool inside = from_y >= 0 && from_y < 4 && from_x >= 0 && from_x < 5;
          const auto expected = inside ? static_cast<float>(c * 20 + from_y * 5 + from_x + 1) : 0.0f;
          REQUIRE(pixels[static_cast<std::size_t>(c * 20 + y * 5 + x)] == expected);
        }
  }
  CHECK(shifts.size() == 25);

  auto pixels = numbered();
  auto random = stream(0);
  data::RandomCrop{0}(Image{pixels, shape}, random);
  CHECK(pixels == numbered());
  CHECK(message_of<chorus::ShapeError>([&] {
          data::RandomCrop{5}(Image{pixels, shape}, random);
        }) == "RandomCrop: expected a padding from 0 to the image's size, got 5 for 4 x 5");
}

}  // namespace transforms_test
