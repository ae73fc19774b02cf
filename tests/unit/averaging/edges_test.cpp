// Uses of the policies that average in other ways, beyond the plain loop: LocalSgd, ParameterServer, PostLocalSgd.
#include <catch.hpp>
#include <chorus/autograd/custom_function.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include <unit/parallel/ranks.hpp>

namespace averaging_edges_test {

using namespace test::names;
using Model = test::Smooth<Cpu>;

template <class Net>
auto loss_of(Net& net, Index rows, std::uint32_t key) {
  return cross_entropy(net(numbers(rows, 5, key)), labels(rows, 3, key));
}
/// The loss of this rank's rows [begin, end) of a batch.
template <class Net>
auto loss_of(Net& net, Index begin, Index end, std::uint32_t key) {
  return cross_entropy(net(contiguous(numbers(end, 5, key).slice(0, begin, end))),
                       contiguous(labels(end, 3, key).slice(0, begin, end)));
}
template <class Net>
auto share_of_loss(Net& net, Index rows, std::uint32_t key, const World& world) {
  return cross_entropy(net(test::share(numbers(rows, 5, key), world)), test::share(labels(rows, 3, key), world));
}
std::vector<std::string> texts_of(int ranks, const Ranks::Function& function) { return Ranks(ranks, function).texts(); }

TEST_CASE("local sgd: parameters that are frozen keep their bits") {
  const auto before = test::text_of(make<Model>().fc1.weight.value().to_vector());
  for (const bool at_once : {true, false}) {
    const auto text = common_text(3, [=](const World& world) {
      auto communicator = comm::connect(world);
      LocalSgd<Model> net{make<Model>(), communicator, {.period = 2}, 3};
      optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
      std::string frozen;
      for (std::uint32_t number = 0; number < 8; ++number) {
        if (number == (at_once ? 0 : 3)) net.module().fc1.weight.set_requires_grad(false);
        optimizer.zero_grad();
        share_of_loss(net, 7, number, world).backward();
        optimizer.step();
        if (number == 4) frozen = test::text_of(net.module().fc1.weight.value().to_vector());
      }
      net.eval();
      return cat(frozen == test::text_of(net.module().fc1.weight.value().to_vector()), "|",
                 test::text_of(net.module().fc1.weight.value().to_vector()));
    });
    CHECK(text.substr(0, 5) == "true|");
    if (at_once) CHECK(text.substr(5) == before);
  }
}

TEST_CASE("local sgd: a mean weighs ranks by what they were trained on, not by what they looked at in between") {
  const auto run = [](bool peeks) {
    return common_text(2, [=](const World& world) {
      auto communicator = comm::connect(world);
      LocalSgd<Model> net{make<Model>(), communicator, {.period = 2}, 3};
      optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
      for (std::uint32_t number = 0; number < 4; ++number) {
        optimizer.zero_grad();
        const auto loss = share_of_loss(net, 7, number, world);
        if (peeks) {
          const NoGrad scope;
          loss_of(net, world.rank == 0 ? 50 : 1, 9);
        }
        loss.backward();
        optimizer.step();
      }
      net.eval();
      return test::text_of(test::values(net.module()));
    });
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("local sgd: buffers are means, too") {
  using Normed = test::Normed<Cpu>;
  const auto texts = texts_of(2, [](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Normed> net{make<Normed>(), communicator, {.period = 1}, 3};
    loss_of(net, world.rank == 0 ? 2 : 6, 1 + static_cast<std::uint32_t>(world.rank)).backward();
    const auto before = net.module().norm.running_mean.value().to_vector();
    net.eval();
    return test::text_of(before) + "|" + test::text_of(net.module().norm.running_mean.value().to_vector());
  });
  const auto before = [](const std::string& text) { return test::numbers_in(text.substr(0, text.find('|'))); };
  const auto after = [](const std::string& text) { return test::numbers_in(text.substr(text.find('|') + 1)); };
  auto expected = before(texts[0]);
  for (std::size_t i = 0; i < 3; ++i) expected[i] = 0.25 * expected[i] + 0.75 * before(texts[1])[i];
  CHECK(distance(after(texts[0]), expected) < rounding);
  CHECK(after(texts[0]) == after(texts[1]));
}

template <class Net>
std::vector<double> synced(Net& net, const World* world) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  for (std::uint32_t number = 0; number < 5; ++number) {
    optimizer.zero_grad();
    if (world)
      share_of_loss(net, number == 3 ? 2 : 7, number, *world).backward();
    else
      loss_of(net, number == 3 ? 2 : 7, number).backward();
    optimizer.step();
  }
  net.eval();
  return test::values(net.module());
}
TEST_CASE("sync batch norm: local sgd with a period of 1, and a parameter server, take the steps of one device") {
  using Synced = test::Synced<Cpu>;
  SingleDevice<Synced> single{make<Synced>(), 3};
  const auto expected = synced(single, nullptr);
  CHECK(distance(test::numbers_in(common_text(3,
                                              [](const World& world) {
                                                auto communicator = comm::connect(world);
                                                LocalSgd<Synced> net{make<Synced>(), communicator, {.period = 1}, 3};
                                                return test::text_of(synced(net, &world));
                                              })),
                 expected) < rounding);
  CHECK(distance(test::numbers_in(common_text(3,
                                              [](const World& world) {
                                                auto communicator = comm::connect(world);
                                                ParameterServer<Synced> net{make<Synced>(), communicator, 3};
                                                return test::text_of(synced(net, &world));
                                              })),
                 expected) < rounding);
}

/// A backward pass that ends early, when some gradients have arrived.
template <class Net>
void fail_in_backward(Net& net) {
  const Variable<double, 2> x(numbers(3, 5, 1), true);
  x.register_hook([](const auto&) { fail<Error>("the program's own error"); });
  CHECK_THROWS_WITH(mean(net(x)).backward(), Contains("the program's own error"));
}
TEST_CASE("local sgd: steps behind a backward pass that ended early count") {
  const auto same = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Model> net{make<Model>(), communicator, {.period = 1}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    fail_in_backward(net);
    for (std::uint32_t number = 0; number < 2; ++number) {
      optimizer.zero_grad();
      share_of_loss(net, 7, number, world).backward();
      optimizer.step();
    }
    loss_of(net, 1, 1);
    return test::text_of(test::values(net.module()));
  });
  CHECK(same != "");
}

TEST_CASE("parameter server: a backward pass that ended early is named by the next forward pass") {
  const auto text = common_text(1, [](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    fail_in_backward(net);
    return message_of<UsageError>([&] { loss_of(net, 3, 1); });
  });
  CHECK(text == "ParameterServer: the last backward pass ended early; its gradients are incomplete");
}

TEST_CASE("parameter server: two forward passes before one backward add to earlier gradients, which stay") {
  const auto gradients_of = [](auto& net, const auto& loss) {
    loss(1).backward();
    const auto first = loss(2), second = loss(2);
    (first + second).backward();
    return test::gradients(net.module());
  };
  SingleDevice<Model> single{make<Model>(), 3};
  const auto expected = gradients_of(single, [&](std::uint32_t key) { return loss_of(single, 7, key); });
  const auto texts = texts_of(3, [&](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    return test::text_of(gradients_of(net, [&](std::uint32_t key) { return share_of_loss(net, 7, key, world); }));
  });
  CHECK(distance(test::numbers_in(texts[0]), expected) < rounding);
}

TEST_CASE("parameter server: a parameter that is frozen for a while keeps its gradient") {
  const auto gradients_of = [](auto& net, const auto& loss) {
    for (const bool wants : {true, false, true}) {
      net.module().fc2.weight.set_requires_grad(wants);
      loss().backward();
    }
    return test::gradients(net.module());
  };
  SingleDevice<Model> single{make<Model>(), 3};
  const auto expected = gradients_of(single, [&] { return loss_of(single, 7, 1); });
  const auto texts = texts_of(2, [&](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    return test::text_of(gradients_of(net, [&] { return share_of_loss(net, 7, 1, world); }));
  });
  CHECK(distance(test::numbers_in(texts[0]), expected) < rounding);
}

TEST_CASE("local sgd: ranks that step without samples come together, too") {
  const auto text = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Model> net{make<Model>(), communicator, {.period = 1}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (const Index rows : {7, 0}) {
      share_of_loss(net, rows, 1, world).backward();
      optimizer.step();  // momenta differ
    }
    net.eval();
    return test::text_of(test::values(net.module()));
  });
  CHECK(text != "");
}

