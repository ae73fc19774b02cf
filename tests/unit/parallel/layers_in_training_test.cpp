// Layers whose training flag differs from the model's: Monte Carlo dropout, recomputed running statistics.
#include <catch.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <set>
#include <type_traits>

#include "ranks.hpp"

namespace layers_in_training_test {

using namespace test::names;
using Dropping = test::Dropping<Cpu>;

/// A model in evaluation with one dropout in training, in passes with gradients and without; returns the outputs for
/// all rows.
template <class Net, class Gathered>
std::vector<double> monte_carlo(Net& net, Index rows, const Gathered& gathered) {
  net.eval();
  net.module().second.train();
  std::vector<double> all;
  for (int pass = 0; pass < 6; ++pass) {
    const GradMode mode(pass % 3 == 0);
    for (const double x : gathered(net, numbers(rows, 5, 4))) all.push_back(x);
  }
  net.module().second.eval();
  for (const double x : gathered(net, numbers(rows, 5, 4))) all.push_back(x);  // no draws: the pass does not count
  all.push_back(net.forward_passes());
  return all;
}

const auto whole = [](auto& net, const auto& x) { return net(x).value().to_vector(); };

/// The ranks' outputs, stacked.
auto of_share(const World& world) {
  return [world](auto& net, const auto& x) {
    const Index rows = x.size(0);
    const auto own = net(contiguous(test::share(x, world))).value().to_vector();
    std::vector<double> all(static_cast<std::size_t>(rows) * 3);
    const auto ranks = static_cast<std::size_t>(world.size), rank = static_cast<std::size_t>(world.rank);
    const auto first = share_begin(rows, ranks, rank);
    std::copy(own.begin(), own.end(), all.begin() + 3 * first);
    net.sum(all);
    return all;
  };
}

std::vector<double> monte_carlo_alone(Index rows) {
  SingleDevice<Dropping> net{make<Dropping>(), 3};
  return monte_carlo(net, rows, whole);
}

TEST_CASE("a dropout in training in a model in evaluation: another mask in each pass, on one device and several") {
  for (const Index rows : {7, 2}) {
    const auto expected = monte_carlo_alone(rows);
    std::set<double> seen;
    for (std::size_t pass = 0; pass < 7; ++pass) seen.insert(expected[pass * 3 * static_cast<std::size_t>(rows)]);
    CHECK(seen.size() == 7);
    CHECK(expected.back() == 6);
    DataParallel<Dropping> several{make<Dropping>(), {.device_ids = {0, 1, 2}}, 3};
    CHECK(distance(monte_carlo(several, rows, whole), expected) < rounding);
  }
}

template <class Net>
void check_masks(int ranks, Index rows) {
  INFO(Net::name << " " << ranks << " ranks, " << rows << " rows");
  const auto text = common_text(ranks, [&](const World& world) {
    auto communicator = comm::connect(world);
    Net net{make<Dropping>(), communicator, {}, 3};
    return test::text_of(monte_carlo(net, rows, of_share(world)));
  });
  CHECK(distance(test::numbers_in(text), monte_carlo_alone(rows)) < rounding);
}

TEST_CASE("a dropout in training in a model in evaluation: the masks of one device on ranks") {
  for (const Index rows : {7, 2}) check_masks<DistributedDataParallel<Dropping>>(3, rows);
  check_masks<DistributedDataParallel<Dropping>>(2, 7);
  check_masks<ParameterServer<Dropping>>(2, 7);
  check_masks<LocalSgd<Dropping>>(2, 8);  // shares of one size
}

/// Three passes with all layers in training, after passes of rank 1 without random numbers: passes in training count,
/// passes in evaluation do not.
template <class Net>
std::vector<double> after_own_passes(Net& net, bool mine, const auto& gathered) {
  std::vector<double> all;
  for (int round = 0; round < 3; ++round) {
    if (mine) {
      const NoGrad scope;
      net.eval();
      net(numbers(2, 5, 8));
      net.train();
      net.module().first.eval();
      net.module().second.eval();
      net(numbers(2, 5, 9));
    }
    net.train();
    const GradMode mode(round != 1);
    for (const double x : gathered(net, numbers(5, 5, 4))) all.push_back(x);
  }
  all.push_back(net.forward_passes());
  return all;
}

TEST_CASE("ddp: a rank that has passes of its own draws what the others draw") {
  SingleDevice<Dropping> net{make<Dropping>(), 3};
  const auto expected = after_own_passes(net, true, whole);
  for (const int other : {0, 1}) {
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Dropping> rank(world);
      return test::text_of(after_own_passes(rank.net, world.rank == other, of_share(world)));
    });
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

TEST_CASE("local SGD: ranks that had passes of their own settle on a number with the next mean") {
  const auto texts = Ranks(2, [](const World& world) {
                       auto communicator = comm::connect(world);
                       LocalSgd<Dropping> net{make<Dropping>(), communicator, {.period = 1}, 3};
                       optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
                       std::string text;
                       for (int step = 0; step < 2; ++step) {
                         {
                           const NoGrad scope;
                           if (world.rank == 1) net(numbers(2, 5, 8));
                         }
                         text += cat(net.forward_passes(), " ");
                         mean(square(net(numbers(2, 5, 9)))).backward();
                         optimizer.step();
                         text += cat(net.forward_passes(), " ");
                       }
                       net.eval();
                       return text + cat(net.forward_passes());
                     }).texts();
  CHECK(texts[0] == "0 1 1 4 4");
  CHECK(texts[1] == "1 2 3 4 4");
}

/// Drops some of its weights, the same ones for all samples.
template <class D>
struct Connections : nn::Module {
  nn::Linear<D, double> fc1{5, 6}, fc2{6, 5};
  CHORUS_MODULE(Connections, fc1, fc2)
  auto forward(const auto& x) const {
    const auto h = tanh(linear(x, dropout(fc1.weight, 0.5), fc1.bias));
    return linear(h, dropout(fc2.weight * 1.0, 0.5), fc2.bias);
  }
};

TEST_CASE("dropout of weights: the same ones on one device and on several") {
  using Model = Connections<Cpu>;
  SingleDevice<Model> net{make<Model>(), 3};
  const auto expected = net(numbers(6, 5, 1)).value().to_vector();
  DataParallel<Model> several{make<Model>(), {.device_ids = {0, 1}}, 3};
  CHECK(distance(several(numbers(6, 5, 1)).value().to_vector(), expected) < rounding);
}

/// x: [time, batch, 5]; applies dropout to it and to [batch, 3].
template <class D>
struct AlongTime : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(AlongTime, fc)
  auto forward(const auto& x) const {
    const auto steps = fc(dropout(x, 0.5, training()));  // [time, batch, 3]
    const Index batch = value_of(x).size(1);
    const auto last = reshape(slice(steps, 0, 2, 3), std::array<Index, 2>{batch, 3});
    return reshape(dropout(last, 0.3, training()), std::array<Index, 3>{1, batch, 3}) + steps;
  }
};

