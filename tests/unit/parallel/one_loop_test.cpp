// One training loop for all policies: gradient accumulation, ranks with different numbers of batches, and several nets
// that train in turn.
#include <catch.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include "ranks.hpp"

namespace one_loop_test {

using namespace test::names;
using Model = test::Smooth<Cpu>;
using Batches = std::vector<int>;  // of each rank

/// Rank r has 2 + r rows in each pass.
template <class Net>
auto loss_of(Net& net, int rank, int pass) {
  const auto key = static_cast<std::uint32_t>(10 * pass + rank);
  return cross_entropy(net(numbers(2 + rank, 5, key)), labels(2 + rank, 3, key));
}

/// Steps of two passes each; the first pass only accumulates.
template <class Net>
void train(Net& net, int rank, int batches) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  for (int epoch = 0; epoch < 2; ++epoch)
    net.join(
        [&] {
          for (int i = 0; i < batches; ++i) {
            optimizer.zero_grad();
            {
              const auto quiet = net.no_sync();
              loss_of(net, rank, 2 * i).backward();
            }
            loss_of(net, rank, 2 * i + 1).backward();
            optimizer.step();
          }
        },
        {.step = [&] { optimizer.step(); }});
  net.eval();
}

/// On one device, with the batches of the ranks that still have one.
std::vector<double> train_alone(const Batches& batches) {
  SingleDevice<Model> net{make<Model>(), 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  for (int epoch = 0; epoch < 2; ++epoch)
    for (int i = 0; i < *std::max_element(batches.begin(), batches.end()); ++i) {
      optimizer.zero_grad();
      for (int pass = 2 * i; pass < 2 * i + 2; ++pass) {
        double rows = 0;
        for (int r = 0; r < static_cast<int>(batches.size()); ++r)
          if (i < batches[static_cast<std::size_t>(r)]) rows += 2 + r;
        for (int r = 0; r < static_cast<int>(batches.size()); ++r)
          if (i < batches[static_cast<std::size_t>(r)]) (loss_of(net, r, pass) * ((2 + r) / rows)).backward();
      }
      optimizer.step();
    }
  return test::values(net.module());
}

template <class Net, class... Options>
void check_policy(const Options&... options) {
  for (const Batches& batches : {Batches{2, 2, 2}, {3, 1, 2}, {1, 4, 4}, {0, 2, 1}, {2, 0, 0}}) {
    INFO(Net::name << " " << test::text_of({batches.begin(), batches.end()}));
    const auto text = common_text(3, [&](const World& world) {
      auto communicator = comm::connect(world);
      Net net{make<Model>(), communicator, options..., 3};
      train(net, world.rank, batches[static_cast<std::size_t>(world.rank)]);
      return test::text_of(test::values(net.module())) + cat("|", net.forward_passes());
    });
    INFO(text);
    CHECK(distance(test::numbers_in(text), train_alone(batches)) < rounding);
    CHECK_THAT(text, Contains(cat("|", 4 * *std::max_element(batches.begin(), batches.end()))));
  }
}

TEST_CASE("one loop: on one device, and on several of a process") {
  SingleDevice<Model> single{make<Model>(), 3};
  train(single, 0, 3);
  CHECK(test::values(single.module()) == train_alone({3}));
  DataParallel<Model> several{make<Model>(), {.device_ids = {0, 1}}, 3};
  train(several, 0, 3);
  CHECK(distance(test::values(several.module()), train_alone({3})) < rounding);
}
TEST_CASE("one loop: under DistributedDataParallel") {
  check_policy<DistributedDataParallel<Model>>(DistributedDataParallelOptions{});
}
TEST_CASE("one loop: under ParameterServer") { check_policy<ParameterServer<Model>>(); }
TEST_CASE("one loop: under LocalSgd with a period of 1") {
  check_policy<LocalSgd<Model>>(LocalSgdOptions{.period = 1});
}

TEST_CASE("one loop: under LocalSgd ranks that end in the midst of a period count by what they have done") {
  // After the first step rank 1 trains alone. The average after its second step weighs the ranks by their samples.
  const auto texts = Ranks(2, [](const World& world) {
                       auto communicator = comm::connect(world);
                       LocalSgd<Model> net{make<Model>(), communicator, {.period = 2}, 3};
                       train(net, world.rank, 1 + 2 * world.rank);
                       return test::text_of(test::values(net.module()));
                     }).texts();
  CHECK(texts[0] == texts[1]);
  // Two epochs of 1 and 3 steps, with an average after every second step of rank 1 and at the end of each epoch.
  std::vector<std::unique_ptr<SingleDevice<Model>>> nets;
  for (int rank = 0; rank < 2; ++rank) nets.push_back(std::make_unique<SingleDevice<Model>>(make<Model>(), 3));
  const auto step = [&](int rank, int i) {
    auto& net = *nets[static_cast<std::size_t>(rank)];
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    optimizer.zero_grad();
    for (int pass = 2 * i; pass < 2 * i + 2; ++pass) loss_of(net, rank, pass).backward();
    optimizer.step();
  };
  const auto mean = [&](double samples0, double samples1) {
    const auto a = nets[0]->parameters(), b = nets[1]->parameters();
    for (std::size_t i = 0; i < a.size(); ++i) {
      auto* x = static_cast<double*>(a[i].parameter->value_data());
      auto* y = static_cast<double*>(b[i].parameter->value_data());
      for (Index k = 0; k < a[i].parameter->count(); ++k)
        x[k] = y[k] = (samples0 * x[k] + samples1 * y[k]) / (samples0 + samples1);
    }
  };
  for (int epoch = 0; epoch < 2; ++epoch) {
    step(0, 0);
    step(1, 0);
    step(1, 1);
    mean(4, 12);
    step(1, 2);
    mean(0, 6);
  }
  CHECK(distance(test::numbers_in(texts[0]), test::values(nets[0]->module())) < rounding);
}

TEST_CASE("join: two nets in a loop, each with an optimizer of its own") {
  using Other = test::Wide<Cpu>;
  const Batches batches{1, 3, 2};
  const auto other_loss = [](auto& net, int rank, int i) {
    const auto key = static_cast<std::uint32_t>(50 + 10 * i + rank);
    return mean(square(net(numbers(2 + rank, 20, key))));
  };
  const optim::SgdOptions sgd{.lr = 0.2, .momentum = 0.9};
  SingleDevice<Model> alone{make<Model>(), 3};
  SingleDevice<Other> other_alone{make<Other>(), 3};
  optim::Sgd alone_optimizer{alone.parameters(), sgd}, other_alone_optimizer{other_alone.parameters(), sgd};
  for (int epoch = 0; epoch < 2; ++epoch)
    for (int i = 0; i < 3; ++i) {
      alone_optimizer.zero_grad();
      other_alone_optimizer.zero_grad();
      double rows = 0;
      for (int r = 0; r < 3; ++r) rows += i < batches[static_cast<std::size_t>(r)] ? 2 + r : 0;
      for (int r = 0; r < 3; ++r) {
        if (i >= batches[static_cast<std::size_t>(r)]) continue;
        (loss_of(alone, r, i) * ((2 + r) / rows)).backward();
        (other_loss(other_alone, r, i) * ((2 + r) / rows)).backward();
      }
      alone_optimizer.step();
      other_alone_optimizer.step();
    }
  auto expected = test::values(alone.module());
  for (const double x : test::values(other_alone.module())) expected.push_back(x);

  // First each optimizer steps right after its net's backward; then both at the end of the iteration.
  for (const bool each : {true, false}) {
    const auto text = common_text(3, [&](const World& world) {
      auto communicator = comm::connect(world);
      const DistributedDataParallelOptions options{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0};
      DistributedDataParallel<Model> net{make<Model>(), communicator, options, 3};
      DistributedDataParallel<Other> other{make<Other>(), communicator, options, 3};
      SingleDevice<Model> own{make<Model>(), 3};  // needs no join
      optim::Sgd optimizer{net.parameters(), sgd}, other_optimizer{other.parameters(), sgd};
      const auto step = [&] { optimizer.step(); };
      const auto other_step = [&] { other_optimizer.step(); };
      const auto loop = [&] {
        for (int i = 0; i < batches[static_cast<std::size_t>(world.rank)]; ++i) {
          optimizer.zero_grad();
          loss_of(net, world.rank, i).backward();
          if (each) step();
          other_optimizer.zero_grad();
          other_loss(other, world.rank, i).backward();
          if (!each) step();
          other_step();
        }
      };
      for (int epoch = 0; epoch < 2; ++epoch)
        if (each)
          chorus::join(loop, {}, own, net, step, other, other_step);
        else
          chorus::join(loop, {.step = [&] { step(), other_step(); }}, net, other);
      return test::text_of(test::values(net.module())) + test::text_of(test::values(other.module()));
    });
    INFO(text);
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

TEST_CASE("join: what the policies refuse") {
  comm::AnyCommunicator alone;
  ParameterServer<Model> server{make<Model>(), alone};
  CHECK(message_of<UsageError>([&] { server.join([] {}); }) ==
        "ParameterServer::join: the server must step for all ranks, also after its own batches: set JoinOptions::step, "
        "or pass a function after the net");
  const JoinOptions step{.step = [] {}};
  CHECK(message_of<UsageError>([&] { server.join([&] { server.join([] {}, step); }, step); }) ==
        "ParameterServer::join: it is already inside join");
  LocalSgd<Model> local{make<Model>(), alone};
  CHECK(message_of<UsageError>([&] { local.join([&] { chorus::join([] {}, step, server, local); }); }) ==
        "LocalSgd::join: it is already inside join");
  server.join([&] { loss_of(server, 0, 0).backward(); }, step);  // the refused call has no effects

  const auto thrown_early = [](const auto& make_net) {
    return common_text(3, [&](const World& world) {
      auto communicator = comm::connect(world);
      auto net = make_net(communicator);
      optim::Sgd optimizer{net->parameters(), {.lr = 0.3}};
      return message_of<UsageError>([&] {
        net->join(
            [&] {
              for (int i = 0; i < 4 - 2 * (world.rank % 2); ++i) {
                optimizer.zero_grad();
                loss_of(*net, world.rank, i).backward();
                optimizer.step();
              }
            },
            {.throw_on_early_termination = true});
      });
    });
  };
  const std::string why = "::join: rank 1 has run out of batches; throw_on_early_termination ends all ranks";
  CHECK(thrown_early([](auto& c) { return std::make_unique<ParameterServer<Model>>(make<Model>(), c); }) ==
        "ParameterServer" + why);
  CHECK(thrown_early([](auto& c) {
          return std::make_unique<LocalSgd<Model>>(make<Model>(), c, LocalSgdOptions{.period = 1});
        }) == "LocalSgd" + why);
}

TEST_CASE("parameter server: under no_sync nothing is sent, and micro-batches weigh as on one device") {
  const auto rows_of = [](int rank, int pass) { return static_cast<Index>((3 * rank + 2 * pass) % 5); };
  const auto loss_with = [](auto& net, Index rows, int key) {
    return cross_entropy(net(numbers(rows, 5, static_cast<std::uint32_t>(key))),
                         labels(rows, 3, static_cast<std::uint32_t>(key)));
  };
  SingleDevice<Model> single{make<Model>(), 3};
  optim::Sgd single_optimizer{single.parameters(), {.lr = 0.3}};
  for (int step = 0; step < 3; ++step) {
    single_optimizer.zero_grad();
    for (int pass = 3 * step; pass < 3 * step + 3; ++pass) {
      Index all = 0;
      for (int r = 0; r < 3; ++r) all += rows_of(r, pass);
      for (int r = 0; r < 3; ++r)
        if (const Index rows = rows_of(r, pass); rows > 0)
          (loss_with(single, rows, 10 * pass + r) * (static_cast<double>(rows) / static_cast<double>(all))).backward();
    }
    single_optimizer.step();
  }
  const auto text = common_text(3, [&](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    std::uint64_t quiet_bytes = 0;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (int pass = 3 * step; pass < 3 * step + 3; ++pass) {
        const auto before = trace::bytes_sent(world.rank, trace::Traffic::gradients);
        const bool adds_up = pass % 3 != 2;
        const NoSync quiet = adds_up ? net.no_sync() : NoSync();
        loss_with(net, rows_of(world.rank, pass), 10 * pass + world.rank).backward();
        if (adds_up) quiet_bytes += trace::bytes_sent(world.rank, trace::Traffic::gradients) - before;
      }
      optimizer.step();
    }
    net.eval();
    return test::text_of(test::values(net.module())) + cat("|", quiet_bytes);
  });
  CHECK(distance(test::numbers_in(text), test::values(single.module())) < rounding);
  CHECK_THAT(text, Contains("|0"));
}

}  // namespace one_loop_test
