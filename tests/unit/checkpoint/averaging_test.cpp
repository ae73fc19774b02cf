// Checkpoints of the policies that average in other ways: each rank's model, momentum and samples for LocalSgd, the
// server's for ParameterServer.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/outer/quantised.hpp>
#include <chorus/parallel/outer/streaming.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <filesystem>
#include <functional>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_averaging_test {

using namespace test::names;
using chorus_test::TemporaryFolder;
using Model = test::Normed<Cpu>;
using Sgd = optim::Sgd<Cpu>;
const optim::SgdOptions sgd{.lr = 0.1, .momentum = 0.9};

template <class Net>
void step(Net& net, Sgd& optimizer, std::int64_t number, const World& world) {
  const auto key = static_cast<std::uint32_t>(number);
  optimizer.zero_grad();
  cross_entropy(net(test::share(numbers(7, 5, key), world)), test::share(labels(7, 3, key), world)).backward();
  optimizer.step();
}

/// All numbers of the model and of the optimizer's state.
template <class Net>
std::vector<double> numbers_of(Net& net, Sgd& optimizer) {
  auto all = test::values(net.module());
  const auto add = [&](const void* data, Index count) {
    const auto* numbers = static_cast<const double*>(data);
    all.insert(all.end(), numbers, numbers + count);
  };
  for (const auto& named : nn::named_buffers<Cpu>(net.module()))
    if (named.buffer->dtype() == DType::f64) add(named.buffer->data(), named.buffer->count());
  for (const auto& tensor : optimizer.state())
    if (tensor.dtype == DType::f64) add(tensor.data, numel(tensor.shape));
  return all;
}

/// A function that makes a rank's net: `local(2)` makes that of LocalSgd.
auto local(int period) {
  return [period](auto& communicator) { return LocalSgd<Model>{make<Model>(), communicator, {.period = period}, 3}; };
}
template <class Outer>
auto outer(int period, const Outer& outer = {}) {
  return [=](auto& communicator) {
    return LocalSgd<Model, Outer>{make<Model>(), communicator, {.period = period}, 3, outer};
  };
}
auto served() {
  return [](auto& communicator) { return ParameterServer<Model>{make<Model>(), communicator, 3}; };
}
auto plain() {
  return [](auto& communicator) { return DistributedDataParallel<Model>{make<Model>(), communicator, {}, 3}; };
}

/// The results of `body(net, optimizer, world)` on each rank.
template <class MakeNet, class Body>
std::vector<std::string> on_ranks(int ranks, const MakeNet& make_net, const Body& body) {
  return Ranks(ranks,
               [&](const World& world) -> std::string {
                 auto communicator = comm::connect(world);
                 auto net = make_net(communicator);
                 Sgd optimizer{net.parameters(), sgd};
                 return body(net, optimizer, world);
               })
      .texts();
}

/// Trains from `from` (a file, or "") up to step `last`, and saves to `to`; returns each rank's numbers.
template <class MakeNet>
std::vector<std::string> train(int ranks, const MakeNet& make_net, const std::string& from, std::int64_t last,
                               const std::string& to) {
  return on_ranks(ranks, make_net, [&]<class Net>(Net& net, Sgd& optimizer, const World& world) {
    io::TrainingPosition position;
    if (!from.empty()) position = io::load_checkpoint(net, optimizer, from);
    for (; position.step < last; ++position.step) step(net, optimizer, position.step, world);
    if (!to.empty()) io::save_checkpoint(net, optimizer, position, to);
    if (!from.empty() || to.empty()) net.eval();  // at the end of runs, ranks average
    return test::text_of(numbers_of(net, optimizer));
  });
}

/// The mean of the ranks' numbers.
std::vector<double> mean_of(const std::vector<std::string>& texts) {
  std::vector<double> mean(test::numbers_in(texts[0]).size());
  for (const auto& text : texts)
    for (std::size_t i = 0; i < mean.size(); ++i)
      mean[i] += test::numbers_in(text)[i] / static_cast<double>(texts.size());
  return mean;
}

/// Stops at each step and resumes.
template <class MakeNet>
void check_resumed(int ranks, const MakeNet& make_net) {
  const TemporaryFolder folder;
  const auto whole = train(ranks, make_net, "", 7, "");
  REQUIRE(whole[0].size() > 100);
  for (const std::int64_t at : {0, 1, 2, 3, 6}) {
    INFO(ranks << " ranks, stopped after step " << at);
    train(ranks, make_net, "", at, folder / "run");
    CHECK((train(ranks, make_net, folder / "run", 7, "") == whole));  // a failure prints only a bool
  }
}

TEST_CASE("checkpoints of LocalSgd: a run broken off between averages goes on with the same bits") {
  for (const int ranks : {1, 2, 3})
    for (const int period : {1, 2, 4}) check_resumed(ranks, local(period));
}

