// One checkpoint for the plain, the fused and the sharded form of an optimizer.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/muon.hpp>
#include <chorus/optim/schedules.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_forms_test {

using namespace test::names;
using chorus_test::TemporaryFolder;

using Adam = optim::Adam<Cpu>;
const optim::AdamOptions adam{.lr = 0.05, .amsgrad = true};
using Muon = optim::Muon<Cpu>;
const optim::MuonOptions muon{.lr = 0.05, .adam = adam};

/// Trains from `from` (a file, or "") up to step `last`, and saves to `to`; returns the parameters as text.
template <class Optimizer, class Hook = AllReduce>
std::string train(int ranks, const std::string& from, std::uint32_t last, const std::string& to) {
  return common_text(ranks, [=](const World& world) {
    Distributed<test::Smooth<Cpu>, Hook> rank(world);
    auto optimizer = [&] {
      if constexpr (std::is_same_v<Optimizer, Adam>)
        return Adam{rank.net.parameters(), adam};
      else if constexpr (std::is_same_v<Optimizer, Muon>)
        return Muon{rank.net.parameters(), muon};
      else if constexpr (requires { Optimizer{rank.net, adam}; })
        return Optimizer{rank.net, adam};
      else
        return Optimizer{rank.net, muon};
    }();
    optimizer.set_group(optim::NameBegins{"fc2."}, {.lr_scale = 0.5, .weight_decay = 0.1});
    io::TrainingPosition position;
    if (!from.empty()) position = io::load_checkpoint(rank.net, optimizer, from);
    for (; position.step < last; ++position.step) {
      const auto number = static_cast<std::uint32_t>(position.step);
      optimizer.zero_grad();
      cross_entropy(rank.net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world))
          .backward();
      optimizer.step();
    }
    if (!to.empty()) io::save_checkpoint(rank.net, optimizer, position, to);
    return test::text_of(test::values(rank.net.module()));
  });
}

TEST_CASE("checkpoints of fused and sharded optimizers: a resumed run ends with the same bits") {
  const TemporaryFolder folder;
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks");
    const std::string file = folder / "run";
    const auto fused = train<FusedOptimizer<Adam>>(ranks, "", 4, "");
    REQUIRE(!fused.empty());
    train<FusedOptimizer<Adam>>(ranks, "", 2, file);
    CHECK(train<FusedOptimizer<Adam>>(ranks, file, 4, "") == fused);
    const auto sharded = train<ShardedOptimizer<Adam>>(ranks, "", 4, "");
    REQUIRE(!sharded.empty());
    train<ShardedOptimizer<Adam>>(ranks, "", 2, file);
    CHECK(train<ShardedOptimizer<Adam>>(ranks, file, 4, "") == sharded);
  }
}

TEST_CASE("checkpoints of fused and sharded optimizers: one goes on as the other, on other ranks") {
  const TemporaryFolder folder;
  const auto whole = test::numbers_in(train<Adam>(1, "", 4, ""));
  REQUIRE(!whole.empty());
  const auto goes_on = [&](const std::string& text) { return distance(test::numbers_in(text), whole) < rounding; };
  train<ShardedOptimizer<Adam>>(3, "", 2, folder / "sharded");
  CHECK(goes_on(train<Adam>(1, folder / "sharded", 4, "")));
  CHECK(goes_on(train<ShardedOptimizer<Adam>>(2, folder / "sharded", 4, "")));
  train<Adam>(1, "", 2, folder / "plain");
  CHECK(goes_on(train<ShardedOptimizer<Adam>>(4, folder / "plain", 4, "")));
  CHECK(goes_on(train<FusedOptimizer<Adam>>(2, folder / "plain", 4, "")));
  train<FusedOptimizer<Adam>>(2, "", 2, folder / "fused");
  CHECK(goes_on(train<ShardedOptimizer<Adam>>(3, folder / "fused", 4, "")));
}