TEST_CASE("local sgd: ranks that count steps differently are told so before they take a mean") {
  const auto texts = texts_of(3, [](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Model> net{make<Model>(), communicator, {.period = 2}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    return message_of<UsageError>([&] {
      for (std::uint32_t number = 0; number < 5; ++number) {
        optimizer.zero_grad();
        const auto loss = share_of_loss(net, 7, number, world);
        if (world.rank != 1 || number != 1) loss.backward();
        optimizer.step();
      }
    });
  });
  for (const auto& text : texts) CHECK_THAT(text, Contains("got rank 0: 2 in 2, rank 1: 2 in 3, rank 2: 2 in 2"));
}

TEST_CASE("parameter server: a second backward pass behind one forward pass is refused") {
  const auto texts = texts_of(2, [](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    const auto loss = share_of_loss(net, 7, 1, world);
    loss.backward(true);
    return message_of<UsageError>([&] { loss.backward(); });
  });
  for (const auto& text : texts) CHECK_THAT(text, Contains("ParameterServer: expected a forward pass"));
}

TEST_CASE("grad scaler: ranks without gradients have to ask the others") {
  const auto texts = texts_of(2, [](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    optim::GradScaler scaler{net.parameters(), {.init_scale = 4}};
    scaler.scale(share_of_loss(net, 7, 1, world)).backward();
    return message_of<UsageError>([&] { scaler.step(optimizer); });
  });
  CHECK(texts[0] == "nothing");
  CHECK_THAT(texts[1], Contains("GradScaler: no parameter has a gradient"));
  const auto asked = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    optim::GradScaler scaler{net, {.init_scale = 4, .growth_interval = 1}};
    std::string text;
    for (std::uint32_t number = 0; number < 4; ++number) {
      optimizer.zero_grad();
      scaler.scale(share_of_loss(net, 7, number, world) * (number == 1 && world.rank == 1 ? INFINITY : 1.0)).backward();
      text += cat(scaler.step(optimizer), " ");
      text += cat(scaler.loss_scale(), " ");
    }
    return text;
  });
  CHECK(asked == "true 8 false 4 true 8 true 16 ");
}

