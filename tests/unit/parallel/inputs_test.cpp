// Inputs under the policies that split a batch: containers of all kinds, samples along another axis, tensors without
// samples; and models of several forms.
#include <catch.hpp>
#include <chorus/launch/launch.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <unordered_map>

#include "ranks.hpp"

namespace inputs_test {

using namespace test::names;

/// Runs backward on the mean of `net(inputs...)` over the samples; returns the gradients.
template <class Net, class Inputs>
std::vector<double> gradients(Net& net, const Inputs& inputs) {
  mean(square(std::apply([&](const auto&... all) { return net(all...); }, inputs))).backward();
  return test::gradients(net.module());
}

/// Compares gradients of ranks with 4 and 1 of 5 samples with those of one device; `cut(begin, end)`: inputs.
template <class Model, class Cut>
double off_under_ddp(const Cut& cut, int dim = 0) {
  SingleDevice<Model> alone{make<Model>(), 3};
  const auto expected = gradients(alone, cut(0, 5));
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world, {.dim = dim});
    return test::text_of(gradients(rank.net, world.rank == 0 ? cut(0, 4) : cut(4, 5)));
  });
  return distance(test::numbers_in(text), expected);
}
template <class Model, class Inputs>
double off_under_dp(const Inputs& inputs) {
  SingleDevice<Model> alone{make<Model>(), 3};
  DataParallel<Model> copies{make<Model>(), {.device_ids = {0, 1}}, 3};
  const auto expected = gradients(alone, inputs);
  return distance(gradients(copies, inputs), expected);
}

auto part(Index begin, Index end, std::uint32_t key = 1) { return contiguous(numbers(5, 5, key).slice(0, begin, end)); }

template <class D>
struct Pair : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{5, 4};
  CHORUS_MODULE(Pair, fc1, fc2)
  template <class X>
  auto forward(const std::array<X, 2>& both) const {
    return tanh(fc1(both[0])) * fc2(both[1]);
  }
  template <class X>
  auto forward(const std::unordered_map<std::string, X>& both) const {
    return tanh(fc1(both.at("left"))) * fc2(both.at("right"));
  }
};

TEST_CASE("inputs: an array or an unordered map of tensors is shared out like a vector of them") {
  const auto array = [](Index begin, Index end) {
    return std::tuple(std::array{part(begin, end), part(begin, end, 2)});
  };
  const auto map = [](Index begin, Index end) {
    return std::tuple(
        std::unordered_map<std::string, Tensor<double, 2>>{{"left", part(begin, end)}, {"right", part(begin, end, 2)}});
  };
  CHECK(off_under_ddp<Pair<Cpu>>(array) < rounding);
  CHECK(off_under_ddp<Pair<Cpu>>(map) < rounding);
  CHECK(off_under_dp<Pair<Cpu>>(array(0, 5)) < rounding);
  CHECK(off_under_dp<Pair<Cpu>>(map(0, 5)) < rounding);
}

/// Returns tensors in an array and in an unordered map.
template <class D>
struct Returning : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{5, 3};
  CHORUS_MODULE(Returning, fc1, fc2)
  auto forward(const auto& x) const {
    const std::array both{tanh(fc1(x)), fc1(x)};
    std::unordered_map<int, decltype(fc2(x))> named;
    named.emplace(7, fc2(x));
    return std::pair(both, named);
  }
};

TEST_CASE("dp: an array and an unordered map of outputs are gathered like a vector and a map of them") {
  using Model = Returning<Cpu>;
  const auto pass = [](auto& net) {
    const auto [both, named] = net(part(0, 5));
    static_assert(std::tuple_size_v<std::remove_cvref_t<decltype(both)>> == 2);
    (mean(square(both[0])) + mean(both[1]) + mean(square(named.at(7)))).backward();
    return test::gradients(net.module());
  };
  SingleDevice<Model> alone{make<Model>(), 3};
  DataParallel<Model> copies{make<Model>(), {.device_ids = {0, 1, 2}}, 3};
  CHECK(distance(pass(copies), pass(alone)) < rounding);
}

