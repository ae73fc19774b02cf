// What one rank alone does, although all ranks' programs must do the same, raises an error on every rank, under each
// policy of several ranks.
#include <catch.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../mesh/mesh.hpp"

using namespace test;
using Catch::Matchers::Contains;
using ch::cat;
using ch::Cpu;
using ch::comm::AnyCommunicator;
using ch::comm::World;

namespace {

using Chain = MeshModel<8>;

/// A program of four batches and steps, in which rank 1 deviates.
struct Other {
  std::string does;
  std::string said;  // the error on all ranks; empty: none
  double lr = 0.1, momentum = 0.9;
  int skips_before = -1, skips_behind = -1;  // skips the forward or backward pass of that batch
  int leaves_step_out = -1, leaves_zero_grad_out = -1;
  bool all = false;  // all ranks do it
  std::function<void(Chain&, int step)> writes = {};
  std::function<void(ch::optim::Sgd<ch::Cpu>&, int step)> changes = {};
};

template <class Net>
std::string run(Net& net, int rank, const Other& other, bool may_differ = false) {
  const bool differs = rank == 1 || other.all;
  if (may_differ) net.let_ranks_differ();
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = differs ? other.momentum : 0.9}};
  const ch::data::TensorDataset data{numbers(24, 5, 1), labels(24, 3, 1)};
  ch::data::DataLoader loader{data, net.sampler(data), {.batch = 6, .workers = 0}};
  return message_of<ch::UsageError>([&] {
    int step = -1;
    for (auto& [x, y] : loader) {
      ++step;
      if (differs && step == 1 && other.changes) other.changes(optimizer, step);
      if (differs && step == other.skips_before) continue;
      if (!differs || step != other.leaves_zero_grad_out) optimizer.zero_grad();
      const auto loss = net(x, y);
      if (differs && step == other.skips_behind) continue;
      loss.backward();
      if (differs && step == 2) optimizer.set_lr(other.lr);
      if (!differs || step != other.leaves_step_out) optimizer.step();
      if (differs && step == 1 && other.writes) net.gathered([&](Chain& model) { other.writes(model, step); });
      if (!differs && step == 1 && other.writes) net.gathered([](Chain&) {});
    }
    net.mean(1, 1);
    net.eval();
  });
}

const std::vector<Other>& others() {
  static const std::vector<Other> all{
      {.does = "nothing", .said = ""},
      {.does = "another rate", .said = "rank 1 stepped with lr 0.05, and rank 0 with 0.1", .lr = 0.05},
      {.does = "other numbers", .said = "rank 1's optimizers differ from rank 0's", .momentum = 0.5},
      {.does = "left-out batch", .said = "rank 1 skipped a batch: it is at batch 2", .skips_before = 1},
      {.does = "left-out backward pass", .said = "rank 1 skipped a batch", .skips_behind = 1},
      {.does = "left-out step", .said = "rank 1 skipped a step: ", .leaves_step_out = 1},
      {.does = "left-out last step", .said = "rank 1 skipped a step: ", .leaves_step_out = 3},
      {.does = "a group",
       .said = "rank 1's optimizers differ",
       .changes = [](auto& optimizer, int) { optimizer.set_group(ch::optim::NameBegins{""}, {.lr_scale = 0.5}); }},
      {.does = "loaded state",
       .said = "number of earlier steps",
       .changes =
           [](auto& optimizer, int) {
             for (auto& tensor : optimizer.state())
               if (tensor.on_host) *static_cast<std::int64_t*>(tensor.data) = 7;
           }},
      {.does = "no zero_grad", .said = "rank 0 called zero_grad, and rank 1 did not", .leaves_zero_grad_out = 2},
      {.does = "all at another rate", .said = "", .lr = 0.05, .all = true},
  };
  return all;
}

