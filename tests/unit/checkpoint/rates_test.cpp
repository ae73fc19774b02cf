// Facts about a run in a checkpoint: the learning rate and the seed. And ranks without a file.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/optim/schedules.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>

#include <unit/io/files.hpp>
#include <unit/message_of.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_rates_test {

using namespace test::names;
using chorus_test::TemporaryFolder;
using Model = test::Smooth<Cpu>;
using Sgd = optim::Sgd<Cpu>;
const optim::SgdOptions sgd{.lr = 0.5, .momentum = 0.9};

template <class Optimizer, class Net>
auto made(Net& net) {
  if constexpr (std::is_same_v<Optimizer, Sgd>)
    return Sgd{net.parameters(), sgd};
  else
    return Optimizer{net, sgd};
}

/// Trains from `from` (a file, or "") up to step `last`, and saves to `to`; returns parameters and rate as text. The
/// rate is set by hand once.
template <class Optimizer>
std::string train(const std::string& from, std::uint32_t last, const std::string& to) {
  return common_text(2, [=](const World& world) {
    Distributed<Model> rank(world);
    auto optimizer = made<Optimizer>(rank.net);
    io::TrainingPosition position;
    if (!from.empty()) position = io::load_checkpoint(rank.net, optimizer, from);
    for (; position.step < last; ++position.step) {
      const auto number = static_cast<std::uint32_t>(position.step);
      if (number == 1) optimizer.set_lr(0.1);
      optimizer.zero_grad();
      cross_entropy(rank.net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world))
          .backward();
      optimizer.step();
    }
    if (!to.empty()) io::save_checkpoint(rank.net, optimizer, position, to);
    return cat(test::text_of(test::values(rank.net.module())), optimizer.lr());
  });
}

TEST_CASE("checkpoints: a run goes on with the learning rate that was set, under each form of an optimizer") {
  const TemporaryFolder folder;
  const auto check = [&]<class Optimizer>() {
    const auto whole = train<Optimizer>("", 4, "");
    REQUIRE(whole.ends_with(" 0.1"));
    train<Optimizer>("", 2, folder / "run");
    CHECK(train<Optimizer>(folder / "run", 4, "") == whole);
    CHECK(train<Sgd>(folder / "run", 2, "").ends_with(" 0.1"));
  };
  check.operator()<Sgd>();
  check.operator()<FusedOptimizer<Sgd>>();
  check.operator()<ShardedOptimizer<Sgd>>();
}

/// One device's run, and a file of it.
struct Run {
  SingleDevice<Model> net;
  Sgd optimizer{net.parameters(), sgd};

  explicit Run(std::uint64_t seed = 3) : net{make<Model>(), seed} {}
  void save(const std::string& path) { io::save_checkpoint(net, optimizer, {.step = 5}, path); }
  std::int64_t load(const std::string& path) { return io::load_checkpoint(net, optimizer, path).step; }
};

TEST_CASE("checkpoints: a schedule that is made behind the load starts from the run's first rate") {
  const TemporaryFolder folder;
  Run run;
  optim::Schedule schedule(run.optimizer, optim::ExponentialDecay{.gamma = 0.5});
  schedule.set_epoch(2);
  run.save(folder / "run");
  Run resumed;
  resumed.load(folder / "run");
  CHECK(resumed.optimizer.lr() == 0.125);
  optim::Schedule(resumed.optimizer, optim::ExponentialDecay{.gamma = 0.5}).set_epoch(3);
  CHECK(resumed.optimizer.lr() == 0.0625);
}

TEST_CASE("checkpoints: files of earlier versions, without rate and seed, are read") {
  const TemporaryFolder folder;
  Run run;
  run.optimizer.set_lr(0.1);
  run.save(folder / "run");
  const io::SafetensorsReader file(folder / "run");
  auto metadata = file.metadata();
  CHECK(metadata.erase("training/seed") == 1);
  std::vector<std::vector<std::byte>> data;
  std::vector<io::TensorView> tensors;
  for (const auto& entry : file.entries()) {
    if (entry.name == "training/lr") continue;
    file.read(entry, data.emplace_back(entry.bytes));
    tensors.push_back({entry.name, entry.dtype, entry.shape, data.back()});
  }
  CHECK(tensors.size() + 1 == file.entries().size());
  io::write_safetensors(folder / "old", tensors, metadata);
  Run other(4);
  CHECK(other.load(folder / "old") == 5);
  CHECK(other.optimizer.lr() == 0.5);
}

TEST_CASE("checkpoints: a net with another seed than the run's is refused, by all ranks, and nothing changes") {
  const TemporaryFolder folder;
  Run run, other(4);
  test::step(run.net, run.optimizer, 1, 8);
  run.save(folder / "run");
  const auto before = test::values(other.net.module());
  CHECK_THAT(message_of<UsageError>([&] { other.load(folder / "run"); }),
             Contains("expected the run's seed, 3, ") && Contains("got 4"));
  CHECK(test::values(other.net.module()) == before);
  other.save(folder / "other");
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world);
    auto optimizer = made<Sgd>(rank.net);
    const auto load = [&](const char* name) { io::load_checkpoint(rank.net, optimizer, folder / name); };
    load("run");
    return message_of<UsageError>([&] { load("other"); });
  });
  CHECK_THAT(text, Contains("expected the run's seed, 4, ") && Contains("got 3 on rank 0"));
}

TEST_CASE("checkpoints: a rank that has no file is named on all ranks, which go on together") {
  const TemporaryFolder folder;
  Run().save(folder / "run");
  const auto texts = Ranks(3, [&](const World& world) {
                       Distributed<Model> rank(world);
                       auto optimizer = made<Sgd>(rank.net);
                       const auto load = [&](const std::string& path) {
                         return message_of<FileError>([&] { io::load_checkpoint(rank.net, optimizer, path); });
                       };
                       const auto one = load(folder / (world.rank == 1 ? "none" : "run")), all = load(folder / "none");
                       rank.communicator.barrier();
                       return cat(one, "|", all);
                     }).texts();
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    CHECK_THAT(texts[rank], Contains(": rank 1 can't read the file, and other ranks can") &&
                                Contains(": all ranks must read the same file|") &&
                                Contains("|loading " + (folder / "none") + ": opening the file failed"));
    CHECK((texts[rank].find("can (loading ") != std::string::npos) == (rank == 1));
  }
}

}  // namespace checkpoint_rates_test