TEST_CASE("checkpoints of outer optimizers: a run goes on with the same bits, also with a message on its way") {
  check_resumed(2, outer<Nesterov>(2));
  check_resumed(1, outer<Nesterov>(3));
  check_resumed(3, outer<Streaming<2>>(4));  // after step 3 the first message is on its way
  check_resumed(2, outer<Quantised<Streaming<1>, 8>>(2));
}

TEST_CASE("checkpoints of outer optimizers: other numbers of ranks and other policies take them, and they others'") {
  const TemporaryFolder folder;
  const auto run = folder / "run";
  train(3, outer<Streaming<2>>(4), "", 7, run);
  const auto has = [&](const std::string& name) { return io::SafetensorsReader(run).find(name) != nullptr; };
  CHECK((has("training/hook/outer.fc1.weight") && has("training/hook/velocity.fc1.weight")));
  CHECK_FALSE(has("training/rank1/hook/outer.fc1.weight"));  // it is the same on all
  CHECK(has("training/rank1/model/fc1.weight"));
  auto model = make<Model>();
  const auto parameters = static_cast<std::ptrdiff_t>(test::values(model).size());
  const auto go_on = [&](int ranks, const auto& make_net) {
    const auto texts = train(ranks, make_net, run, 12, "");
    for (const auto& text : texts) {
      const auto own = test::numbers_in(text), first = test::numbers_in(texts[0]);
      CHECK(std::equal(own.begin(), own.begin() + parameters, first.begin()));
    }
  };
  go_on(2, outer<Streaming<2>>(4));
  go_on(4, outer<Streaming<2>>(4));
  go_on(3, local(4));
  go_on(2, plain());
  train(3, local(4), "", 7, run);  // ranks are apart
  go_on(3, outer<Nesterov>(4));
  go_on(2, outer<Streaming<2>>(4));
  train(2, plain(), "", 7, run);
  go_on(3, outer<Nesterov>(4));
}

TEST_CASE("checkpoints of LocalSgd: on another number of ranks each takes the mean of what all had") {
  const TemporaryFolder folder;
  const auto run = folder / "run";
  const auto texts = train(3, local(4), "", 3, run);
  REQUIRE(distance(test::numbers_in(texts[0]), test::numbers_in(texts[1])) > 1e-4);
  const auto mean = mean_of(texts);
  const auto check_mean = [&](int ranks, const auto& make_net) {
    const auto loaded = on_ranks(ranks, make_net, [&](auto& net, Sgd& optimizer, const World& world) {
      const auto at = io::load_checkpoint(net, optimizer, run);
      const auto text = test::text_of(numbers_of(net, optimizer));
      for (std::int64_t number = at.step; number < 8; ++number) step(net, optimizer, number, world);
      return text;
    });
    for (const auto& text : loaded) {
      INFO(ranks << " ranks");
      CHECK(distance(test::numbers_in(text), mean) < rounding);
    }
  };
  for (const int ranks : {1, 2, 4}) check_mean(ranks, local(4));
  check_mean(3, plain());
  check_mean(2, served());
  SingleDevice<Model> net{make<Model>(7), 3};
  Sgd optimizer{net.parameters(), sgd};
  io::load_checkpoint(net, optimizer, run);
  CHECK(distance(numbers_of(net, optimizer), mean) < rounding);
}

TEST_CASE("checkpoints of LocalSgd: one that a single process saved gives all ranks its numbers") {
  const TemporaryFolder folder;
  const auto run = folder / "run";
  const World alone;
  SingleDevice<Model> net{make<Model>(7), 3};
  Sgd optimizer{net.parameters(), sgd};
  step(net, optimizer, 0, alone);
  io::save_checkpoint(net, optimizer, {.step = 1}, run);
  const auto loaded = on_ranks(2, local(4), [&](auto& rank, Sgd& its, const World& world) {
    for (std::int64_t number = 0; number < 3; ++number) step(rank, its, number, world);
    io::load_checkpoint(rank, its, run);
    auto text = test::text_of(numbers_of(rank, its));
    rank.synchronise();  // all ranks are equal
    return text + (text == test::text_of(numbers_of(rank, its)) ? "" : " changed");
  });
  for (const auto& text : loaded) CHECK(text == test::text_of(numbers_of(net, optimizer)));
}

