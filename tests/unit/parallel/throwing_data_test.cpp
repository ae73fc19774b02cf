// A dataset or a transform that throws on one rank under DistributedDataParallel: that rank gets its error, and all
// others soon get an error that names it.
#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/ops/cast.hpp>

#include "ranks.hpp"

namespace throwing_data_test {

using namespace test::names;

/// 24 images, one of which may be unreadable.
struct Images {
  Index broken = -1;
  Index size() const { return 24; }
  Index classes() const { return 3; }
  data::ImageShape image_shape() const { return {1, 1, 5}; }
  std::int64_t get(Index i, std::span<float> image) const {
    if (i == broken) throw FileError(cat("sample ", i, " is unreadable"));
    std::fill(image.begin(), image.end(), static_cast<float>(i));
    return i % 3;
  }
};

/// Trains for an epoch; `loading` and `images` make a rank throw.
void train(const World& world, const Images& images, const data::LoaderOptions& loading) {
  Distributed<test::Smooth<Cpu>> rank(world);
  data::DataLoader loader{images, rank.net.sampler(images, {.shuffle = false}), loading};
  optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
  for (auto& [x, y] : loader) {
    optimizer.zero_grad();
    cross_entropy(rank.net(to<double>(flatten(x))), y).backward();
    optimizer.step();
  }
}

TEST_CASE("throwing data: a sample that one rank can't read ends all ranks, who name it") {
  for (const int workers : {0, 2}) {
    // Batches of 6 in shares of 2: sample 14 belongs to rank 1 in batch 2.
    const auto begun = std::chrono::steady_clock::now();
    const auto texts = Ranks(3, [=](const World& world) {
                         try {
                           train(world, {.broken = 14}, {.batch = 6, .workers = workers});
                         } catch (const Error& error) {
                           return std::string(error.what());
                         }
                         return std::string("trained");
                       }).texts();
    INFO(workers << " workers\n" << texts[0] << "\n" << texts[1] << "\n" << texts[2]);
    CHECK(texts[1] == "sample 14 is unreadable");
    CHECK_THAT(texts[0], Catch::Matchers::Contains("rank 1"));
    CHECK_THAT(texts[2], Catch::Matchers::Contains("rank 1"));
    CHECK(std::chrono::steady_clock::now() - begun < 5s);  // no rank waited for the timeout
  }
}

TEST_CASE("throwing data: a transform that throws on one rank ends all ranks, who name it") {
  const auto texts = Ranks(3, [](const World& world) {
                       int calls = 0;
                       const data::Transform fails = [&](const data::Image&, data::RandomStream&) {
                         if (world.rank == 2 && ++calls == 3) throw UsageError("the transform's own error");
                       };
                       try {
                         train(world, {}, {.batch = 6, .workers = 1, .transforms = {fails}});
                       } catch (const Error& error) {
                         return std::string(error.what());
                       }
                       return std::string("trained");
                     }).texts();
  INFO(texts[0] << "\n" << texts[1] << "\n" << texts[2]);
  CHECK(texts[2] == "the transform's own error");
  for (const int rank : {0, 1}) CHECK_THAT(texts[static_cast<std::size_t>(rank)], Catch::Matchers::Contains("rank 2"));
}

}  // namespace throwing_data_test