TEST_CASE("dropout of samples along another axis: on several devices as on one") {
  using Model = AlongTime<Cpu>;
  const auto x = reshape(numbers(4, 35, 1), std::array<Index, 3>{4, 7, 5});
  const auto gradients = [](auto& net, const auto& input) {
    (sum(square(net(input))) * (1.0 / static_cast<double>(input.size(1)))).backward();
    return test::gradients(net.module());
  };
  SingleDevice<Model> net{make<Model>(), 3, {.dim = 1}};
  const auto expected = gradients(net, x);
  DataParallel<Model> several{make<Model>(), {.device_ids = {0, 1, 2}, .dim = 1}, 3};
  CHECK(distance(gradients(several, x), expected) < rounding);
  const auto text = common_text(3, [&](const World& world) {
    Distributed<Model> rank(world, {.dim = 1});
    const auto ranks = static_cast<std::size_t>(world.size), at = static_cast<std::size_t>(world.rank);
    const auto share = x.slice(1, share_begin(7, ranks, at), share_begin(7, ranks, at + 1));
    return test::text_of(gradients(rank.net, contiguous(share)));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("ddp: in evaluation a rank passes alone") {
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Dropping> rank(world);
    rank.net.eval();
    const NoGrad scope;
    for (int pass = 0; pass < 3 * world.rank; ++pass) rank.net(numbers(2, 5, 8));
    return cat(rank.net.forward_passes());
  });
  CHECK(text == "0");
}

TEST_CASE("ddp: a rank alone in a pass in evaluation that draws is told so") {
  const auto texts = Ranks(
                         2,
                         [](const World& world) {
                           Distributed<Dropping> rank(world);
                           rank.net.eval();
                           rank.net.module().first.train();
                           const NoGrad scope;
                           if (world.rank == 1) return std::string("-");
                           return message_of<CommError>([&] { rank.net(numbers(2, 5, 8)); });
                         },
                         1s)
                         .texts();
  CHECK_THAT(texts[0], Contains("without gradients that draws random numbers: all ranks must run it"));
}

/// Two steps and an evaluation with batch norm in training in a model in evaluation; returns parameters and buffers.
template <class Net>
std::vector<double> with_norm_in_training(Net& net, const auto& cut) {
  net.eval();
  net.module().norm.train();
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  for (std::uint32_t step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    mean(square(net(cut(numbers(6, 5, step))))).backward();
    optimizer.step();
    const NoGrad scope;
    net(cut(numbers(6, 5, 30 + step)));
  }
  if constexpr (requires { net.pull(); }) net.pull();
  auto out = test::values(net.module());
  for (const auto& named : nn::named_buffers<Cpu>(net.module()))
    if (named.buffer->dtype() == DType::f64)
      for (Index i = 0; i < named.buffer->count(); ++i) out.push_back(static_cast<double*>(named.buffer->data())[i]);
  return out;
}

TEST_CASE("a synchronised batch norm in training in a model in evaluation sees the whole batch") {
  using Model = test::Synced<Cpu>;
  const auto all = [](const auto& x) { return x; };
  SingleDevice<Model> net{make<Model>(), 3};
  const auto expected = with_norm_in_training(net, all);
  DataParallel<Model> several{make<Model>(), {.device_ids = {0, 1}}, 3};
  CHECK(distance(with_norm_in_training(several, all), expected) < rounding);
  const auto on_ranks = [&]<class Net>(std::type_identity<Net>) {
    const auto text = common_text(2, [&](const World& world) {
      auto communicator = comm::connect(world);
      Net ranks{make<Model>(), communicator, {}, 3};
      return test::text_of(
          with_norm_in_training(ranks, [&](const auto& x) { return contiguous(test::share(x, world)); }));
    });
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  };
  on_ranks(std::type_identity<DistributedDataParallel<Model>>());
  on_ranks(std::type_identity<ParameterServer<Model>>());
}

TEST_CASE("ddp: statistics of a batch norm in training in a model in evaluation are rank 0's") {
  using Model = test::Normed<Cpu>;
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world);
    rank.net.eval();
    rank.net.module().norm.train();
    const auto x = numbers(3, 5, static_cast<std::uint32_t>(world.rank));
    for (int pass = 0; pass < 2; ++pass) mean(square(rank.net(x))).backward();
    rank.net.module().norm.eval();
    mean(square(rank.net(x))).backward();  // buffers are not broadcast
    rank.net.train();
    rank.net.module().norm.eval();
    mean(square(rank.net(x))).backward();  // rank 0's buffers are
    return test::text_of(rank.net.module().norm.running_mean.value().to_vector());
  });
  CHECK_FALSE(text.empty());
  SingleDevice<Model> net{make<Model>(), 3};
  for (int pass = 0; pass < 2; ++pass) net(numbers(3, 5, 0));
  CHECK(distance(test::numbers_in(text), net.module().norm.running_mean.value().to_vector()) < rounding);
}

