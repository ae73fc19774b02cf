// A model that no rank ever holds as a whole, under tensor parallelism, a pipeline, and meshes.
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <fstream>

#include "mesh.hpp"

namespace deferred_model_test {

using namespace test::names;
using mesh::Pipe, mesh::Data, mesh::Shard, mesh::Tensor;
constexpr Index wide = 1024;
constexpr std::size_t whole = 4 * 2 * wide * wide * sizeof(float), limit = 2 * whole;

struct Block : nn::Module {
  nn::ColumnParallelLinear<Cpu> up{wide, wide};
  nn::RowParallelLinear<Cpu> down{wide, wide};
  CHORUS_MODULE(Block, up, down)
  auto forward(const auto& x) const { return x + down(relu(up(x))); }
};
struct Loss : nn::Module {
  nn::Linear<Cpu> fc{wide, 3};
  CHORUS_MODULE(Loss, fc)
  auto forward(const auto& x) const { return fc(x); }
};
struct Large : nn::Module {
  nn::ModuleList<Block> blocks;
  Loss head;
  CHORUS_MODULE(Large, blocks, head)
  CHORUS_PIPELINE(blocks, head)
  explicit Large(int count) {
    for (int i = 0; i < count; ++i) blocks.push_back(Block{});
  }
};

std::size_t peak() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (std::size_t kib = 0; word == "VmHWM:" && status >> kib) return kib * 1024;
  return 0;
}

/// The process's additional memory in three steps, in bytes, and the losses.
template <class Net, class Make>
std::string train(const Make& make_net) {
  const auto before = peak();
  Net net = make_net();
  optim::AdamW<Cpu> optimizer{net.parameters(), {.lr = 1e-5}};
  std::vector<double> losses;
  for (std::uint32_t i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    const auto loss =
        cross_entropy(net(chorus::Tensor<float, 2>::full({4, wide}, 0.1f)), chorus::Tensor<std::int64_t, 1>::full({4}, 1));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item());
  }
  return cat(peak() - before, " ") + test::text_of(losses);
}

template <class Net>
std::vector<double> train(int ranks, bool deferred) {
  const auto texts = Ranks(ranks, [=](const World& world) {
    manual_seed(5);
    auto communicator = comm::connect(world);
    if (deferred) set_memory_limit(Cpu{}, limit);
    return train<Net>([&]() -> Net {
      const auto with = [&](auto&& model) {
        if constexpr (requires { Net(Large(1), communicator, world); })
          return Net(model, communicator, world);
        else
          return Net(model, communicator);
      };
      return deferred ? with(chorus::deferred<Large>(4)) : with(Large(4));
    });
  }).texts();
  return test::numbers_in(texts[0]);
}

TEST_CASE("deferred: no rank holds the whole under other policies, and the numbers are the whole model's") {
  const auto check = []<class Net>(std::type_identity<Net>) {
    auto late = train<Net>(4, true), early = train<Net>(4, false);
    REQUIRE(late.size() == 4);
    REQUIRE(early.size() == 4);
    INFO("bytes: " << late[0] << " beside " << early[0] << ", of a model of " << whole);
    CHECK(late[0] + static_cast<double>(whole) / 2 < early[0]);
    late[0] = early[0] = 0;
    CHECK(distance(late, early) < 1e-6);
  };
  check(std::type_identity<TensorParallel<Large>>());
  check(std::type_identity<Pipeline<Large>>());
  check(std::type_identity<Mesh<Large, Pipe<2>, Tensor<2>>>());
  check(std::type_identity<Mesh<Large, Shard<2>, Tensor<2>>>());
}

TEST_CASE("a limit of memory: one device has no room for what ranks train together") {
  const auto text = common_text(1, [](const World&) {
    set_memory_limit(Cpu{}, limit);
    return message_of<Error>([] { train<SingleDevice<Large>>([] { return SingleDevice<Large>(Large(4)); }); });
  });
  CHECK_THAT(text, Contains("out of memory on cpu:0: asked for ") &&
                       Contains(cat("; set_memory_limit allows ", limit, " bytes")));
}

TEST_CASE("deferred: under other policies other seeds are refused, too") {
  const auto seeds = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    manual_seed(static_cast<std::uint64_t>(world.rank));
    return message_of<UsageError>([&] { TensorParallel<Large> net(chorus::deferred<Large>(1), communicator); }) + " | " +
           message_of<UsageError>([&] { Pipeline<Large> net(chorus::deferred<Large>(1), communicator, world); });
  });
  CHECK_THAT(seeds, Contains("TensorParallel: expected one model: rank 1 has initial seed 1 where rank 0 has") &&
                        Contains("Pipeline: expected one model"));
}

TEST_CASE("deferred: a policy whose ranks have the whole model makes it") {
  manual_seed(5);
  SingleDevice<Large> made{Large(1)};
  manual_seed(5);
  SingleDevice<Large> late{chorus::deferred<Large>(1)};
  const auto last = [](auto& net) { return value_of(net.module().head.fc.weight).to_vector(); };
  CHECK(last(made) == last(late));
}

}  // namespace deferred_model_test
