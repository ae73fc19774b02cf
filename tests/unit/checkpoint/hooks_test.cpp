// State of communication hooks: in checkpoints, on other numbers of ranks, under other hooks, and in other buckets.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/hooks/quantize.hpp>
#include <chorus/parallel/hooks/sparse_rows.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <filesystem>
#include <map>
#include <typeinfo>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_hooks_test {

using namespace test::names;
using chorus_test::TemporaryFolder;

/// Its matrices are large enough for compression.
struct Model : nn::Module {
  nn::Linear<Cpu, double> fc1{5, 14}, fc2{14, 12}, fc3{12, 3};
  CHORUS_MODULE(Model, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};
using Sgd = optim::Sgd<Cpu>;
const optim::SgdOptions sgd{.lr = 0.1, .momentum = 0.9};
const DistributedDataParallelOptions small_buckets{.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 2e-3};

/// The state of a net's hook for each parameter.
template <class Net>
std::map<std::string, std::vector<double>> memory_of(Net& net) {
  std::map<std::string, std::vector<double>> all;
  for (const auto& tensor : detail::access_to(net).hook_state()) {
    const auto* numbers = static_cast<const double*>(tensor.data);
    all[tensor.name].assign(numbers, numbers + numel(tensor.shape));
  }
  return all;
}
template <class Net>
std::string memory_text(Net& net) {
  std::string text;
  for (const auto& [name, numbers] : memory_of(net)) text += cat(name, " ", test::text_of(numbers));
  return text;
}

template <class Net, class Optimizer>
void step(Net& net, Optimizer& optimizer, std::int64_t number, const World& world) {
  const auto key = static_cast<std::uint32_t>(number);
  optimizer.zero_grad();
  cross_entropy(net(test::share(numbers(7, 5, key), world)), test::share(labels(7, 3, key), world)).backward();
  optimizer.step();
}

/// Calls `body(net, optimizer, world)` on ranks whose nets have this hook; returns each rank's result.
template <class Hook, class Optimizer = Sgd, class Body>
std::vector<std::string> on_ranks(int ranks, const Hook& hook, const Body& body) {
  return Ranks(ranks,
               [&](const World& world) -> std::string {
                 Distributed<Model, Hook> rank(world, small_buckets, make<Model>(), hook);
                 if constexpr (std::is_same_v<Optimizer, Sgd>) {
                   Sgd optimizer{rank.net.parameters(), sgd};
                   return body(rank.net, optimizer, world);
                 } else {
                   Optimizer optimizer{rank.net, sgd};
                   return body(rank.net, optimizer, world);
                 }
               })
      .texts();
}

/// Trains from `from` (a file, or "") to step `last`, and saves to `to`; returns each rank's parameters and hook state.
template <class Hook, class Optimizer = Sgd>
std::vector<std::string> train(int ranks, const Hook& hook, const std::string& from, std::int64_t last,
                               const std::string& to) {
  return on_ranks<Hook, Optimizer>(ranks, hook, [&](auto& net, auto& optimizer, const World& world) {
    io::TrainingPosition position;
    if (!from.empty()) position = io::load_checkpoint(net, optimizer, from);
    for (; position.step < last; ++position.step) step(net, optimizer, position.step, world);
    if (!to.empty()) io::save_checkpoint(net, optimizer, position, to);
    return test::text_of(test::values(net.module())) + "| " + memory_text(net);
  });
}

/// Stops at each step and resumes.
template <class Hook, class Optimizer = Sgd>
void check_resumed(int ranks, const Hook& hook) {
  INFO(typeid(Hook).name());
  const TemporaryFolder folder;
  const auto whole = train<Hook, Optimizer>(ranks, hook, "", 6, "");
  REQUIRE(whole[0].find('|') != std::string::npos);
  for (const std::int64_t at : {0, 1, 2, 3, 5}) {
    INFO(ranks << " ranks, stopped after step " << at);
    train<Hook, Optimizer>(ranks, hook, "", at, folder / "run");
    CHECK((train<Hook, Optimizer>(ranks, hook, folder / "run", 6, "") == whole));  // prints a bool
  }
}

TEST_CASE("checkpoints of hooks: a run under any hook goes on with the same bits") {
  for (const int ranks : {1, 2, 3}) {
    check_resumed(ranks, Bf16Compress{});
    check_resumed(ranks, Quantize8Bit{});
    check_resumed(ranks, PowerSgd{.matrix_approximation_rank = 2, .start_powersgd_iter = 2});
    check_resumed(ranks, PostLocalSgd{.start_local_sgd_iter = 1, .period = 2});
  }
  // The third column of fc3's gradient, whose rows sum to 0, is random in each step.
  check_resumed(2, PowerSgd{.matrix_approximation_rank = 3, .min_compression_rate = 0.5});
  check_resumed(2, Fp16Compress{});
  check_resumed(2, Fp16Compress{.error_feedback = false});
  check_resumed(2, SparseRows{});
}

TEST_CASE("checkpoints of hooks: with fused and sharded optimizers, too") {
  check_resumed<Bf16Compress, FusedOptimizer<Sgd>>(2, {});
  check_resumed<Bf16Compress, ShardedOptimizer<Sgd>>(3, {});
  check_resumed<PowerSgd, ShardedOptimizer<Sgd>>(2, {});
  check_resumed<PostLocalSgd, FusedOptimizer<Sgd>>(2, {.start_local_sgd_iter = 1, .period = 2});
}

/// The numbers before or after the bar.
std::vector<double> parameters_in(const std::string& text) { return test::numbers_in(text.substr(0, text.find('|'))); }

TEST_CASE("checkpoints of hooks: on another number of ranks each takes the mean of what all had") {
  const TemporaryFolder folder;
  const auto run = folder / "run";
  const auto compare = [&](const auto& hook, const std::string& what) {
    const auto texts = on_ranks(3, hook, [&](auto& net, auto& optimizer, const World& world) {
      for (std::int64_t number = 0; number < 3; ++number) step(net, optimizer, number, world);
      io::save_checkpoint(net, optimizer, {}, run);
      return test::text_of(memory_of(net)[what]);
    });
    std::vector<double> mean;
    for (const auto& text : texts) {
      const auto own = test::numbers_in(text);
      REQUIRE(!own.empty());
      mean.resize(own.size());
      for (std::size_t i = 0; i < own.size(); ++i) mean[i] += own[i] / 3;
    }
    for (const int ranks : {1, 2, 4})
      for (const auto& text : on_ranks(ranks, hook, [&](auto&net, auto&optimizer, const World&world) {
             io::load_checkpoint(net, optimizer, run);
             const auto loaded = test::text_of(memory_of(net)[what]);
             step(net, optimizer, 3, world);
             return loaded;
           })) {
        INFO(what << " on " << ranks << " ranks");
        CHECK(distance(test::numbers_in(text), mean) < rounding);
      }
  };
  compare(Bf16Compress{}, "rest.fc2.bias");
  compare(Quantize8Bit{}, "rest.fc1.weight");
  compare(PowerSgd{}, "rest.fc2.weight");
  compare(PowerSgd{}, "q.fc2.weight");
}

TEST_CASE("checkpoints of hooks: under post-local sgd, too, and on one device") {
  const TemporaryFolder folder;
  const auto run = folder / "run";
  const PostLocalSgd hook{.start_local_sgd_iter = 1, .period = 4};
  const auto texts = train(3, hook, "", 4, run);
  std::vector<double> mean(parameters_in(texts[0]).size());
  for (const auto& text : texts)
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += parameters_in(text)[i] / 3;
  REQUIRE(distance(parameters_in(texts[0]), parameters_in(texts[1])) > 1e-4);
  for (const auto& text : train(2, hook, run, 4, ""))
    CHECK(distance(test::numbers_in(text.substr(0, text.find('|'))), mean) < rounding);
  for (const auto& text : train(3, AllReduce{}, run, 4, ""))
    CHECK(distance(test::numbers_in(text.substr(0, text.find('|'))), mean) < rounding);
  SingleDevice<Model> net{make<Model>(7), 3};
  Sgd optimizer{net.parameters(), sgd};
  io::load_checkpoint(net, optimizer, run);
  CHECK(distance(test::values(net.module()), mean) < rounding);
}

TEST_CASE("checkpoints of hooks: on one rank, what was to be fed back is in the first gradients") {
  const TemporaryFolder folder;
  const auto run = folder / "run";
  const auto check_hook = [&](const auto& hook) {
    train(2, hook, "", 3, run);
    const auto text = on_ranks(1, hook, [&](auto& net, auto& optimizer, const World& world) {
      const auto gradients = [&](std::int64_t number) {
        step(net, optimizer, number, world);
        return test::gradients(net.module());
      };
      io::load_checkpoint(net, optimizer, run);
      auto memory = memory_of(net);
      const auto with = gradients(3);
      for (const auto& [name, numbers] : memory_of(net))
        if (name.starts_with("rest."))
          for (const double rest : numbers) check<Error>(rest == 0, name, " is not used up");
      io::load_checkpoint(net, optimizer, run);
      detail::access_to(net).set_hook_state({});
      auto expected = gradients(3);
      std::size_t next = 0;
      double most = 0;
      for (const auto& named : nn::named_parameters<Cpu>(net.module()))
        for (const double rest : memory["rest." + named.name]) {
          expected[next++] += rest;
          most = std::max(most, std::abs(rest));
        }
      return cat(most > 1e-6, distance(with, expected) < rounding);
    })[0];
    CHECK(text == "truetrue");
  };
  check_hook(Bf16Compress{});
  check_hook(Quantize8Bit{});
  check_hook(PowerSgd{});
}

TEST_CASE("checkpoints of hooks: a hook takes another one's errors, and starts anew where there are none") {
  const TemporaryFolder folder;
  const auto compressed = folder / "compressed", plain = folder / "plain";
  train(2, Bf16Compress{}, "", 3, compressed);
  train(2, AllReduce{}, "", 3, plain);
  const auto loaded = [&](const auto& hook, const std::string& path) {
    return on_ranks(2, hook, [&](auto& net, auto& optimizer, const World& world) {
      step(net, optimizer, 0, world);  // its present state is replaced
      io::load_checkpoint(net, optimizer, path);
      const auto text = memory_text(net);
      step(net, optimizer, 3, world);
      return text;
    });
  };
  const auto errors = loaded(Bf16Compress{}, compressed);
  CHECK_THAT(errors[0], Contains("rest.fc3.weight"));
  CHECK(errors[0] != errors[1]);
  CHECK(loaded(Fp16Compress{}, compressed) == errors);
  CHECK(loaded(Quantize8Bit{}, compressed) == errors);
  CHECK_THAT(loaded(PowerSgd{}, compressed)[1], Contains(errors[1].substr(errors[1].find("rest.fc3.weight"))));
  for (const auto& text : loaded(AllReduce{}, compressed)) CHECK(text == "");
  for (const auto& text : loaded(Fp16Compress{}, plain)) CHECK(text == "");
  SingleDevice<Model> net{make<Model>(7), 3};
  Sgd optimizer{net.parameters(), sgd};
  io::load_checkpoint(net, optimizer, compressed);
  const auto steps = on_ranks(2, PowerSgd{}, [&](auto& rank, auto& its, const World& world) {
    step(rank, its, 0, world);
    const int before = rank.hook().steps;
    io::load_checkpoint(rank, its, plain);
    return cat(before, " ", rank.hook().steps);
  });
  CHECK(steps[1] == "1 0");
}

TEST_CASE("checkpoints of hooks: errors are clear, and change nothing") {
  const TemporaryFolder folder;
  const auto run = folder / "run";
  train(2, PowerSgd{}, "", 2, run);
  const auto refused =
      on_ranks(2, PowerSgd{.matrix_approximation_rank = 2, .min_compression_rate = 1},
               [&](auto& net, auto& optimizer, const World& world) {
                 step(net, optimizer, 0, world);
                 const auto all = [&] { return memory_text(net) + test::text_of(test::values(net.module())); };
                 const auto before = all();
                 auto text = message_of<FileError>([&] { io::load_checkpoint(net, optimizer, run); });
                 return text + (all() == before ? "" : "; and it changed something");
               });
  CHECK(refused[0] == "loading " + run +
                          ": the file doesn't fit the model; mismatched: training/hook/q.fc1.weight (expected F64 "
                          "[5, 2], got F64 [5, 1]), training/hook/q.fc2.weight (expected F64 [14, 2], got F64 [14, "
                          "1]), training/hook/q.fc3.weight (expected F64 [12, 2], got F64 [12, 1]); resuming needs the "
                          "model and the optimizer that were saved (io::load takes the model alone)");
  CHECK_THAT(refused[1], Contains("mismatched: training/rank1/hook/q.fc1.weight (expected F64 [5, 2]") &&
                             !Contains("changed something"));
  // Rank 0 saves alone while the other rank continues, waits, or has ended.
  for (const int way : {0, 1, 2}) {
    INFO("way " << way);
    const auto start = comm::Clock::now();
    const auto texts = on_ranks(2, Bf16Compress{}, [&](auto& net, auto& optimizer, const World& world) -> std::string {
      step(net, optimizer, 0, world);
      if (world.rank == 0)
        return message_of<CommError>([&] { io::save_checkpoint(net, optimizer, {}, folder / "one"); });
      if (way == 0) step(net, optimizer, 1, world);
      if (way == 1) net.communicator().barrier();
      return "";
    });
    CHECK_THAT(
        texts[0],
        Contains("save_checkpoint: under LocalSgd, or a communication hook with state, all ranks must call it: "));
    CHECK(comm::Clock::now() - start < 5s);
    CHECK_FALSE(std::filesystem::exists(folder / "one"));
  }
}

TEST_CASE("checkpoints of hooks: numbers of another type than a frozen parameter's are refused") {
  const TemporaryFolder folder;
  const auto run = folder / "run", other = folder / "other";
  train(2, Bf16Compress{}, "", 2, run);
  const io::SafetensorsReader file(run);
  std::vector<std::vector<std::byte>> bytes;
  std::vector<io::TensorView> tensors;
  for (const auto& entry : file.entries()) {
    auto& own = bytes.emplace_back(entry.bytes);
    file.read(entry, own);
    tensors.push_back({entry.name, entry.dtype, entry.shape, own});
    if (!entry.name.ends_with("hook/rest.fc1.weight")) continue;
    own.resize(own.size() / 2);
    tensors.back() = {entry.name, io::FileDType::f32, entry.shape, own};
  }
  io::write_safetensors(other, tensors, io::Metadata(file.metadata().begin(), file.metadata().end()));
  for (const auto& text : on_ranks(2, Bf16Compress{}, [&](auto&net, auto&optimizer, const World&world) {
         net.module().fc1.weight.set_requires_grad(false);
         step(net, optimizer, 0, world);
         return message_of<FileError>([&] { io::load_checkpoint(net, optimizer, other); });
       }))
    CHECK_THAT(text, Contains("hook/rest.fc1.weight (expected F64 [14, 5], got F32 [14, 5])"));
}

TEST_CASE("hooks: what a net remembers is taken back from itself; numbers of other types or shapes are not taken") {
  const auto text = common_text(2, [](const World& world) -> std::string {
    Distributed<Model, Bf16Compress> rank(world, small_buckets);
    auto& net = rank.net;
    Sgd optimizer{net.parameters(), sgd};
    step(net, optimizer, 0, world);
    net.module().fc1.weight.set_requires_grad(false);  // its state is put aside
    step(net, optimizer, 1, world);
    const auto all = memory_of(net);
    detail::access_to(net).set_hook_state(detail::access_to(net).hook_state());
    std::string notes = cat(all.size(), " ", memory_of(net) == all, " ");
    std::vector<float> floats(12 * 14, 1);
    std::vector<double> doubles(12, 1);
    detail::access_to(net).set_hook_state({{"rest.fc2.weight", DType::f32, {12, 14}, floats.data(), true},
                        {"rest.fc2.bias", DType::f64, {11}, doubles.data(), true},
                        {"rest.fc3.bias", DType::f64, {3}, doubles.data(), true}});
    const auto taken = memory_of(net);
    for (const auto* name : {"rest.fc2.weight", "rest.fc2.bias", "rest.fc3.bias"}) {
      double sum = 0;
      for (const double number : taken.at(name)) sum += std::abs(number);
      notes += cat(sum, " ");
    }
    return notes;
  });
  CHECK(text == "6 true 0 0 3 ");
}

TEST_CASE("hooks: a copy of a net's hook begins without what that remembers") {
  const auto check_hook = [](const auto& hook) {
    using Hook = std::remove_cvref_t<decltype(hook)>;
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Model, Hook> rank(world, small_buckets, make<Model>(), hook);
      Sgd optimizer{rank.net.parameters(), sgd};
      step(rank.net, optimizer, 0, world);
      const auto before = memory_text(rank.net);
      DistributedDataParallel<Model, Hook> other(make<Model>(2), rank.communicator, {}, 3, rank.net.hook());
      std::string notes = memory_text(other) == "" ? "nothing " : "something ";
      Sgd its{other.parameters(), sgd};
      step(other, its, 1, world);
      return notes + (memory_text(rank.net) == before ? "kept" : "changed");
    });
    CHECK(text == "nothing kept");
  };
  check_hook(PowerSgd{});
  check_hook(Bf16Compress{});
  check_hook(Quantize8Bit{});
}