TEST_CASE("ParameterServer: workers that are behind don't evaluate") {
  const auto text = common_text(2, [&](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Dropping> net{make<Dropping>(), communicator, {}, 3};
    net.eval();
    mean(square(net(numbers(3, 5, 0)))).backward();
    const NoGrad scope;
    const auto message = message_of<UsageError>([&] { net(numbers(3, 5, 0)); });
    net.eval();
    net(numbers(3, 5, 0));
    return message;
  });
  CHECK_THAT(text, Contains("call eval() on all ranks before a forward pass in evaluation"));
}

/// Calls dropout as a function, not as a layer.
template <class D>
struct Functional : nn::Module {
  nn::Linear<D> fc{4, 4};
  CHORUS_MODULE(Functional, fc)
  auto forward(const auto& x) const { return dropout(fc(x), 0.5, training()); }
};

TEST_CASE("MixedPrecision: the model inside goes into evaluation, too") {
  SingleDevice<nn::MixedPrecision<Functional<Cpu>>> net{nn::MixedPrecision<Functional<Cpu>>{}, 3};
  const auto x = Tensor<float, 2>::ones({2, 4});
  CHECK(net.module().model().training());
  net.eval();
  CHECK_FALSE(net.module().model().training());
  CHECK(net(x).value().to_vector() == net(x).value().to_vector());
  net.module().model().train();
  CHECK(net(x).value().to_vector() != net(x).value().to_vector());
  DataParallel<nn::MixedPrecision<Functional<Cpu>>> several{
      nn::MixedPrecision<Functional<Cpu>>{}, {.device_ids = {0, 1}}, 3};
  several.eval();
  CHECK(several(x).value().to_vector() == several(x).value().to_vector());
}

}  // namespace layers_in_training_test
