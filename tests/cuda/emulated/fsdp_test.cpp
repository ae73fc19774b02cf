// FullyShardedDataParallel on devices, in several processes, without NCCL: the bits of DistributedDataParallel with a
// sharded optimizer, the steps of CPUs, and a part of the memory.
#include <algorithm>
#include <catch.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/launch/run.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/muon.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <cstdlib>
#include <functional>

#include "../../unit/comm/processes.hpp"
#include "../../unit/message_of.hpp"

namespace fsdp_cuda_test {

using namespace chorus;
using namespace std::chrono_literals;

/// Units of one or two layers; the table's gradient is written before its values are read, and a layer is used twice.
template <class D>
struct Model : nn::Module {
  nn::Embedding<D> table{11, 12};
  nn::LayerNorm<D> norm{36};
  nn::Linear<D> fc1{36, 36}, frozen{36, 36}, fc2{36, 5};
  nn::Dropout drop{0.2};
  CHORUS_MODULE(Model, table, norm, fc1, frozen, fc2, drop)
  Model() {
    frozen.weight.set_requires_grad(false);
    frozen.bias.set_requires_grad(false);
  }
  auto forward(const auto& tokens) const {
    const auto x = norm(flatten(table(tokens)));
    return fc2(drop(tanh(fc1(frozen(tanh(fc1(x)))))));
  }
};

struct Batch {
  Tensor<std::int64_t, 2> tokens;
  Tensor<std::int64_t, 1> labels;
};
Batch batch(const comm::World& world, std::uint32_t step) {
  const Index global = 13, each = global / world.size, first = each * world.rank;
  const Index mine = world.rank == world.size - 1 ? global - first : each;
  Batch out{Tensor<std::int64_t, 2>::empty({mine, 3}), Tensor<std::int64_t, 1>::empty({mine})};
  for (Index row = 0; row < mine; ++row) {
    for (Index c = 0; c < 3; ++c)
      out.tokens(row, c) = philox(1, {static_cast<std::uint32_t>((first + row) * 3 + c), step, 0, 0})[0] % 11;
    out.labels(row) = (out.tokens(row, 0) + out.tokens(row, 1)) % 5;
  }
  return out;
}

/// Losses and norms of six steps, one of which adds up two batches, and of an evaluation; then the parameters' hash.
template <class Net, class Optimizer>
std::string train(Net& net, Optimizer& optimizer, const comm::World& world, double max_norm) {
  std::string text;
  const auto add = [&](std::uint32_t number) {
    const auto [tokens, labels] = batch(world, number);
    const auto loss = cross_entropy(net(tokens), labels);
    loss.backward();
    text += cat(net.mean(static_cast<double>(loss.item()), labels.numel()), ' ');
  };
  for (std::uint32_t step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    if (step == 3) {
      const auto scope = net.no_sync();
      add(100);
    }
    add(step);
    if constexpr (requires { optimizer.clip_grad_norm(max_norm); })
      static_cast<void>(optimizer.clip_grad_norm(max_norm));
    else
      text += cat(net.clip_grad_norm(max_norm), ' ');
    optimizer.step();
  }
  const NoGrad without;
  const auto [tokens, labels] = batch(world, 50);
  text += cat(net.mean(static_cast<double>(cross_entropy(net(tokens), labels).item()), labels.numel()), ' ');
  return text;
}

constexpr optim::AdamOptions adam{.lr = 0.02};

template <class M, class Units, template <Device> class Opt = optim::Adam>
std::string train_sharded(const comm::World& world, double max_norm) {
  using Net = FullyShardedDataParallel<M, Units>;
  manual_seed(4);
  Run run({}, {.seed = 9, .timeout = 10s}, world);
  Net net{M{}, run};
  Opt<typename Net::D> optimizer{net.parameters(), {.lr = adam.lr}};
  auto text = train(net, optimizer, world, max_norm);
  const auto whole = net.gathered();
  return text + "|" + io::parameters_sha256(net.module());
}
template <class M>
std::string train_whole(const comm::World& world) {
  using Net = DistributedDataParallel<M, ReduceScatter>;
  manual_seed(4);
  Run run({}, {.seed = 9, .timeout = 10s}, world);
  Net net{M{}, run};
  ShardedOptimizer<optim::Adam<typename Net::D>> optimizer{net, adam};
  return train(net, optimizer, world, 1e9) + "|" + io::parameters_sha256(net.module());
}

std::vector<double> numbers_in(const std::string& text) {
  std::vector<double> out;
  const char* at = text.c_str();
  for (char* end = nullptr; *at != '|'; at = end + 1) {
    out.push_back(std::strtod(at, &end));
    if (end == at) return {};
  }
  return out;
}

template <template <class> class Wrapped, class Units, template <Device> class Opt = optim::Adam>
void check(int size, double tolerance) {
  const auto train = [&]<class D>(D) {
    return test::Ranks(size, [](const comm::World& w) { return train_sharded<Wrapped<D>, Units, Opt>(w, 0.5); }).texts();
  };
  const auto cpu = train(Cpu{}), gpu = train(Cuda{});
  INFO(size << " ranks\n" << cpu[0] << '\n' << gpu[0]);
  for (const auto& text : gpu) CHECK(text == gpu[0]);
  const auto got = numbers_in(gpu[0]), expected = numbers_in(cpu[0]);
  REQUIRE(expected.size() == 14);
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(expected[i]).margin(tolerance));
}