TEST_CASE("hooks: buckets know the names of their parameters from the start") {
  const auto text = common_text(3, [](const World& world) -> std::string {
    auto options = small_buckets;
    options.find_unused_parameters = true;  // the order stays the initial one
    Distributed<Model, Bf16Compress> rank(world, options);
    Sgd optimizer{rank.net.parameters(), sgd};
    step(rank.net, optimizer, 0, world);
    std::string names;
    for (const auto& [name, numbers] : memory_of(rank.net)) names += name + " ";
    return names;
  });
  CHECK(text == "rest.fc1.bias rest.fc1.weight rest.fc2.bias rest.fc2.weight rest.fc3.bias rest.fc3.weight ");
}

TEST_CASE("hooks: what is remembered of a parameter moves along when buckets change, or waits") {
  const auto text = common_text(2, [](const World& world) -> std::string {
    Distributed<Model, PowerSgd> rank(world, small_buckets);
    auto& net = rank.net;
    Sgd optimizer{net.parameters(), sgd};
    step(net, optimizer, 0, world);  // afterwards parameters are in the learned order
    const auto first = memory_of(net);
    double rest = 0;
    for (const double number : first.at("rest.fc2.weight")) rest += std::abs(number);
    std::string notes = cat(rest > 1e-3, " ");
    const auto pass = [&] { cross_entropy(net(numbers(2, 5, 1)), labels(2, 3, 1)); };
    for (const bool wants : {false, true}) {
      net.module().fc2.weight.set_requires_grad(wants);
      net.module().fc1.bias.set_requires_grad(wants);
      pass();
      notes += cat(memory_of(net) == first, " ");
    }
    return notes;
  });
  CHECK(text == "true true true ");
}

}  // namespace checkpoint_hooks_test
