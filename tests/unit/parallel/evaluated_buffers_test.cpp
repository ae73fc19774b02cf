// After eval() all ranks evaluate the model that rank 0 saves, buffers included, under each policy of several ranks.
#include <algorithm>
#include <catch.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "../tensor_parallel/ranks.hpp"

using namespace test;
using Catch::Matchers::Contains;
using ch::cat;
using ch::Cpu;
using ch::comm::AnyCommunicator;
using ch::comm::World;

namespace {

/// The running maximum of each column: a custom layer with a buffer.
struct Largest : ch::nn::Module {
  ch::nn::Linear<Cpu, double> fc{6, 6};
  ch::Buffer<double, 1> largest{ch::Tensor<double, 1>::full({6}, 0.1)};
  CHORUS_MODULE(Largest, fc, largest)
  auto forward(const auto& x) const {
    const auto& seen = value_of(largest);
    if (training()) {
      const auto& numbers = value_of(x);
      for (Index i = 0; i < numbers.numel(); ++i) seen.data()[i % 6] = std::max(seen.data()[i % 6], numbers.data()[i]);
      largest.template on<Cpu>().touch();
    }
    return fc(x) * ch::Variable<double, 1, Cpu>(seen);
  }
};
struct Head : ch::nn::Module {
  ch::nn::Linear<Cpu, double> fc{6, 3};
  CHORUS_MODULE(Head, fc)
  auto forward(const auto& x) const { return fc(x); }
};
struct Model : ch::nn::Module {
  ch::nn::Linear<Cpu, double> embed{5, 6};
  ch::nn::BatchNorm1d<Cpu, double> norm{6};
  Largest own;
  Head head;
  CHORUS_MODULE(Model, embed, norm, own, head)
  CHORUS_PIPELINE(embed, norm, own, head)
  auto forward(const auto& x) const { return head(own(norm(embed(x)))); }
};

enum class Before { steps, no_backward, no_sync, own_layer_in_eval, train_false, no_grad };

// The loss that all ranks evaluate, and the loss of rank 0's model.
template <class Net>
std::string evaluated(Net& net, AnyCommunicator& communicator, Before before) {
  const ch::data::TensorDataset data{numbers(12, 5, 0)};
  const auto own = net.sampler(data).options();
  World place;
  place.rank = own.rank;
  place.size = own.world_size;
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  const auto pass = [&](std::uint32_t step) {
    return ch::cross_entropy(net(share(numbers(12, 5, step), place)), share(labels(12, 3, step), place));
  };
  for (std::uint32_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    pass(step).backward();
    optimizer.step();
  }
  if (before == Before::no_backward) pass(3);
  if (before == Before::no_sync) {
    const auto quiet = net.no_sync();
    pass(3).backward();
  }
  if (before == Before::own_layer_in_eval) net.module().own.eval();
  if (before == Before::no_grad) {
    net.eval();
    net.train();
    const ch::NoGrad none;
    pass(4);
  }
  if (before == Before::train_false)
    net.train(false);
  else
    net.eval();
  const ch::NoGrad none;
  const double all = net.mean(pass(5).item(), share(labels(12, 3, 5), place).numel());
  double one = 0;
  net.gathered([&](Model& model) {
    auto kept = ch::nn::copy_of(model);
    kept.eval();
    one = ch::cross_entropy(kept.forward(numbers(12, 5, 5)), labels(12, 3, 5)).item();
  });
  communicator.broadcast(std::span(&one, 1), 0, {});
  const int before_second = calls(communicator);
  net.eval();
  net.eval();
  return cat(std::abs(all - one) < 1e-12 ? "" : cat("evaluated ", all, ", saved ", one, " "),
             calls(communicator) - before_second, " calls; ");
}

template <class Make>
void check_each(int ranks, const Make& make_net, int calls_of_eval = 0) {
  const auto texts = Ranks(
                         ranks,
                         [&](const World& world) {
                           auto communicator = ch::comm::connect(world);
                           std::string text;
                           for (const auto before : {Before::steps, Before::no_backward, Before::no_sync,
                                                     Before::own_layer_in_eval, Before::train_false, Before::no_grad}) {
                             const auto net = make_net(communicator, world);
                             text += evaluated(*net, communicator, before);
                           }
                           return text;
                         },
                         20s)
                         .texts();
  std::string expected;
  for (int i = 0; i < 6; ++i) expected += cat(calls_of_eval, " calls; ");
  for (const auto& text : texts) CHECK(text == expected);
}

}  // namespace

TEST_CASE("evaluated buffers: under each policy they are those of the saved model") {
  for (const int ranks : {2, 3}) {
    CAPTURE(ranks);
    check_each(ranks, [](AnyCommunicator& all, const World&) {
      return std::make_unique<ch::DistributedDataParallel<Model>>(make<Model>(), all);
    });
    check_each(ranks, [](AnyCommunicator& all, const World& world) {
      const auto gathers = std::make_shared<AnyCommunicator>(ch::comm::connect(ch::comm::split(all, world, 0)));
      auto* const net = new ch::FullyShardedDataParallel<Model>(make<Model>(), all, *gathers);
      return std::shared_ptr<ch::FullyShardedDataParallel<Model>>(net, [gathers](auto* made) { delete made; });
    });
    check_each(ranks, [](AnyCommunicator& all, const World&) {
      return std::make_unique<ch::ParameterServer<Model>>(make<Model>(), all);
    });
    check_each(ranks, [](AnyCommunicator& all, const World& world) {
      return std::make_unique<ch::Mesh<Model, ch::mesh::Data<ch::mesh::rest>>>(make<Model>(), all, world);
    });
  }
  check_each(4, [](AnyCommunicator& all, const World& world) {
    return std::make_unique<ch::Mesh<Model, ch::mesh::Pipe<2>, ch::mesh::Data<2>>>(make<Model>(), all, world,
                                                                                   ch::MeshOptions{.micro_batches = 1});
  });
}

TEST_CASE("evaluated buffers: no message without a change, and none where the program keeps its own") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<Model> rank(world, {.broadcast_buffers = false});
                       auto& net = rank.net;
                       const auto sent = [&](const auto& call) {
                         const int before = calls(rank.communicator);
                         call();
                         return cat(calls(rank.communicator) - before, " ");
                       };
                       auto text = sent([&] { net.eval(); });
                       net.train();
                       ch::sum(net(numbers(4, 5, static_cast<std::uint32_t>(world.rank)))).backward();
                       net.eval();
                       return text + test::text_of(net.module().norm.running_mean.value().to_vector());
                     }).texts();
  CHECK_THAT(texts[0], Catch::Matchers::StartsWith("0 "));
  CHECK(texts[0] != texts[1]);
}

TEST_CASE("evaluated buffers: a rank that evaluates with its own, behind the policy's back, is refused") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<Model> rank(world);
                       ch::sum(rank.net(numbers(4, 5, static_cast<std::uint32_t>(world.rank)))).backward();
                       rank.net.module().eval();
                       const ch::NoGrad none;
                       return message_of<ch::UsageError>([&] { rank.net(numbers(4, 5, 1)); });
                     }).texts();
  CHECK(texts[0] == "nothing");
  CHECK_THAT(texts[1], Contains("rank 1 evaluates with its own buffers") && Contains("call net.eval()"));
}