template <class D>
using Mixed = nn::MixedPrecision<Model<D>>;

TEST_CASE("FSDP on devices takes the steps of CPUs, with many units and with one, kept or not", "[cuda]") {
  for (const int size : {1, 2, 3}) check<Model, ByBytes<2000>>(size, 1e-5);
  check<Model, ByBytes<1>>(2, 1e-5);
  check<Model, KeepParameters>(2, 1e-5);
  check<Mixed, ByBytes<2000>>(2, 2e-2);
}

TEST_CASE("FSDP on devices: LAMB and Muon take the steps of CPUs, from pieces", "[cuda]") {
  check<Model, ByBytes<2000>, optim::Lamb>(2, 1e-5);
  check<Model, ByBytes<2000>, optim::Muon>(3, 1e-2);  // sums in another order turn some roundings to bf16 around
}

TEST_CASE("FSDP on devices has the bits of DDP in parts with a sharded optimizer", "[cuda]") {
  const auto whole = test::Ranks(2, train_whole<Model<Cuda>>).texts();
  const auto sharded =
      test::Ranks(2, [](const comm::World& w) { return train_sharded<Model<Cuda>, ByBytes<2000>>(w, 1e9); }).texts();
  const auto hash = [](const std::string& text) { return text.substr(text.find('|') + 1); };
  INFO(whole[0] << '\n' << sharded[0]);
  CHECK(hash(whole[0]).size() == 64);
  CHECK(hash(sharded[0]) == hash(whole[0]));
}