/// Over [time, batch, features].
template <class D>
struct Recurrent : nn::Module {
  nn::LSTM<D, double> lstm{5, 4};
  CHORUS_MODULE(Recurrent, lstm)
  auto forward(const auto& x) const { return lstm(x).output; }
};

/// The same program for every policy, with an evaluation after each step; returns its parameters.
template <class Net>
std::string train_along_time() {
  std::string text;
  char program[] = "test";
  char* argv[] = {program, nullptr};
  const int status = launch<Net>(1, argv, {.devices = 2, .timeout = {}}, [&](auto& run) {
    Net net{make<Recurrent<Cpu>>(), run, {.dim = 1}};
    optim::Sgd optimizer{net.parameters(), {.lr = 1}};
    for (const std::uint32_t number : {1u, 2u, 3u}) {
      const auto ranks = static_cast<std::size_t>(run.world_size()), rank = static_cast<std::size_t>(run.rank());
      const auto whole = reshape(numbers(3, 25, number), std::array<Index, 3>{3, 5, 5});
      const auto share = whole.slice(1, share_begin(5, ranks, rank), share_begin(5, ranks, rank + 1));
      net.train();
      optimizer.zero_grad();
      mean(square(net(contiguous(share)))).backward();
      optimizer.step();
      net.eval();
    }
    text = test::text_of(test::values(net.module()));
  });
  return status == 0 ? text : cat("status ", status);
}
template <class Net>
std::vector<double> train_along_time(int ranks) {
  return test::numbers_in(common_text(ranks, [](const World& world) {
    test::become(world);
    return train_along_time<Net>();
  }));
}

TEST_CASE("policies: one program, whose samples lie along another axis, has the same parameters under each") {
  using Model = Recurrent<Cpu>;
  const auto expected = test::numbers_in(train_along_time<SingleDevice<Model>>());
  CHECK(!expected.empty());
  CHECK(distance(test::numbers_in(train_along_time<DataParallel<Model>>()), expected) < rounding);
  CHECK(distance(train_along_time<DistributedDataParallel<Model>>(2), expected) < rounding);
  CHECK(distance(train_along_time<LocalSgd<Model>>(2), expected) < rounding);
  CHECK(distance(train_along_time<ParameterServer<Model>>(2), expected) < rounding);
}

TEST_CASE("policies: a run's net takes options; what they leave open is the run's") {
  using Model = test::Smooth<Cpu>;
  char program[] = "test";
  char* argv[] = {program, nullptr};
  const int status = launch<DataParallel<Model>>(1, argv, {.devices = 3, .timeout = 7s}, [](auto& run) {
    const DataParallel<Model> open{make<Model>(), run, {.dim = 1}};
    CHECK(open.options().device_ids == std::vector{0, 1, 2});
    CHECK(open.options().output_device == 0);
    CHECK(open.options().timeout == 7s);
    const DataParallel<Model> told{make<Model>(), run, {.device_ids = {1, 0}, .timeout = 9s}};
    CHECK(told.options().device_ids == std::vector{1, 0});
    CHECK(told.options().output_device == 1);
    CHECK(told.options().timeout == 9s);
    CHECK(message_of<UsageError>([&] { DataParallel<Model> net(make<Model>(), run, {.dim = -1}); }) ==
          "DataParallel: expected dim of at least 0, got -1");
    CHECK(message_of<UsageError>([&] { SingleDevice<Model> net(make<Model>(), run, {.dim = -1}); }) ==
          "SingleDevice: expected dim of at least 0, got -1");
  });
  CHECK(status == 0);
  const DataParallel<Model> alone{make<Model>(), {.device_ids = {0}}, 3};
  CHECK(alone.options().timeout == 60s);
}