TEST_CASE("checkpoints of sharded optimizers: Muon goes on with the same bits, and on other ranks, also fused") {
  const TemporaryFolder folder;
  const auto whole = train<ShardedOptimizer<Muon>>(3, "", 4, "");
  CHECK(train<Muon>(3, "", 4, "") == whole);  // each rank steps all
  train<ShardedOptimizer<Muon>>(3, "", 2, folder / "sharded");
  CHECK(train<ShardedOptimizer<Muon>>(3, folder / "sharded", 4, "") == whole);
  const auto goes_on = [&](const std::string& text) {
    return distance(test::numbers_in(text), test::numbers_in(whole)) < rounding;
  };
  CHECK(goes_on(train<ShardedOptimizer<Muon>>(2, folder / "sharded", 4, "")));
  CHECK(goes_on(train<FusedOptimizer<Muon>>(2, folder / "sharded", 4, "")));
}

TEST_CASE("checkpoints of sharded optimizers: before the first step there is nothing but zeros") {
  const TemporaryFolder folder;
  train<ShardedOptimizer<Adam>>(2, "", 0, folder / "new");
  CHECK(train<ShardedOptimizer<Adam>>(2, folder / "new", 2, "") == train<ShardedOptimizer<Adam>>(2, "", 2, ""));
}

TEST_CASE("checkpoints: of a run that has not begun, the first pass still learns the order, with the same bits") {
  const TemporaryFolder folder;
  train<ShardedOptimizer<Adam>, ReduceScatter>(3, "", 0, folder / "new");
  const auto whole = train<ShardedOptimizer<Adam>, ReduceScatter>(3, "", 3, "");
  REQUIRE(!whole.empty());
  CHECK(train<ShardedOptimizer<Adam>, ReduceScatter>(3, folder / "new", 3, "") == whole);
}

/// The same with all other state of a run: a loss scale, averages, a plateau's counters. Returns all of it as text.
template <class Optimizer>
std::string train_with_all(int ranks, const std::string& from, std::uint32_t last, const std::string& to) {
  return common_text(ranks, [=](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    auto optimizer = [&] {
      if constexpr (std::is_same_v<Optimizer, Adam>)
        return Adam{rank.net.parameters(), adam};
      else
        return Optimizer{rank.net, adam};
    }();
    optim::GradScaler scaler{rank.net, {.init_scale = 4, .growth_interval = 2}};
    optim::ParameterAverage average{rank.net.parameters(), optim::equal_weights()};  // needs its count
    optim::ReduceOnPlateau plateau{optimizer, {.factor = 0.5, .patience = 2}};
    io::TrainingPosition position;
    if (!from.empty()) position = io::load_checkpoint(rank.net, optimizer, from, scaler, average, plateau);
    for (; position.step < last; ++position.step) {
      const auto number = static_cast<std::uint32_t>(position.step);
      optimizer.zero_grad();
      const auto loss =
          cross_entropy(rank.net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world));
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      average.update();
      plateau.step(number < 1 ? 1 : 2);
    }
    if (!to.empty()) io::save_checkpoint(rank.net, optimizer, position, to, scaler, average, plateau);
    const auto values = test::text_of(test::values(rank.net.module()));
    const optim::AveragedScope averaged{average};
    return cat(values, "|", test::text_of(test::values(rank.net.module())), "|", scaler.loss_scale(), "|",
               optimizer.lr(), "|", plateau.best());
  });
}

TEST_CASE("checkpoints: a loss scale, averages and a plateau go on with the same bits") {
  const TemporaryFolder folder;
  for (const std::uint32_t at : {1U, 3U}) {
    INFO("broken off at step " << at);
    const auto whole = train_with_all<Adam>(2, "", 5, "");
    REQUIRE(whole.ends_with("|16|0.025|1"));
    train_with_all<Adam>(2, "", at, folder / "plain");
    CHECK(train_with_all<Adam>(2, folder / "plain", 5, "") == whole);
    const auto sharded = train_with_all<ShardedOptimizer<Adam>>(2, "", 5, "");
    REQUIRE(sharded.ends_with("|16|0.025|1"));
    train_with_all<ShardedOptimizer<Adam>>(2, "", at, folder / "sharded");
    CHECK(train_with_all<ShardedOptimizer<Adam>>(2, folder / "sharded", 5, "") == sharded);
  }
}