template <class Make>
void check_each(int ranks, const Make& make_net, const std::vector<Other>& some) {
  const auto texts = Ranks(
                         ranks,
                         [&](const World& world) {
                           std::string text;
                           auto communicator = ch::comm::connect(world);
                           for (const Other& other : some) {
                             const auto net = make_net(communicator, world);
                             text += cat("[", other.does, "] ", run(*net, world.rank, other), "\n");
                           }
                           const auto net = make_net(communicator, world);
                           text += cat("[may differ] ", run(*net, world.rank, {.lr = 0.05}, true), "\n");
                           return text;
                         },
                         20s)
                         .texts();
  for (std::string text : texts) {
    INFO(text);
    for (const Other& other : some)
      CHECK_THAT(text.substr(std::min(text.size(), text.find(cat("[", other.does, "]")))),
                 Catch::Matchers::StartsWith(cat("[", other.does, "] ")) &&
                     Contains(other.said.empty() ? "nothing\n" : other.said));
    std::size_t errors = 0, expected = 0;
    for (const Other& other : some) expected += !other.said.empty();
    for (std::size_t at = 0; (at = text.find("all ranks must take the same decisions", at)) != std::string::npos; ++at)
      ++errors;
    CHECK(errors == expected);
    CHECK_THAT(text, Contains("[may differ] nothing"));
  }
}

// Only rank 1 writes.
Other assigns(std::string said, bool all = false) {
  return {.does = all ? "assigned on all" : "assigned",
          .said = std::move(said),
          .all = all,
          .writes = [](Chain& model, int) {
            model.head.fc.weight.assign(ch::Tensor<double, 2>::full(model.head.fc.weight.shape(), 0.25));
          }};
}
// These policies compare ranks when a forward pass begins. A missing backward pass alone is detected by the next step
// at the latest.
std::vector<Other> without_backward_alone() {
  auto all = others();
  std::erase_if(all, [](const Other& other) { return other.skips_behind >= 0; });
  return all;
}
// Stages have different parameters, which may have different numbers of steps.
std::vector<Other> of_stages() {
  auto all = without_backward_alone();
  std::erase_if(all, [](const Other& other) {
    return other.does == "loaded state" || other.leaves_zero_grad_out >= 0;
  });
  return all;
}
// With sharded gradients the policy itself stores and clears them, so a missing zero_grad is not tested.
std::vector<Other> of_shards(std::vector<Other> all) {
  std::erase_if(all, [](const Other& other) { return other.leaves_zero_grad_out >= 0; });
  return all;
}
std::vector<Other> with(std::vector<Other> more, std::vector<Other> all = others()) {
  for (auto& other : more) all.push_back(std::move(other));
  return all;
}

}  // namespace

TEST_CASE("same program: what a rank alone does is refused on all, under DistributedDataParallel") {
  const Other pointer{.does = "written through a pointer",
                      .said = "rank 1 wrote parameters outside of an optimizer, and rank 0 did not ('head.fc.weight')",
                      .writes = [](Chain& model, int) { model.head.fc.weight.value().data()[3] = 1; }};
  const Other look{.does = "looked at", .said = "", .writes = [](Chain& model, int) { model.head.fc.weight.value(); }};
  check_each(
      3,
      [](AnyCommunicator& ranks, const World&) {
        return std::make_unique<ch::DistributedDataParallel<Chain>>(make<Chain>(), ranks);
      },
      with({assigns("rank 1 wrote parameters outside of an optimizer, and rank 0 did not ('head.fc.weight')"),
            assigns("", true), pointer, look}));
}

TEST_CASE("same program: under FullyShardedDataParallel, between shards") {
  check_each(
      2,
      [](AnyCommunicator& ranks, const World& world) {
        const auto gathers = std::make_shared<AnyCommunicator>(ch::comm::connect(ch::comm::split(ranks, world, 0)));
        auto* const net = new ch::FullyShardedDataParallel<Chain>(make<Chain>(), ranks, *gathers);
        return std::shared_ptr<ch::FullyShardedDataParallel<Chain>>(net, [gathers](auto* made) { delete made; });
      },
      with({assigns("rank 1 wrote parameters outside of an optimizer, and rank 0 did not"), assigns("", true)},
           of_shards(others())));
}

