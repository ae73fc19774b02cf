// Loaders of several ranks with random options: together they give the same samples as one rank, each once, in whole
// epochs and in resumed ones. Other seeds: CHORUS_RANDOM_SEEDS=17 (a single one, which is printed), or =1000-2000.
#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>

#include "../random_draw.hpp"

namespace random_shares_test {

using namespace chorus;
using data::DataLoader, data::Sampler, data::SamplerOptions;
using Draw = test::DrawFrom<0x73686172>;

/// Sample i is i in all of its pixels; some are slow, and one may throw.
struct Slow {
  Index count, broken;
  std::uint64_t seed;
  Index size() const { return count; }
  Index classes() const { return count; }
  data::ImageShape image_shape() const { return {1, 2, 2}; }
  std::int64_t get(Index i, std::span<float> image) const {
    const auto lot = philox(seed, {static_cast<std::uint32_t>(i), 0, 0, 0})[0];
    if (lot % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(lot % 300));
    if (i == broken) throw FileError(cat("sample ", i, " is unreadable"));
    for (auto& pixel : image) pixel = static_cast<float>(i);
    return i;
  }
};

struct Plan {
  std::uint64_t seed = 0;
  Index size = 0, broken = -1;
  int ranks = 1;
  SamplerOptions sampling;
  data::LoaderOptions loading;
  std::vector<Index> epochs, skips,
      leaves;  ///< each epoch's number, first batch, and last batch before the loop is left