TEST_CASE("checkpoints: what a run takes along must be in the file, and the other way round") {
  const TemporaryFolder folder;
  SingleDevice<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), 3};
  Adam optimizer{net.parameters(), adam};
  optim::GradScaler scaler{net};
  optim::ParameterAverage average{net.parameters(), optim::equal_weights()};
  io::save_checkpoint(net, optimizer, {}, folder / "with", scaler);
  io::save_checkpoint(net, optimizer, {}, folder / "without");
  CHECK_THROWS_WITH(io::load_checkpoint(net, optimizer, folder / "with"), Contains("unexpected: training/loss_scale"));
  CHECK_THROWS_WITH(io::load_checkpoint(net, optimizer, folder / "without", scaler),
                    Contains("missing: training/loss_scale"));
  const optim::AveragedScope averaged{average};
  CHECK_THROWS_WITH(io::save_checkpoint(net, optimizer, {}, folder / "with", average),
                    Contains("while the model holds the averages"));
}

/// Writes a file's tensors with a correct checksum and other metadata.
void write_again(const std::string& from, const std::string& to, const io::Metadata& metadata) {
  const io::SafetensorsReader file(from);
  std::vector<std::vector<std::byte>> data;
  std::vector<io::TensorView> tensors;
  for (const auto& entry : file.entries()) {
    file.read(entry, data.emplace_back(entry.bytes));
    tensors.push_back({entry.name, entry.dtype, entry.shape, data.back()});
  }
  io::write_safetensors(to, tensors, metadata);
}

/// Copies the file, with its only occurrence of `old` replaced by `text` of the same length.
void replace_in(const std::string& path, std::string_view old, std::string_view text, const std::string& to) {
  auto content = chorus_test::get(path);
  const auto at = content.find(old);
  REQUIRE(at != std::string::npos);
  REQUIRE(old.size() == text.size());
  chorus_test::put(to, content.replace(at, old.size(), text));
  write_again(to, to, io::SafetensorsReader(to).metadata());
}

TEST_CASE("checkpoints: a file whose data have changed is refused, on all ranks; one without a checksum is not") {
  const TemporaryFolder folder;
  SingleDevice<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), 3};
  Adam optimizer{net.parameters(), adam};
  io::save_checkpoint(net, optimizer, {.step = 3}, folder / "good");
  CHECK(io::load_checkpoint(net, optimizer, folder / "good").step == 3);
  const auto good = chorus_test::get(folder / "good");
  for (const std::size_t from_end : {1u, 100u, 333u}) {
    auto flipped = good;
    flipped[good.size() - from_end] = static_cast<char>(flipped[good.size() - from_end] ^ 4);
    chorus_test::put(folder / "bad", flipped);
    const auto before = io::parameters_sha256(net.module());
    CHECK_THROWS_WITH(io::load_checkpoint(net, optimizer, folder / "bad"), Contains("the file is damaged"));
    CHECK_THROWS_WITH(io::load(net, folder / "bad"), Contains("the file is damaged"));
    CHECK(io::parameters_sha256(net.module()) == before);
  }
  const auto told = common_text(3, [&](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    Adam each{rank.net.parameters(), adam};
    io::load_checkpoint(rank.net, each, folder / "good");
    return message_of<FileError>([&] { io::load_checkpoint(rank.net, each, folder / "bad"); });
  });
  CHECK_THAT(told, Contains("the file is damaged"));
  auto metadata = io::SafetensorsReader(folder / "bad").metadata();
  metadata.erase(std::string(io::data_hash_key));
  write_again(folder / "bad", folder / "old", metadata);
  CHECK(io::load_checkpoint(net, optimizer, folder / "old").step == 3);
}