TEST_CASE("FSDP on devices: a loss scale leaves out the steps that it leaves out on CPUs", "[cuda]") {
  const auto trained = []<class D>(D) {
    return test::Ranks(2,
                       [](const comm::World& world) {
                         manual_seed(4);
                         Run run({}, {.seed = 9, .timeout = 10s}, world);
                         FullyShardedDataParallel<nn::MixedPrecision<Model<D>, half>, ByBytes<2000>> net{
                             nn::MixedPrecision<Model<D>, half>{}, run};
                         optim::Adam<D> optimizer{net.parameters(), adam};
                         optim::GradScaler scaler{net, {.init_scale = 0x1p22, .growth_interval = 4}};
                         std::string text;
                         for (std::uint32_t step = 0; step < 12; ++step) {
                           optimizer.zero_grad();
                           const auto [tokens, labels] = batch(world, step);
                           const auto loss = cross_entropy(net(tokens), labels);
                           scaler.scale(loss).backward();
                           scaler.step(optimizer);
                           text += cat(net.mean(static_cast<double>(loss.item()), labels.numel()), ' ');
                         }
                         return cat(text, scaler.skipped_steps(), " |");
                       })
        .texts();
  };
  const auto cpu = trained(Cpu{}), gpu = trained(Cuda{});
  INFO(cpu[0] << '\n' << gpu[0]);
  CHECK(gpu[0] == gpu[1]);
  const auto got = numbers_in(gpu[0]), expected = numbers_in(cpu[0]);
  REQUIRE(expected.size() == 13);
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(expected[i]).margin(2e-2));
  CHECK(expected.back() > 2);
  CHECK(expected.back() < 10);
}

/// Equal layers; `look` is called while they compute.
struct Deep : nn::Module {
  static constexpr Index wide = 256, count = 8;
  static constexpr std::size_t unit = (wide * wide + wide) * sizeof(float), whole = unit * count;
  nn::ModuleList<nn::Linear<Cuda>> layers;
  std::function<void()> look = [] {};
  CHORUS_MODULE(Deep, layers)
  Deep() {
    for (Index i = 0; i < count; ++i) layers.push_back(nn::Linear<Cuda>(wide, wide));
  }
  auto forward(const auto& x) const {
    auto y = tanh(layers[0](x));
    for (std::size_t i = 1; i < count; ++i) {
      y = tanh(layers[i](y));
      look();
    }
    return y;
  }
};

TEST_CASE("FSDP on devices: an n-th of the parameters and two units, of the gradients and three", "[cuda]") {
  const auto texts =
      test::Ranks(4, [](const comm::World& world) {
        std::size_t parameters = 0, gradients = 0;
        Run run({}, {.seed = 9, .timeout = 10s}, world);
        Deep model;
        const auto look = [&] {
          parameters = std::max(parameters, trace::memory(trace_slot(Cuda{}), trace::Memory::parameters));
          gradients = std::max(gradients, trace::memory(trace_slot(Cuda{}), trace::Memory::gradients));
        };
        model.look = look;
        for (const auto& layer : model.layers) layer.weight.register_hook([look](const auto&) { look(); });
        FullyShardedDataParallel<Deep, ByBytes<Deep::unit>> net{std::move(model), run};
        const auto x = Tensor<float, 2>::full({2, Deep::wide}, 0.5f);
        const Tensor<std::int64_t, 1> y = Tensor<std::int64_t, 1>::from({1, 2}, {2});
        for (int step = 0; step < 4; ++step) {
          if (step == 2) parameters = gradients = 0;
          cross_entropy(net(x), y).backward();
          for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
        }
        return cat(parameters, ' ', gradients, ' ', trace::memory(trace_slot(Cuda{}), trace::Memory::parameters), " |");
      }).texts();
  INFO(texts[0]);
  const auto held = numbers_in(texts[0]);
  REQUIRE(held.size() == 3);
  // A block may be a quarter larger than asked for.
  const double whole = 1.25 * Deep::whole, unit = 1.25 * Deep::unit;
  CHECK(held[0] <= whole / 4 + 2 * unit);
  CHECK(held[1] <= whole / 4 + 4 * unit);
  CHECK(held[2] <= whole / 4);
}

template <class D>
struct Skips : nn::Module {
  nn::Embedding<D> table{11, 12};
  nn::LayerNorm<D> norm{36};
  nn::Linear<D> fc1{36, 36}, fc2{36, 5};
  bool skips = false;
  CHORUS_MODULE(Skips, table, norm, fc1, fc2)
  auto forward(const auto& tokens) const {
    auto x = norm(flatten(table(tokens)));
    if (!skips) x = tanh(fc1(x));
    return fc2(x);
  }
};