  std::string text() const {
    auto out =
        cat("seed ", seed, ": ", size, " samples, ", broken, " is broken, ", ranks, " ranks, batch ", loading.batch,
            ", workers ", loading.workers, ", prefetch ", loading.prefetch, loading.drop_last ? ", drops the last" : "",
            sampling.shuffle ? ", shuffles" : "", sampling.padding ? ", pads" : "", "; epoch/skip/leave");
    for (std::size_t i = 0; i < epochs.size(); ++i) out += cat(" ", epochs[i], "/", skips[i], "/", leaves[i]);
    return out + "\n";
  }
};

Plan draw(std::uint64_t seed) {
  Draw d(seed);
  Plan p;
  p.seed = seed;
  p.size = d.chance(30) ? d.below(8) : d.below(70);
  p.ranks = static_cast<int>(1 + d.below(6));
  p.sampling = {.shuffle = d.chance(70), .seed = d.bits(), .padding = d.chance(25)};
  p.loading.batch = 1 + static_cast<Index>(d.chance(40) ? d.below(4) : d.below(30));
  if (d.chance(10)) p.loading.batch = std::numeric_limits<Index>::max() - d.below(3);
  p.loading.workers = static_cast<int>(d.below(5));
  p.loading.prefetch = static_cast<int>(1 + d.below(3));
  p.loading.drop_last = d.chance(30);
  if (d.chance(40)) p.loading.transforms = {data::RandomCrop{1}, data::RandomHorizontalFlip{}};
  if (p.size > 0 && d.chance(25)) p.broken = static_cast<Index>(d.below(static_cast<std::uint32_t>(p.size)));
  for (auto n = 1 + d.below(4); n > 0; --n) {
    const Index whole = p.size / p.loading.batch;
    const auto batches = whole + (!p.loading.drop_last && whole * p.loading.batch < p.size);
    p.epochs.push_back(d.below(4));
    p.skips.push_back(d.chance(50) ? 0 : d.below(static_cast<std::uint32_t>(batches) + 1));
    p.leaves.push_back(d.chance(60) ? batches : d.below(static_cast<std::uint32_t>(batches) + 1));
  }
  return p;
}

/// A rank's view of an epoch: one entry per batch.
struct Seen {
  std::vector<std::vector<std::int64_t>> labels;
  std::vector<std::vector<float>> pixels;
  std::string wrong, error;
};

Seen epoch_of(const Plan& p, DataLoader<Slow>& loader, std::size_t turn) {
  Seen seen;
  loader.set_epoch(p.epochs[turn]);
  loader.skip(p.skips[turn]);
  const auto& options = loader.sampler().options();
  Index b = p.skips[turn];
  try {
    for (const auto& batch : loader) {
      const Index n = batch.labels.numel(), global = std::min(p.loading.batch, p.size - b * p.loading.batch);
      const Index least = global / options.world_size, most = least + (global % options.world_size != 0);
      if (batch.index != b || batch.global_size != global || n < (options.padding ? most : least) || n > most)
        seen.wrong = cat("batch ", batch.index, " of ", batch.global_size, " samples has ", n, ", expected batch ", b,
                         " of ", global);
      seen.labels.push_back(batch.labels.to_vector());
      seen.pixels.push_back(batch.images.to_vector());
      ++b;
      if (b >= p.leaves[turn]) break;
    }
  } catch (const FileError& error) {
    seen.error = error.what();
  }
  if (seen.error.empty() && b < p.leaves[turn]) seen.wrong = cat("ended before batch ", b);
  return seen;
}

/// Joins all ranks' shares as one rank would see them.
Seen joined(const std::vector<Seen>& ranks) {
  Seen all;
  std::size_t batches = ranks[0].labels.size();
  for (const auto& rank : ranks) {
    batches = std::min(batches, rank.labels.size());
    if (!rank.wrong.empty()) all.wrong = rank.wrong;
    if (!rank.error.empty()) all.error = rank.error;
  }
  all.labels.resize(batches);
  all.pixels.resize(batches);
  for (std::size_t b = 0; b < batches; ++b)
    for (const auto& rank : ranks) {
      all.labels[b].insert(all.labels[b].end(), rank.labels[b].begin(), rank.labels[b].end());
      all.pixels[b].insert(all.pixels[b].end(), rank.pixels[b].begin(), rank.pixels[b].end());
    }
  return all;
}

/// Returns what is wrong with the loaders' epochs, or "".
std::string judge(const Plan& p) {
  const Slow dataset{p.size, p.broken, p.seed};
  std::vector<std::unique_ptr<DataLoader<Slow>>> loaders;
  for (int rank = -1; rank < p.ranks; ++rank) {  // -1: a single rank with all samples and no threads
    auto sampling = p.sampling;
    auto loading = p.loading;
    if (rank >= 0) sampling.rank = rank, sampling.world_size = p.ranks;
    if (rank < 0) loading.workers = 0;
    loaders.push_back(std::make_unique<DataLoader<Slow>>(dataset, Sampler(p.size, sampling), loading));
  }
  for (std::size_t turn = 0; turn < p.epochs.size(); ++turn) {
    auto expected = epoch_of(p, *loaders[0], turn);
    std::vector<Seen> seen;
    for (std::size_t i = 1; i < loaders.size(); ++i) seen.push_back(epoch_of(p, *loaders[i], turn));
    auto got = joined(seen);
    if (!expected.wrong.empty() || !got.wrong.empty()) return cat(turn, ": ", expected.wrong, got.wrong);
    if (p.sampling.padding) {  // additional samples, maybe the broken one
      for (std::size_t b = 0; b < got.labels.size() && b < expected.labels.size(); ++b)
        for (const auto label : expected.labels[b])
          if (std::find(got.labels[b].begin(), got.labels[b].end(), label) == got.labels[b].end())
            return cat(turn, ": batch ", b, " lacks sample ", label);
      continue;
    }
    if (got.error != expected.error) return cat(turn, ": '", got.error, "', expected '", expected.error, "'");
    if (got.labels != expected.labels) return cat(turn, ": other samples");
    if (got.pixels != expected.pixels) return cat(turn, ": other images");
    if (p.skips[turn] > 0 || !got.error.empty() || p.loading.drop_last || p.size == 0) continue;
    if (p.leaves[turn] < loaders[0]->size()) continue;
    std::vector<std::int64_t> all;
    for (const auto& batch : got.labels) all.insert(all.end(), batch.begin(), batch.end());
    std::sort(all.begin(), all.end());
    for (Index i = 0; i < p.size; ++i)
      if (static_cast<Index>(all.size()) != p.size || all[static_cast<std::size_t>(i)] != i)
        return cat(turn, ": ", all.size(), " samples, of which one is not ", i);
  }
  return "";
}

TEST_CASE("random shares: the ranks' loaders together give what one rank's does") {
  test::for_seeds(
      300,
      [](std::uint64_t seed) {
        const auto plan = draw(seed);
        INFO(plan.text());
        CHECK(judge(plan) == "");
      },
      [](std::uint64_t seed) { return draw(seed).text(); });
}

}  // namespace random_shares_test
