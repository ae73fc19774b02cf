#include <catch.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/data/text.hpp>
#include <chorus/data/weighted_sampler.hpp>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "files.hpp"

namespace samples_test {

namespace data = chorus::data;
using chorus::Index;
using chorus::ShapeError;
using chorus::UsageError;
using data::DataLoader;
using data::Sampler;
template <class T, int Rank>
using Tensor = chorus::Tensor<T, Rank>;

data::SamplerOptions of_rank(int rank, int world, bool shuffle = true) {
  return {.rank = rank, .world_size = world, .shuffle = shuffle, .seed = 3};
}

struct House {
  std::vector<float> rooms;
  double price;
  std::string street;
};
/// Sample i has i % 3 + 1 rooms of size i.
struct Houses {
  Index size() const { return 11; }
  House get(Index i) const {
    return {std::vector<float>(static_cast<std::size_t>(i % 3 + 1), static_cast<float>(i)), static_cast<double>(i),
            "street " + std::to_string(i)};
  }
};

TEST_CASE("rows with float targets come in the sampler's order, prefetched or not") {
  auto x = Tensor<float, 2>::empty({10, 3});
  auto y = Tensor<double, 1>::empty({10});
  for (Index i = 0; i < 30; ++i) x.data()[i] = static_cast<float>(i);
  for (Index i = 0; i < 10; ++i) y.data()[i] = static_cast<double>(i);
  const data::TensorDataset rows{x, y};
  DataLoader loader{rows, Sampler{10, of_rank(0, 1)}, {.batch = 4, .workers = GENERATE(0, 3)}};
  std::vector<Index> seen;
  for (auto& [features, targets] : loader) {
    CHECK(features.shape() == chorus::Shape<2>{targets.size(0), 3});
    for (Index i = 0; i < targets.numel(); ++i) {
      seen.push_back(static_cast<Index>(targets(i)));
      CHECK(features(i, 2) == static_cast<float>(3 * seen.back() + 2));
    }
  }
  const auto order = loader.sampler().order();
  CHECK(seen == std::vector<Index>(order.begin(), order.end()));
  CHECK(message_of<ShapeError>([&] {
          data::TensorDataset{x, Tensor<float, 1>::ones({9})};
        }) == "TensorDataset: expected 10 samples, as in the first tensor, got shape [9]");
  CHECK(message_of<UsageError>([&] { rows.get(10); }) == "TensorDataset: sample 10 is not in [0, 10)");
}

TEST_CASE("structs become tuples; the ranks pad to one length, and an empty share has the others' shapes") {
  const Houses houses;
  const auto on = [&](int rank, int world) {
    return DataLoader{houses, Sampler{11, of_rank(rank, world)}, {.batch = 5}, data::pad_to_longest(-1)};
  };
  auto whole = on(0, 1), first = on(0, 3), second = on(1, 3), third = on(2, 3);
  auto a = first.begin(), b = second.begin(), c = third.begin();
  Index empty = 0;
  for (auto& [rooms, prices, streets] : whole) {
    REQUIRE(streets.size() == static_cast<std::size_t>(prices.numel()));
    std::vector<float> of_ranks;
    for (auto* at : {&a, &b, &c}) {
      auto& [own_rooms, own_prices, own_streets] = **at;
      CHECK(own_rooms.size(1) == rooms.size(1));
      CHECK(own_rooms.size(0) == own_prices.size(0));
      CHECK(own_streets.size() == static_cast<std::size_t>(own_prices.size(0)));
      empty += own_rooms.size(0) == 0;
      const auto numbers = own_rooms.to_vector();
      of_ranks.insert(of_ranks.end(), numbers.begin(), numbers.end());
      ++*at;
    }
    CHECK(of_ranks == rooms.to_vector());
    const auto house = static_cast<Index>(prices(0));
    for (Index r = 0; r < rooms.size(1); ++r) CHECK(rooms(0, r) == (r <= house % 3 ? static_cast<float>(house) : -1));
    CHECK(streets[0] == "street " + std::to_string(house));
  }
  CHECK(empty == 2);  // the last batch has one sample

  const auto fixed = [&](Index length) {
    DataLoader loader{houses, Sampler{11}, {.batch = 11, .workers = 0}, data::pad_to(length)};
    return std::get<0>(*loader.begin()).shape();
  };
  CHECK(fixed(6) == chorus::Shape<2>{11, 6});
  CHECK(message_of<ShapeError>([&] {
          fixed(2);
        }).starts_with("pad_to: expected at most 2 along the first axis, got shape [3] of sample "));
  CHECK(message_of<UsageError>([] { data::pad_to(0); }) == "pad_to: expected a length of at least 1, got 0");
  DataLoader ragged{houses, Sampler{11, of_rank(0, 1, false)}, {.batch = 11, .workers = 1}};
  CHECK(message_of<ShapeError>([&] { ragged.begin(); }) ==
        "DataLoader: expected samples of one shape, got [1] and, of sample 1 of the batch, [2] "
        "(data::pad_to_longest pads the first axis)");
  CHECK(message_of<UsageError>([&] {
          DataLoader{houses, Sampler{11}, {.views = 2}};
        }).starts_with("DataLoader: transforms and views need a dataset of images"));
}

TEST_CASE("padding that belongs to each field") {
  using Pair = std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>;
  const data::VectorDataset pairs{std::vector<Pair>{{{1, 2}, {3}}, {{4}, {5, 6, 7}}}};
  DataLoader loader{pairs, Sampler{2, of_rank(0, 1, false)}, {.batch = 2}, data::pad_to_longest(0, -100)};
  auto& [tokens, labels] = *loader.begin();
  CHECK(tokens.to_vector() == std::vector<std::int64_t>{1, 2, 4, 0});
  CHECK(labels.to_vector() == std::vector<std::int64_t>{3, -100, -100, 5, 6, 7});
}

/// A sample is its index and a random number for augmentation.
struct Drawing {
  Index size() const { return 7; }
  std::pair<Index, float> get(Index i, data::RandomStream& random) const { return {i, random.uniform()}; }
};

TEST_CASE("a collate function of one's own; what samples draw doesn't depend on the ranks") {
  const Drawing drawing;
  struct Own {
    Tensor<Index, 2> numbers;
    std::vector<float> drawn;
  };
  const auto own = [](const std::vector<std::pair<Index, float>>& samples) {
    Own out{Tensor<Index, 2>::empty({static_cast<Index>(samples.size()), 1}), {}};
    for (const auto& [number, drawn] : samples) {
      out.numbers.data()[out.drawn.size()] = number;
      out.drawn.push_back(drawn);
    }
    return out;
  };
  const auto drawn_by = [&](int world) {
    std::map<Index, float> out;
    for (int rank = 0; rank < world; ++rank) {
      DataLoader loader{drawing, Sampler{7, of_rank(rank, world)}, {.batch = 4}, own};
      loader.set_epoch(2);
      for (auto& batch : loader) {
        CHECK(batch.numbers.size(0) == static_cast<Index>(batch.drawn.size()));
        for (std::size_t i = 0; i < batch.drawn.size(); ++i) out[batch.numbers.data()[i]] = batch.drawn[i];
      }
    }
    return out;
  };
  CHECK(drawn_by(1).size() == 7);
  CHECK(drawn_by(1) == drawn_by(4));  // one of which has no share of the last batch

  const auto flat = [](const std::vector<std::pair<Index, float>>& samples) {
    return Tensor<float, 1>::ones({2 * static_cast<Index>(samples.size())});
  };
  DataLoader loader{drawing, Sampler{7, of_rank(3, 4)}, {.batch = 4}, flat};
  loader.skip(1);
  CHECK(message_of<UsageError>([&] { loader.begin(); })
            .starts_with("DataLoader: this rank's share of a batch is empty, and the collate function's tensor for one "
                         "sample has shape [2], expected a first axis of 1"));
}

TEST_CASE("parts and unions of datasets, of images too") {
  const Houses houses;
  const auto parts = data::random_split(houses, {0.7, 0.3}, 5);
  CHECK(parts[0].size() == 8);
  CHECK(parts[1].size() == 3);
  CHECK(parts[0].indices() == data::random_split(houses, {8, 3}, 5)[0].indices());
  CHECK(parts[0].indices() != data::random_split(houses, {8, 3}, 6)[0].indices());
  const data::ConcatDataset all{parts[0], parts[1]};
  std::map<double, int> prices;
  for (Index i = 0; i < all.size(); ++i) ++prices[all.get(i).price];
  CHECK(prices.size() == 11);
  CHECK(all.get(8).price == parts[1].get(0).price);

  const data::Subset some{data::SyntheticImages{20, 1}, {4, 2, 9}};
  DataLoader loader{some, Sampler{3, of_rank(0, 1, false)}, {.batch = 3}};
  const data::SyntheticImages images{20, 1};
  DataLoader plain{images, Sampler{20, of_rank(0, 1, false)}, {.batch = 20}};
  const auto &few = *loader.begin(), &many = *plain.begin();
  CHECK(chorus::contiguous(few.images[1]).to_vector() == chorus::contiguous(many.images[2]).to_vector());
  CHECK(few.labels(2) == many.labels(9));

  CHECK(message_of<UsageError>([&] {
          data::random_split(houses, {8, 2});
        }) == "random_split: expected lengths that add up to the dataset's 11 samples, got 10");
  CHECK(message_of<UsageError>([&] {
          data::random_split(houses, {8, 4});
        }) == "random_split: expected lengths that add up to the dataset's 11 samples, got 8 and then 4");
  CHECK(message_of<UsageError>([&] {
          data::random_split(houses, {0.5, 0.25});
        }) == "random_split: expected fractions that add up to 1, got 0.75");
  CHECK(message_of<UsageError>([&] { data::Subset(houses, {11}); }) == "Subset: sample 11 is not in [0, 11)");
  CHECK(message_of<UsageError>([&] { all.get(11); }) == "ConcatDataset: sample 11 is not in [0, 11)");
  CHECK(message_of<UsageError>([&] { data::ConcatDataset{std::vector<Houses>{}}; }) ==
        "ConcatDataset: expected at least one dataset, got none");
}

TEST_CASE("a weighted sampler draws by weights, and shares one order out among the ranks") {
  const std::vector<double> weights{1, 0, 3, 4};
  data::WeightedRandomSampler whole{Sampler{4, of_rank(0, 1)}, weights, {.num_samples = 8000}};
  std::vector<int> counts(4);
  for (const Index i : whole.order()) ++counts[static_cast<std::size_t>(i)];
  CHECK(std::abs(counts[0] - 1000) < 120);
  CHECK(counts[1] == 0);
  CHECK(std::abs(counts[2] - 3000) < 200);

  const auto first_order = std::vector<Index>(whole.order().begin(), whole.order().end());
  std::vector<Index> together;
  for (Index b = 0; b < whole.global_batches(10); ++b)
    for (int rank = 0; rank < 3; ++rank) {
      const data::WeightedRandomSampler one{Sampler{4, of_rank(rank, 3)}, weights, {.num_samples = 8000}};
      if (b > 2) continue;
      const auto share = one.share(b, 10);
      together.insert(together.end(), share.begin(), share.end());
    }
  CHECK(together == std::vector<Index>(first_order.begin(), first_order.begin() + 30));
  whole.set_epoch(1);
  CHECK(first_order != std::vector<Index>(whole.order().begin(), whole.order().end()));

  const data::WeightedRandomSampler once{Sampler{4}, weights, {.num_samples = 3, .replacement = false}};
  auto drawn = std::vector<Index>(once.order().begin(), once.order().end());
  std::sort(drawn.begin(), drawn.end());
  CHECK(drawn == std::vector<Index>{0, 2, 3});

  // A repeated sample is augmented differently each time.
  const Drawing drawing;
  DataLoader loader{drawing, data::WeightedRandomSampler{Sampler{7}, {0, 0, 1, 0, 0, 0, 0}}, {.batch = 7}};
  auto& [numbers, draws] = *loader.begin();
  CHECK(numbers(0) == 2);
  CHECK(numbers(6) == 2);
  CHECK(draws(0) != draws(6));

  const auto refused = [](std::vector<double> w, data::WeightedOptions options = {}) {
    return message_of<UsageError>([&] { data::WeightedRandomSampler{Sampler{2}, w, options}; });
  };
  CHECK(refused({1}) == "WeightedRandomSampler: expected 2 weights, one for each sample, got 1");
  CHECK(refused({1, -1}) == "WeightedRandomSampler: expected weights of at least 0, got -1 for sample 1");
  CHECK(refused({0, 0}) == "WeightedRandomSampler: expected at least 1 weights above 0, got 0");
  CHECK(refused({1, 0}, {.replacement = false}) == "WeightedRandomSampler: expected at least 2 weights above 0, got 1");
  CHECK(refused({1, 1}, {.num_samples = -1}) ==
        "WeightedRandomSampler: expected at least 0 samples in an epoch, got -1");
  CHECK(refused({1e308, 1e308}) == "WeightedRandomSampler: the sum of the weights is too large");
}

TEST_CASE("windows of tokens, and lines of a file") {
  const data::TokenWindows windows{{1, 2, 3, 4, 5, 6}, 2};
  DataLoader loader{windows, Sampler{windows.size(), of_rank(0, 1, false)}, {.batch = 2}};
  auto& [tokens, next] = *loader.begin();
  CHECK(tokens.to_vector() == std::vector<std::int64_t>{1, 2, 3, 4});
  CHECK(next.to_vector() == std::vector<std::int64_t>{2, 3, 4, 5});
  CHECK(message_of<UsageError>([&] { windows.get(2); }) == "TokenWindows: sample 2 is not in [0, 2)");
  CHECK(message_of<UsageError>([] {
          data::TokenWindows{{1}, 0};
        }) == "TokenWindows: expected a window of at least 1, got 0");

  const TestFolder folder;
  const std::string text = "one\r\n\ntwo";
  const auto path = folder.write("a.txt", {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  CHECK(data::read_lines(path) == std::vector<std::string>{"one", "", "two"});
  CHECK(message_of<chorus::FileError>([&] { data::read_lines(folder.path() + "/none"); }) ==
        folder.path() + "/none: No such file or directory");
}

}  // namespace samples_test