TEST_CASE("checkpoints: numbers that no run has kept are refused, and nothing changes") {
  const TemporaryFolder folder;
  SingleDevice<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), 3};
  Adam optimizer{net.parameters(), adam};
  optim::GradScaler scaler{net, {.init_scale = 1234.5}};
  optim::ReduceOnPlateau plateau{optimizer};
  const auto load = [&](const std::string& path) { io::load_checkpoint(net, optimizer, path, scaler, plateau); };
  const auto bytes = [](auto number) { return std::string(reinterpret_cast<const char*>(&number), sizeof number); };
  plateau.step(7.25);
  io::save_checkpoint(net, optimizer, {}, folder / "good", scaler, plateau);
  load(folder / "good");
  const auto before = io::parameters_sha256(net.module());

  constexpr auto inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const double scale : {0.0, -1.0, nan, inf}) {
    replace_in(folder / "good", bytes(1234.5), bytes(scale), folder / "bad");
    CHECK_THROWS_WITH(load(folder / "bad"), Contains("training/loss_scale has an invalid number"));
  }
  for (const double lr : {nan, inf}) {
    replace_in(folder / "good", bytes(optimizer.lr()), bytes(lr), folder / "bad");
    CHECK_THROWS_WITH(load(folder / "bad"), Contains("training/lr has an invalid number"));
  }
  replace_in(folder / "good", bytes(optimizer.lr()) + bytes(7.25), bytes(-0.5) + bytes(7.25), folder / "bad");
  CHECK_THROWS_WITH(load(folder / "bad"), Contains("training/plateau has an invalid number"));
  const auto with = [&](const char* key, const std::string& value) {
    auto metadata = io::SafetensorsReader(folder / "good").metadata();
    metadata[key] = value;
    write_again(folder / "good", folder / "bad", metadata);
    return message_of<FileError>([&] { load(folder / "bad"); });
  };
  CHECK_THAT(with("training/parameter_order", "fc1.bias\nfc2.bias\nfc1.bias\n"),
             Contains("training/parameter_order has \"fc1.bias\" twice"));
  CHECK_THAT(with("training/parameter_order", ""), Contains("training/parameter_order is empty"));
  CHECK_THAT(with("training/forward_passes", "4294967296"), Contains("expected a number from 0 to 4294967295"));
  CHECK_THAT(with("training/step", "9223372036854775807"), Contains("expected a number from 0 to"));
  CHECK(with("training/step", "7") == "nothing");
  CHECK(io::parameters_sha256(net.module()) == before);
}

TEST_CASE("checkpoints of sharded optimizers: a parameter that is frozen when a run goes on keeps its state") {
  const TemporaryFolder folder;
  for (const int ranks : {1, 3}) {
    INFO(ranks << " ranks");
    const auto whole = train<Adam>(ranks, "", 2, folder / "run");
    REQUIRE(!whole.empty());
    const auto then = common_text(ranks, [&](const World& world) {
      auto model = make<test::Smooth<Cpu>>();
      model.fc2.weight.set_requires_grad(false);
      Distributed<test::Smooth<Cpu>> rank(world, {}, model);
      ShardedOptimizer<Adam> optimizer{rank.net, adam};
      const auto step = [&](auto& net, auto& stepped, std::uint32_t number, bool frozen) {
        net.module().fc2.weight.set_requires_grad(!frozen);
        stepped.zero_grad();
        mean(square(net(numbers(4, 5, number)))).backward();
        stepped.step();
      };
      io::load_checkpoint(rank.net, optimizer, folder / "run");
      SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
      Adam plain{single.parameters(), adam};
      io::load_checkpoint(single, plain, folder / "run");
      for (std::uint32_t number = 0; number < 4; ++number) {
        step(rank.net, optimizer, number, number < 2);
        step(single, plain, number, number < 2);
      }
      return cat(distance(test::values(rank.net.module()), test::values(single.module())) < rounding);
    });
    CHECK(then == "true");
  }
}

}  // namespace checkpoint_forms_test