TEST_CASE("parameter server: ranks compare their dim") {
  const auto refused = [](int own, int others) {
    return common_text(2, [=](const World& world) {
      auto communicator = comm::connect(world);
      return message_of<UsageError>([&] {
        ParameterServer<Recurrent<Cpu>> net(make<Recurrent<Cpu>>(), communicator,
                                            {.dim = world.rank == 0 ? own : others});
      });
    });
  };
  CHECK(refused(1, 1) == "nothing");
  CHECK(refused(-1, -1) == "ParameterServer: expected dim of at least 0, got -1");
  CHECK(refused(1, 0) ==
        "ParameterServer: expected one model: rank 1 has options: dim 0 where rank 0 has options: dim 1");
}

TEST_CASE("ddp, local SGD: samples may lie along another axis") {
  const auto steps = [](Index begin, Index end) {
    const auto whole = reshape(numbers(3, 25, 1), std::array<Index, 3>{3, 5, 5});
    return std::tuple(contiguous(whole.slice(1, begin, end)));
  };
  CHECK(off_under_ddp<Recurrent<Cpu>>(steps, 1) < rounding);
  const auto text = common_text(2, [&](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Recurrent<Cpu>> net{make<Recurrent<Cpu>>(), communicator, {.period = 1, .dim = 1}};
    optim::Sgd optimizer{net.parameters(), {.lr = 1}};
    gradients(net, world.rank == 0 ? steps(0, 4) : steps(4, 5));
    optimizer.step();
    net.eval();
    return test::text_of(test::values(net.module()));
  });
  SingleDevice<Recurrent<Cpu>> alone{make<Recurrent<Cpu>>()};
  optim::Sgd optimizer{alone.parameters(), {.lr = 1}};
  gradients(alone, steps(0, 5));
  optimizer.step();
  CHECK(distance(test::numbers_in(text), test::values(alone.module())) < rounding);
  const auto refused = Ranks(2, [](const World& world) {
                         return message_of<UsageError>([&] { Distributed<Recurrent<Cpu>> rank(world, {.dim = -1}); });
                       }).texts();
  CHECK(refused[1] == "DistributedDataParallel: expected dim of at least 0, got -1");
}

/// Looks samples up in a table that all samples of the batch share.
template <class D>
struct Lookup : nn::Module {
  nn::Linear<D, double> fc{5, 6};
  CHORUS_MODULE(Lookup, fc)
  auto forward(const auto& x, const auto& table) const { return matmul(tanh(fc(x)), table); }
};

TEST_CASE("ddp: inputs behind the first one may have other sizes: a table, say") {
  const auto cut = [](Index begin, Index end) { return std::tuple(part(begin, end), numbers(6, 7, 2)); };
  CHECK(off_under_ddp<Lookup<Cpu>>(cut) < rounding);
}

template <class D>
struct Apart : nn::Module {
  nn::Linear<D, double> fc1, fc2;
  Apart() : fc1(5, 4), fc2(4, 3) {}
  CHORUS_MODULE(Apart, fc1, fc2)
  auto forward(const auto& x) const { return fc2(fc1(x)); }
};

TEST_CASE("policies: a model on two devices is refused, with a parameter of each named") {
  auto model = make<Apart<Cpu>>();
  model.fc1 = detail::copy_to(model.fc1, Cpu{1});
  CHECK_THAT(
      message_of<UsageError>([&] { SingleDevice<Apart<Cpu>> net{model}; }),
      Contains(
          "policy: expected a model on one device: its parameter 'fc2.weight' is on cpu:0, 'fc1.weight' on cpu:1"));
}

TEST_CASE("dp: gradients that a model has when it is wrapped are added to") {
  using Model = test::Smooth<Cpu>;
  const auto twice = [](auto wrap) {
    auto model = make<Model>();
    mean(square(model.forward(part(0, 5)))).backward();
    return wrap(std::move(model));
  };
  const auto expected = twice([](Model model) {
    SingleDevice<Model> net{std::move(model), 3};
    return gradients(net, std::tuple(part(0, 4, 2)));
  });
  const auto got = twice([](Model model) {
    DataParallel<Model> net{std::move(model), {.device_ids = {0, 1}}, 3};
    return gradients(net, std::tuple(part(0, 4, 2)));
  });
  CHECK(distance(got, expected) < rounding);
}

}  // namespace inputs_test
