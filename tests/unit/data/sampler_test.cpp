#include <catch.hpp>
#include <chorus/data/sampler.hpp>
#include <limits>

#include "files.hpp"

namespace sampler_test {

namespace data = chorus::data;
using chorus::Index;
using data::Sampler;

std::vector<Index> copy(std::span<const Index> span) { return {span.begin(), span.end()}; }

std::vector<Index> share(Index samples, data::SamplerOptions options, Index b, Index batch) {
  const Sampler sampler(samples, options);
  return copy(sampler.share(b, batch));
}

std::vector<std::size_t> share_sizes(Index samples, int world, Index b, Index batch, bool padding = false) {
  std::vector<std::size_t> out;
  for (int rank = 0; rank < world; ++rank)
    out.push_back(share(samples, {.rank = rank, .world_size = world, .padding = padding}, b, batch).size());
  return out;
}

TEST_CASE("shares differ by at most one sample") {
  CHECK(share_sizes(640, 3, 0, 64) == std::vector<std::size_t>{22, 21, 21});
  CHECK(share_sizes(65, 3, 1, 64) == std::vector<std::size_t>{1, 0, 0});
  CHECK(share_sizes(66, 3, 1, 64) == std::vector<std::size_t>{1, 1, 0});
  CHECK(share_sizes(64, 1, 0, 64) == std::vector<std::size_t>{64});
}

TEST_CASE("the shares of all ranks make up the epoch, in one order for any number of ranks") {
  const Index samples = 103, batch = 10;
  Sampler alone(samples, {.seed = 5});
  alone.set_epoch(3);
  for (const int world : {1, 2, 3, 4, 7, 10}) {
    std::vector<Index> seen;
    Index place = 0;
    for (Index b = 0; b < alone.global_batches(batch); ++b, place = 0)
      for (int rank = 0; rank < world; ++rank) {
        Sampler sampler(samples, {.rank = rank, .world_size = world, .seed = 5});
        sampler.set_epoch(3);
        CHECK(sampler.share_begin(b, batch) == place);
        for (const Index sample : sampler.share(b, batch)) seen.push_back(sample);
        place += static_cast<Index>(sampler.share(b, batch).size());
        if (rank == world - 1) CHECK(place == sampler.global_size(b, batch));
      }
    CHECK(seen == copy(alone.order()));
  }
}

TEST_CASE("the order is a permutation that seed and epoch decide") {
  Sampler a(1000, {.seed = 1}), b(1000, {.seed = 1}), c(1000, {.seed = 2});
  const auto first = copy(a.order());
  CHECK(first == copy(b.order()));
  CHECK(first != copy(c.order()));
  a.set_epoch(1);
  CHECK(first != copy(a.order()));
  auto sorted = copy(a.order());
  std::ranges::sort(sorted);
  for (Index i = 0; i < 1000; ++i) CHECK(sorted[static_cast<std::size_t>(i)] == i);
  a.set_epoch(0);
  CHECK(first == copy(a.order()));

  Sampler plain(1000, {.shuffle = false});
  plain.set_epoch(4);
  CHECK(copy(plain.order()) == sorted);
}

TEST_CASE("padding gives equal shares: the sets of PyTorch's DistributedSampler") {
  CHECK(share_sizes(65, 3, 1, 63, true) == std::vector<std::size_t>{1, 1, 1});
  CHECK(share_sizes(640, 3, 0, 64, true) == std::vector<std::size_t>{22, 22, 22});

  // DistributedSampler(range(10), num_replicas=4, shuffle=False) has the indices 0..9, 0, 1. With global batches of 4
  // the last batch is {8, 9, 0, 1}.
  std::vector<Index> last;
  for (int rank = 0; rank < 4; ++rank)
    for (const Index sample : share(10, {.rank = rank, .world_size = 4, .shuffle = false, .padding = true}, 2, 4))
      last.push_back(sample);
  CHECK(last == std::vector<Index>{8, 9, 0, 1});

  // With fewer samples than ranks they repeat several times.
  CHECK(share(2, {.rank = 4, .world_size = 5, .shuffle = false, .padding = true}, 0, 5) == std::vector<Index>{0});
  CHECK(share(1, {.rank = 4, .world_size = 5, .padding = true}, 0, 5) == std::vector<Index>{0});
}

TEST_CASE("a global batch of fewer samples than ranks leaves the last ranks with none") {
  const auto sizes = [](Index b) {
    std::vector<std::size_t> out;
    for (int rank = 0; rank < 4; ++rank) out.push_back(share(3, {.rank = rank, .world_size = 4}, b, 2).size());
    return out;
  };
  CHECK(sizes(0) == std::vector<std::size_t>{1, 1, 0, 0});
  CHECK(sizes(1) == std::vector<std::size_t>{1, 0, 0, 0});
  CHECK(Sampler(3, {.rank = 3, .world_size = 4}).global_batches(2) == 2);
  CHECK(Sampler(3, {.rank = 3, .world_size = 4}).global_batches(2, true) == 1);
}

TEST_CASE("the number of batches") {
  const Sampler sampler(100);
  CHECK(sampler.global_batches(30) == 4);
  CHECK(sampler.global_batches(30, true) == 3);
  CHECK(sampler.global_batches(25) == 4);
  CHECK(sampler.global_batches(200) == 1);
  CHECK(Sampler(0).global_batches(8) == 0);
  constexpr auto all = std::numeric_limits<Index>::max();
  CHECK(sampler.global_batches(all) == 1);
  CHECK(sampler.share(0, all).size() == 100);
}

TEST_CASE("senseless samplers are refused") {
  const auto error = [](auto action) { return message_of<chorus::UsageError>(action); };
  CHECK(error([] { Sampler(10, {.world_size = 3}).global_batches(0); }) ==
        "Sampler: expected a global batch of at least 1 sample, got 0");
  CHECK(error([] { Sampler(10, {.rank = 3, .world_size = 3}); }) ==
        "Sampler: rank 3 is not in [0, 3), the ranks of a world of 3");
  CHECK(error([] { Sampler(10, {.rank = -1, .world_size = 3}); }) ==
        "Sampler: rank -1 is not in [0, 3), the ranks of a world of 3");
  CHECK(error([] { Sampler(10, {.world_size = 0}); }) == "Sampler: expected a world size of at least 1, got 0");
  CHECK(error([] { Sampler(-1); }) == "Sampler: expected a dataset of at least 0 samples, got -1");
  CHECK(error([] { Sampler(10).set_epoch(-1); }) == "Sampler: expected an epoch of at least 0, got -1");
  CHECK(error([] { share(10, {}, 2, 5); }) == "Sampler: batch 2 of 5 does not exist in 10 samples");
}

}  // namespace sampler_test