TEST_CASE("grad scaler: a policy that throws bad gradients away leaves it nothing to see") {
  const auto texts = texts_of(2, [](const World& world) {
    Distributed<Model> rank(world, {.non_finite = NonFinite::skip_step});
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
    optim::GradScaler scaler{rank.net.parameters(), {.init_scale = 4}};
    scaler.scale(share_of_loss(rank.net, 7, 1, world) * (world.rank == 1 ? INFINITY : 1.0)).backward();
    return message_of<UsageError>([&] { scaler.step(optimizer); }) + "|" +
           message_of<UsageError>([&] { optim::GradScaler other{rank.net}; });
  });
  for (const auto& text : texts) {
    CHECK_THAT(text, Contains("GradScaler: no parameter has a gradient"));
    CHECK_THAT(text, Contains("NonFinite::propagate"));
  }
}

TEST_CASE("post-local sgd: parameters that are each rank's own, or frozen, stay what they are") {
  const auto texts = texts_of(3, [](const World& world) {
    auto model = make<Model>(world.rank == 0 ? 1u : 2u);
    const auto own = test::text_of(model.fc2.weight.value().to_vector());
    Distributed<Model, PostLocalSgd> rank(world, {.parameters_and_buffers_to_ignore = {"fc2.weight", "fc2.bias"}},
                                          std::move(model), {.start_local_sgd_iter = 1, .period = 1});
    auto& net = rank.net;
    net.module().fc1.weight.set_requires_grad(false);
    const auto frozen = test::text_of(net.module().fc1.weight.value().to_vector());
    std::vector<nn::NamedParameter<Cpu>> others;
    for (const auto& named : net.parameters())
      if (!named.name.starts_with("fc2")) others.push_back(named);
    optim::Sgd optimizer{others, {.lr = 0.3}};
    for (std::uint32_t number = 0; number < 5; ++number) {
      optimizer.zero_grad();
      share_of_loss(net, 7, number, world).backward();
      optimizer.step();
    }
    net.eval();
    return cat(own == test::text_of(net.module().fc2.weight.value().to_vector()), " ",
               frozen == test::text_of(net.module().fc1.weight.value().to_vector()));
  });
  for (const auto& text : texts) CHECK(text == "true true");
}