TEST_CASE("same program: under TensorParallel, between parts of layers") {
  check_each(
      2,
      [](AnyCommunicator& ranks, const World&) {
        return std::make_unique<ch::TensorParallel<Chain>>(make<Chain>(), ranks);
      },
      without_backward_alone());
}

TEST_CASE("same program: under Pipeline, between stages") {
  check_each(
      2,
      [](AnyCommunicator& ranks, const World& world) {
        return std::make_unique<ch::Pipeline<Chain>>(make<Chain>(), ranks, world);
      },
      with({assigns("rank 1 wrote parameters outside of an optimizer, and rank 0 did not"), assigns("", true)},
           of_stages()));
}

TEST_CASE("same program: on a mesh, along each axis") {
  check_each(
      4,
      [](AnyCommunicator& ranks, const World& world) {
        return std::make_unique<ch::Mesh<Chain, ch::mesh::Pipe<2>, ch::mesh::Data<2>>>(make<Chain>(), ranks, world);
      },
      of_stages());
  check_each(
      4,
      [](AnyCommunicator& ranks, const World& world) {
        return std::make_unique<ch::Mesh<Chain, ch::mesh::Shard<2>, ch::mesh::Tensor<2>>>(make<Chain>(), ranks, world);
      },
      of_shards(without_backward_alone()));
}

TEST_CASE("same program: LocalSgd compares rates and steps where ranks take the mean") {
  std::vector<Other> some;
  for (const Other& other : of_shards(others()))  // one zero_grad in several steps is enough
    // A scaler may skip a step on one rank only, so that the numbers of steps differ.
    if (other.does != "left-out batch" && other.does != "left-out backward pass" && other.does != "loaded state")
      some.push_back(other);
  check_each(
      2,
      [](AnyCommunicator& ranks, const World&) {
        return std::make_unique<ch::LocalSgd<Chain>>(make<Chain>(), ranks, ch::LocalSgdOptions{.period = 2});
      },
      some);
}

TEST_CASE("same program: ranks accumulate as many micro-batches") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<Smooth<Cpu>> rank(world);
                       return message_of<ch::UsageError>([&] {
                         const auto pass = [&] { mean(square(rank.net(numbers(4, 5, 1)))).backward(); };
                         if (world.rank == 1) {
                           const auto quiet = rank.net.no_sync();
                           pass();
                         } else {
                           pass();
                         }
                       });
                     }).texts();
  for (const auto& text : texts) CHECK_THAT(text, Contains("rank 1 is in no_sync where rank 0 averages gradients"));
}

TEST_CASE("same program: buffers that one rank alone has assigned") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<test::Normed<Cpu>> rank(world);
                       auto& mean_of_norm = rank.net.module().norm.running_mean;
                       if (world.rank == 0) mean_of_norm.assign(ch::Tensor<double, 1>::ones({3}));
                       return message_of<ch::UsageError>([&] { mean(square(rank.net(numbers(4, 5, 1)))).backward(); });
                     }).texts();
  for (const auto& text : texts)
    CHECK_THAT(text, Contains("rank 0 wrote buffers outside of an optimizer, and rank 1 did not"));
}

TEST_CASE("same program: a worker of a ParameterServer has no step of its own to compare") {
  const auto texts = Ranks(2, [](const World& world) {
                       auto communicator = ch::comm::connect(world);
                       ch::ParameterServer<Smooth<Cpu>> net(make<Smooth<Cpu>>(), communicator);
                       ch::optim::Sgd optimizer{net.parameters(), {.lr = net.is_server() ? 0.1 : 0.7}};
                       return message_of<ch::UsageError>([&] {
                         for (std::uint32_t step = 0; step < 3; ++step) {
                           optimizer.zero_grad();
                           mean(square(net(numbers(4, 5, step)))).backward();
                           if (net.is_server()) optimizer.step();
                         }
                         net.eval();
                       });
                     }).texts();
  for (const auto& text : texts) CHECK(text == "nothing");
}