TEST_CASE("FSDP on devices: what is written within gathered() counts, and layers may be left out", "[cuda]") {
  const auto trained = []<class D>(D) {
    return test::Ranks(
               2,
               [](const comm::World& world) {
                 manual_seed(4);
                 Run run({}, {.seed = 9, .timeout = 10s}, world);
                 FullyShardedDataParallel<Skips<D>, ByBytes<2000>> net{
                     Skips<D>{}, run, {.find_unused_parameters = true}};
                 net.gathered([](Skips<D>& model) { model.fc2.bias.assign(Tensor<float, 1, D>::full({5}, 0.25f)); });
                 optim::Adam<D> optimizer{net.parameters(), adam};
                 std::string text;
                 for (std::uint32_t step = 0; step < 5; ++step) {
                   net.module().skips = step == 1 || (step == 3 && world.rank == 1);
                   optimizer.zero_grad();
                   const auto [tokens, labels] = batch(world, step);
                   const auto loss = cross_entropy(net(tokens), labels);
                   loss.backward();
                   optimizer.step();
                   text += cat(net.mean(static_cast<double>(loss.item()), labels.numel()), ' ');
                 }
                 const auto whole = net.gathered();
                 std::vector<float> bias(5);
                 copy_bytes(Cpu{}, bias.data(), net.module().fc2.bias.device(), value_of(net.module().fc2.bias).data(),
                            20);
                 for (const float number : bias) text += cat(number, ' ');
                 return text + "|";
               })
        .texts();
  };
  const auto cpu = trained(Cpu{}), gpu = trained(Cuda{});
  INFO(cpu[0] << '\n' << gpu[0] << '\n' << gpu[1]);
  CHECK(gpu[0] == gpu[1]);
  const auto got = numbers_in(gpu[0]), expected = numbers_in(cpu[0]);
  REQUIRE(expected.size() == 10);
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(expected[i]).margin(1e-5));
}

TEST_CASE("FSDP on devices: what can't be is refused by name", "[cuda]") {
  const auto text = test::Ranks(2, [](const comm::World& world) {
                      Run run({}, {.seed = 9, .timeout = 10s}, world);
                      FullyShardedDataParallel<Model<Cuda>, ByBytes<2000>> net{Model<Cuda>{}, run};
                      const auto own = batch({}, 1);
                      std::string said;
                      {
                        optim::Adam<Cuda> optimizer{net.parameters(), adam};
                        Graphed step(net, [&](const auto& in, const auto& out) {
                          auto loss = cross_entropy(net(in), out);
                          loss.backward();
                          return loss;
                        });
                        said += message_of<UsageError>([&] {
                                  for (int i = 0; i < 5; ++i) step(own.tokens, own.labels);
                                }) +
                                "\n";
                      }
                      said += message_of<UsageError>([&] { value_of(net.module().fc1.weight); }) + "\n";
                      said += message_of<UsageError>([&] { net.module().fc1.weight.grad(); }) + "\n";
                      auto host = comm::connect(comm::split(run.communicator(), run.world(), 0));
                      comm::StagedCommunicator staged(run.communicator());
                      said += message_of<UsageError>([&] {
                        FullyShardedDataParallel<Model<Cuda>> other{Model<Cuda>{}, staged, host};
                      });
                      return said;
                    }).texts()[0];
  CHECK_THAT(text, Catch::Matchers::Contains("FullyShardedDataParallel: its units move, so a step can't be captured"));
  CHECK_THAT(text, Catch::Matchers::Contains("is read outside the net's forward and backward pass"));
  CHECK_THAT(text, Catch::Matchers::Contains("FullyShardedDataParallel: expected gathers in the memory of cuda"));
  INFO(text);
  CHECK(std::count(text.begin(), text.end(), '\n') == 3);
  CHECK_THAT(text, !Catch::Matchers::Contains("nothing"));
}

}  // namespace fsdp_cuda_test