TEST_CASE("checkpoints of LocalSgd: errors are clear, and change nothing") {
  const TemporaryFolder folder;
  const auto run = folder / "run", bad = folder / "bad";
  train(2, local(4), "", 2, run);
  for (const std::string name : {"training/hook/local_sgd", "training/rank1/hook/local_sgd"}) {
    const io::SafetensorsReader file(run);
    std::vector<std::vector<std::byte>> bytes;
    std::vector<io::TensorView> views;
    for (const auto& entry : file.entries()) {
      bytes.emplace_back(entry.bytes);
      file.read(entry, bytes.back());
      if (entry.name == name) reinterpret_cast<double*>(bytes.back().data())[0] = -1e9;
      views.push_back({entry.name, entry.dtype, entry.shape, bytes.back()});
    }
    io::write_safetensors(bad, views, file.metadata());
    for (const int ranks : {1, 2}) {
      const auto texts = on_ranks(ranks, local(4), [&](auto& net, Sgd& optimizer, const World& world) {
        step(net, optimizer, 0, world);
        const auto before = numbers_of(net, optimizer);
        const auto text = message_of<FileError>([&] { io::load_checkpoint(net, optimizer, bad); });
        return numbers_of(net, optimizer) == before ? text : "changed";
      });
      const auto rank = name.find("rank1") == name.npos || ranks == 1 ? 0u : 1u;
      CHECK_THAT(texts[rank], Contains("local_sgd has an invalid number"));
    }
  }
  // Rank 0 saves alone while the other rank continues, or has ended.
  for (const bool goes_on : {true, false}) {
    const auto start = comm::Clock::now();
    const auto texts = on_ranks(2, local(1), [&](auto& net, Sgd& optimizer, const World& world) -> std::string {
      step(net, optimizer, 0, world);
      if (world.rank == 0)
        return message_of<CommError>([&] { io::save_checkpoint(net, optimizer, {}, folder / "one"); });
      if (goes_on) message_of<CommError>([&] { step(net, optimizer, 1, world); });
      return "";
    });
    CHECK_THAT(texts[0], Contains("save_checkpoint: under LocalSgd") && Contains("all ranks must call it: "));
    CHECK(comm::Clock::now() - start < 5s);
    CHECK_FALSE(std::filesystem::exists(folder / "one"));
  }
}

TEST_CASE("checkpoints of ParameterServer: the server saves, and all go on with the same bits") {
  for (const int ranks : {1, 2, 3}) {
    const TemporaryFolder folder;
    auto model = make<Model>();
    const std::size_t parameters = test::values(model).size();
    // The server's numbers; workers have its parameters and no momentum.
    const auto shared = [&](const std::vector<std::string>& texts) {
      auto numbers = test::numbers_in(texts[0]);
      for (const auto& text : texts) {
        const auto own = test::numbers_in(text);
        CHECK(std::equal(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(parameters), numbers.begin()));
      }
      return numbers;
    };
    const auto whole = shared(train(ranks, served(), "", 6, ""));
    for (const std::int64_t at : {0, 1, 3, 5}) {
      INFO(ranks << " ranks, stopped after step " << at);
      train(ranks, served(), "", at, folder / "run");
      CHECK((shared(train(ranks, served(), folder / "run", 6, "")) == whole));
    }
  }
}

TEST_CASE("checkpoints of ParameterServer: of all ranks that save, the server alone writes") {
  const TemporaryFolder folder;
  const auto texts = on_ranks(3, served(), [&]<class Net>(Net& net, Sgd& optimizer, const World& world) {
    for (std::int64_t number = 0; number < 3; ++number) step(net, optimizer, number, world);
    for (int rank = 0; rank < 3; ++rank) {
      if (world.rank == rank) io::save_checkpoint(net, optimizer, {}, folder / "run");
      net.communicator().barrier();
    }
    return test::text_of(numbers_of(net, optimizer));
  });
  SingleDevice<Model> net{make<Model>(), 3};
  Sgd optimizer{net.parameters(), sgd};
  io::load_checkpoint(net, optimizer, folder / "run");
  CHECK(test::text_of(numbers_of(net, optimizer)) == texts[0]);
  CHECK(texts[0] != texts[2]);
}

TEST_CASE("checkpoints of LocalSgd: each rank's learning rate is its own") {
  const TemporaryFolder folder;
  on_ranks(2, local(2), [&]<class Net>(Net& net, Sgd& optimizer, const World& world) {
    optimizer.set_lr(0.25 + world.rank);
    io::save_checkpoint(net, optimizer, {}, folder / "run");
    return std::string();
  });
  const auto loaded = [&]<class Net>(Net& net, Sgd& optimizer, const World&) {
    io::load_checkpoint(net, optimizer, folder / "run");
    return cat(optimizer.lr());
  };
  CHECK(on_ranks(2, local(2), loaded) == std::vector<std::string>{"0.25", "1.25"});
  CHECK(on_ranks(3, local(2), loaded) == std::vector<std::string>(3, "0.75"));
}

}  // namespace checkpoint_averaging_test
