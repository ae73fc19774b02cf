// DistributedDataParallel over some of the ranks: groups made by comm::split.
#include <catch.hpp>
#include <chorus/comm/split.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_groups_test {

using namespace test::names;

/// Follows a Smooth.
struct Last : nn::Module {
  nn::Linear<Cpu, double> fc{3, 2};
  CHORUS_MODULE(Last, fc)
  auto forward(const auto& x) const { return fc(x); }
};

/// Each group has its own batches.
std::uint32_t batch_of(int group, std::uint32_t number) { return static_cast<std::uint32_t>(group) * 10 + number; }

template <class Model>
std::vector<double> train_alone(int group) {
  SingleDevice<Model> net{make<Model>(), 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
  for (std::uint32_t number = 0; number < 4; ++number) test::step(net, optimizer, batch_of(group, number), 7);
  return test::values(net.module());
}

TEST_CASE("ddp groups: each trains on its own data, and synchronises batch norm within itself") {
  Ranks ranks(5, [](const World& world) -> std::string {
    auto all = comm::connect(world);
    const int group = world.rank < 2 ? 0 : 1;  // of two ranks and of three
    const auto place = comm::split(all, world, group);
    auto communicator = comm::connect(place);
    DistributedDataParallel<test::Synced<Cpu>> net{make<test::Synced<Cpu>>(), communicator, {}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 4; ++number) test::step(net, optimizer, batch_of(group, number), 7, place);
    return test::text_of(test::values(net.module()));
  });
  const auto texts = ranks.texts();
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    INFO(rank << ": " << texts[rank]);
    CHECK(distance(test::numbers_in(texts[rank]), train_alone<test::Synced<Cpu>>(rank < 2 ? 0 : 1)) < rounding);
    CHECK(texts[rank] == texts[rank < 2 ? 0 : 2]);
  }
}

TEST_CASE("ddp groups: one net is averaged over all ranks, another in each pair") {
  using Shared = test::Smooth<Cpu>;
  const auto loss = [](const auto& h) { return mean(square(h)); };
  Ranks ranks(4, [&](const World& world) -> std::string {
    auto all = comm::connect(world);
    const auto pair = comm::split(all, world, world.rank / 2);
    auto communicator = comm::connect(pair);
    DistributedDataParallel<Shared> shared{make<Shared>(), all, {}, 3};
    DistributedDataParallel<Last> last{make<Last>(7 + static_cast<std::uint32_t>(world.rank) / 2), communicator, {}, 3};
    loss(last(shared(test::share(numbers(8, 5, 1), world)))).backward();
    return test::text_of(test::gradients(shared.module())) + "|" + test::text_of(test::gradients(last.module()));
  });
  const auto texts = ranks.texts();

  std::vector<std::vector<double>> lasts;
  SingleDevice<Shared> shared{make<Shared>(), 3};
  for (const int pair : {0, 1}) {
    SingleDevice<Last> last{make<Last>(7 + static_cast<std::uint32_t>(pair)), 3};
    const auto half = contiguous(numbers(8, 5, 1).slice(0, 4 * pair, 4 * pair + 4));
    (loss(last(shared(half))) * 0.5).backward();  // half of all samples
    lasts.push_back(test::gradients(last.module()));
    for (double& gradient : lasts.back()) gradient *= 2;
  }
  const auto expected = test::gradients(shared.module());
  for (std::size_t rank = 0; rank < 4; ++rank) {
    INFO(rank << ": " << texts[rank]);
    const auto bar = texts[rank].find('|');
    REQUIRE(bar != std::string::npos);
    CHECK(distance(test::numbers_in(texts[rank].substr(0, bar)), expected) < rounding);
    CHECK(distance(test::numbers_in(texts[rank].substr(bar + 1)), lasts[rank / 2]) < rounding);
  }
}

}  // namespace ddp_groups_test
