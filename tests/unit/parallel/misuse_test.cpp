// Misuse of nets: errors with a message, and no crash.
#include <catch.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <memory>
#include <optional>

#include "ranks.hpp"

namespace misuse_test {

using namespace test::names;
using Catch::Matchers::Contains;
using Model = test::Smooth<Cpu>;

TEST_CASE("misuse: under dp a loss that outlives its net is named, by backward and by grad") {
  const auto orphan = [](const auto& x) {
    DataParallel<Model> net{make<Model>(), {.device_ids = {0, 1}}, 3};
    return sum(square(net(x)));
  };
  const auto gone = "backward: the policy of this output was destroyed; it must outlive the losses that use it";
  const auto loss = orphan(numbers(8, 5, 1));
  CHECK(message_of<UsageError>([&] { loss.backward(); }) == gone);
  const Variable<double, 2> x(numbers(8, 5, 1), true);
  const auto of_input = orphan(x);
  CHECK(message_of<UsageError>([&] { grad(of_input, x); }) == gone);
}

TEST_CASE("misuse: under dp what a recorded pass made has its gradients without the net") {
  const auto slope = [](const auto& x, bool kept) {
    auto net = std::make_unique<DataParallel<Model>>(make<Model>(), DataParallelOptions{.device_ids = {0, 1}}, 3);
    const auto loss = sum(square((*net)(x)));
    if (!kept) net.reset();
    loss.backward();
    return x.grad().to_vector();
  };
  const GraphVariable<double, 2> first(numbers(8, 5, 1), true), second(numbers(8, 5, 1), true);
  CHECK(slope(first, false) == slope(second, true));
}

TEST_CASE("misuse: a net may be held by a pointer to it, and go in the middle of its backward") {
  std::unique_ptr<DataParallel<Model>> dp(new DataParallel<Model>(make<Model>(), {.device_ids = {0, 1}}, 3));
  dp->module().fc1.weight.register_hook([&] { dp.reset(); });
  sum((*dp)(numbers(8, 5, 1))).backward();
  CHECK(!dp);

  const auto ends = [](auto type, bool all) {
    return Ranks(2, [=](const World& world) {
      auto communicator = comm::connect(world);
      auto net = std::make_unique<typename decltype(type)::type>(make<Model>(), communicator);
      const auto weight = net->module().fc2.weight;
      weight.register_hook([&] {
        if (all || world.rank == 0) net.reset();
      });
      const auto loss = mean((*net)(test::share(numbers(8, 5, 1), world)));
      const auto message = message_of<CommError>([&] { loss.backward(); });
      return message == "nothing" ? cat("ended ", !net) : message;
    });
  };
  const std::vector<std::string> fine{"ended true", "ended true"};
  CHECK(ends(std::type_identity<DistributedDataParallel<Model>>{}, true).texts() == fine);
  CHECK(ends(std::type_identity<LocalSgd<Model>>{}, true).texts() == fine);
  CHECK(ends(std::type_identity<ParameterServer<Model>>{}, true).texts() == fine);
  const auto one = ends(std::type_identity<DistributedDataParallel<Model>>{}, false).texts();
  CHECK(one[0] == fine[0]);
  CHECK_THAT(one[1], Contains("rank 0 gave up") && Contains("its net has ended in the middle of a backward pass"));
}

TEST_CASE("misuse: a policy says so where another one has taken its model's parameters away") {
  const std::string taken =
      " now belongs to another policy: give each policy its own model, such as nn::copy_of(model)";
  // Evaluation in another policy is an error, as training is.
  const auto message = [](auto& net, const auto& x) {
    mean(square(net(x))).backward();
    SingleDevice<Model> other{net.module(), 3};
    return message_of<UsageError>([&] { net(x); });
  };
  const auto of_ranks = [&](auto type) {
    return common_text(2, [&](const World& world) {
      auto communicator = comm::connect(world);
      typename decltype(type)::type net(make<Model>(), communicator);
      return message(net, test::share(numbers(8, 5, 1), world));
    });
  };
  CHECK(of_ranks(std::type_identity<DistributedDataParallel<Model>>{}) == "policy: the model's 'fc3.weight'" + taken);
  CHECK(of_ranks(std::type_identity<LocalSgd<Model>>{}) == "policy: the model's 'fc3.bias'" + taken);
  CHECK(of_ranks(std::type_identity<ParameterServer<Model>>{}) == "policy: the model's 'fc3.bias'" + taken);
  DataParallel<Model> dp{make<Model>(), {.device_ids = {0, 1}}, 3};
  CHECK(message(dp, numbers(8, 5, 1)) == "policy: the model's 'fc3.bias'" + taken);

  // On one device no memory moves, so that several policies are possible.
  SingleDevice<Model> first{make<Model>(), 3};
  SingleDevice<Model> second{first.module(), 3};
  DataParallel<Model> third{first.module(), {.device_ids = {0, 1}}, 3};
  CHECK(first(numbers(8, 5, 1)).value().to_vector() == second(numbers(8, 5, 1)).value().to_vector());
}

TEST_CASE("misuse: copy_of gives each policy a model of its own") {
  const auto x = numbers(8, 5, 1);
  const auto check_apart = [&](auto first, auto own) {
    const auto before = own->operator()(x).value().to_vector();
    CHECK(first->operator()(x).value().to_vector() == before);
    optim::Sgd optimizer{first->parameters(), {.lr = 1}};
    mean(square(first->operator()(x))).backward();
    optimizer.step();
    CHECK(first->operator()(x).value().to_vector() != before);
    CHECK(own->operator()(x).value().to_vector() == before);
  };
  const auto single = std::make_shared<SingleDevice<Model>>(make<Model>(), 3);
  check_apart(single, std::make_shared<SingleDevice<Model>>(nn::copy_of(single->module()), 3));
  const DataParallelOptions options{.device_ids = {0, 1}};
  const auto dp = std::make_shared<DataParallel<Model>>(make<Model>(), options, 3);
  check_apart(dp, std::make_shared<DataParallel<Model>>(nn::copy_of(dp->module()), options, 3));
  comm::AnyCommunicator nobody;
  const auto ddp = std::make_shared<DistributedDataParallel<Model>>(make<Model>(), nobody);
  check_apart(ddp, std::make_shared<DistributedDataParallel<Model>>(nn::copy_of(ddp->module()), nobody));
}

TEST_CASE("misuse: what is replaced behind one device's back is named, as under all policies") {
  const auto message = [](const auto& change) {
    SingleDevice<test::Normed<Cpu>> net{make<test::Normed<Cpu>>(), 3};
    net(numbers(8, 5, 1));
    change(net.module());
    return message_of<UsageError>([&] { net(numbers(8, 5, 1)); });
  };
  const std::string replaced =
      "' was added or replaced after the policy took the model: write values into the original";
  CHECK(message([](auto& model) { model = make<test::Normed<Cpu>>(); }) ==
        "policy: the model's 'fc1.weight" + replaced);
  CHECK(message([](auto& model) { model.fc2 = nn::Linear<Cpu, double>(12, 3); }) ==
        "policy: the model's 'fc2.weight" + replaced);
  CHECK(message([](auto& model) { model.norm.running_var = Buffer(Tensor<double, 1>::full({3}, 2)); }) ==
        "policy: the model's 'norm.running_var" + replaced);
  CHECK(message([](auto& model) { model.fc2.bias = {}; }) ==
        "policy: the model lost 1 parameters and buffers after the policy took it");
  CHECK(message([](auto& model) { model.fc2.bias.assign(Tensor<double, 1>::zeros({3})); }) == "nothing");
}

TEST_CASE("misuse: a backward pass of one rank alone, and one that fails on a rank that goes on, are explained") {
  const auto explained = Contains(
      "; ranks exchange batch sizes when backward begins, or earlier in a forward pass that draws random numbers: all "
      "ranks must run a pass that records gradients");
  // A pass without gradients sends nothing to other ranks.
  const auto unheard = common_text(2, [](const World& world) {
    Distributed<Model> rank(world);
    if (world.rank == 0) {
      const NoGrad none;
      rank.net(numbers(8, 5, 1));
    }
    sum(rank.net(test::share(numbers(8, 5, 1), world))).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  SingleDevice<Model> single{make<Model>(), 3};
  sum(single(numbers(8, 5, 1))).backward();
  CHECK(distance(test::numbers_in(unheard), test::gradients(single.module())) < rounding);

  const auto alone = Ranks(2, [](const World& world) {
                       Distributed<Model> rank(world);
                       const auto all = [&] { sum(rank.net(test::share(numbers(8, 5, 1), world))).backward(); };
                       return message_of<CommError>([&] {
                         if (world.rank == 0) all();
                         all();
                       });
                     }).texts();
  CHECK_THAT(alone[0], Contains("rank 0: all_gather #") && Contains("rank 1 has left the group") && explained);

  const auto caught = Ranks(2, [](const World& world) {
                        Distributed<Model> rank(world);
                        return message_of<CommError>([&] {
                          for (int i = 0; i < 2; ++i)
                            message_of<ShapeError>([&] {
                              const bool wrong = i == 0 && world.rank == 1;
                              sum(rank.net(numbers(4, wrong ? 4 : 5, 1))).backward();
                            });
                        });
                      }).texts();
  // Rank 1's second batch would be averaged with rank 0's first.
  for (const auto& text : caught)
    CHECK_THAT(text, Contains("rank 1 skipped a batch: 2 forward passes since the last comparison, and rank 0 1"));
}

TEST_CASE("misuse: inputs that say other numbers of samples are named without a word of another policy") {
  CHECK(message_of<ShapeError>([] {
          detail::samples_of(0, numbers(9, 9, 1), batch_axis<0>(numbers(4, 5, 1)), batch_axis<1>(numbers(5, 3, 1)));
        }) == "inputs with batch_axis have 4 and 3 samples");
}

TEST_CASE("misuse: an optimizer that outlives its net is named, and goes in peace") {
  const auto text = common_text(2, [](const World& world) {
    using Sgd = optim::Sgd<Cpu>;
    auto communicator = comm::connect(world);
    using Net = DistributedDataParallel<Model>;
    std::optional<Net> net(std::in_place, make<Model>(), communicator);
    const auto train = [&](auto& optimizer) {
      optimizer.zero_grad();
      sum((*net)(test::share(numbers(8, 5, 1), world))).backward();
      optimizer.step();
    };
    std::string texts;
    const auto note = [&](const auto& call) { texts += message_of<UsageError>(call) + "\n"; };
    {
      ShardedOptimizer<Sgd> optimizer{*net, {.lr = 0.1, .momentum = 0.9}};
      optim::GradScaler scaler{*net}, other{*net};
      train(optimizer);
      net.reset();
      note([&] { optimizer.step(); });
      note([&] { optimizer.clip_grad_norm(1); });
      note([&] { optimizer.zero_grad(); });
      note([&] { scaler.unscale(optimizer); });
      note([&] { other.unscale(); });
      note([&] { other.unscale(); });
      texts += optimizer.state().empty() ? "no state\n" : "";
    }
    net.emplace(make<Model>(), communicator);
    {
      FusedOptimizer<Sgd> optimizer{*net, {.lr = 0.1, .momentum = 0.9}};
      train(optimizer);
      net.reset();
      note([&] { optimizer.step(); });
      optimizer.zero_grad();
      texts += optimizer.state().empty() ? "no state\n" : "";
    }
    return texts;
  });
  const std::string sharded = "ShardedOptimizer: its net was destroyed\n";
  CHECK(text == sharded + sharded + sharded + sharded + "GradScaler: its net was destroyed\n" +
                    "GradScaler: the gradients are unscaled already: expected a step() or a scale() between two calls "
                    "of unscale()\n" +
                    "FusedOptimizer: its net was destroyed\n");
}

}  // namespace misuse_test