TEST_CASE("post-local sgd: a rank's own gradient that is not finite is everybody's") {
  for (const auto non_finite : {NonFinite::skip_step, NonFinite::throw_error}) {
    const auto texts = texts_of(2, [=](const World& world) {
      Distributed<Model, PostLocalSgd> rank(world, {.non_finite = non_finite}, make<Model>(),
                                            {.start_local_sgd_iter = 1, .period = 3});
      optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
      try {
        for (std::uint32_t number = 0; number < 4; ++number) {
          optimizer.zero_grad();
          (share_of_loss(rank.net, 7, number, world) * (world.rank == 1 && number == 2 ? INFINITY : 1.0)).backward();
          optimizer.step();
        }
      } catch (const NonFiniteError& error) {
        return std::string(error.what());
      }
      return cat(rank.net.skipped_steps(), " skipped");
    });
    for (const auto& text : texts)
      if (non_finite == NonFinite::skip_step)
        CHECK(text == "1 skipped");
      else
        CHECK_THAT(text, Contains("is not finite; its source:") && Contains("on rank 1"));
  }
}

TEST_CASE("policies that average parameters train in eval mode, as with frozen batch norm") {
  SingleDevice<Model> single{make<Model>(), 3};
  const auto train = [](auto& net, const auto& loss) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    net.eval();
    for (std::uint32_t number = 0; number < 4; ++number) {
      optimizer.zero_grad();
      loss(net, number).backward();
      optimizer.step();
    }
    net.eval();
    return test::text_of(test::values(net.module()));
  };
  const auto expected = train(single, [](auto& net, std::uint32_t number) { return loss_of(net, 6, number); });
  const auto check = [&](const auto& make_net) {
    const auto text = common_text(2, [&](const World& world) {
      auto communicator = comm::connect(world);
      auto net = make_net(communicator);
      return train(net, [&](auto& policy, std::uint32_t number) { return share_of_loss(policy, 6, number, world); });
    });
    CHECK(distance(test::numbers_in(text), test::numbers_in(expected)) < rounding);
  };
  check([](auto& c) { return ParameterServer<Model>(make<Model>(), c, 3); });
  check([](auto& c) { return LocalSgd<Model>(make<Model>(), c, {.period = 1}, 3); });
  check([](auto& c) {
    return DistributedDataParallel<Model, PostLocalSgd>(make<Model>(), c, {}, 3,
                                                        {.start_local_sgd_iter = 1, .period = 1});
  });
}

TEST_CASE("parameter server: peers don't wait for a rank that throws in the middle of backward") {
  for (const int thrower : {0, 1}) {
    const auto begin = comm::Clock::now();
    const auto texts = Ranks(2, [=](const World& world) -> std::string {
                         auto communicator = comm::connect(world);  // outlives the net
                         try {
                           ParameterServer<Model> net{make<Model>(), communicator, 3};
                           if (world.rank == thrower)
                             net.module().fc1.weight.register_hook([] { fail<FileError>("the user's error"); });
                           for (std::uint32_t number = 0; number < 3; ++number)
                             share_of_loss(net, 6, number, world).backward();
                         } catch (const Error& error) {
                           std::this_thread::sleep_for(world.rank == thrower ? 2s : 0s);
                           return error.what();
                         }
                         return "no error";
                       }).texts();
    CHECK(texts[static_cast<std::size_t>(thrower)] == "the user's error");
    CHECK_THAT(texts[static_cast<std::size_t>(1 - thrower)],
               Contains(cat("rank ", thrower, " gave up: its net has ended in the middle of a backward pass")));
    CHECK(comm::Clock::now() - begin < 5s);
  }
}

}  // namespace averaging_edges_test
