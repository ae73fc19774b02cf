// Edge cases of join and no_sync: contributions and gradients of a rank that has ended, or has no samples.
#include <catch.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include <unit/parallel/ranks.hpp>

namespace join_edges_test {

using namespace test::names;
using Model = test::Smooth<Cpu>;

/// Rank r has 2 + r rows in each pass, or the given number.
template <class Net>
auto loss_of(Net& net, int rank, int pass, Index rows = -1) {
  if (rows < 0) rows = 2 + rank;
  const auto key = static_cast<std::uint32_t>(10 * pass + rank);
  return cross_entropy(net(numbers(rows, 5, key)), labels(rows, 3, key));
}

/// The result of `program(net, rank)` under a policy, equal on both ranks.
template <class Net, class... Options>
std::string under(const auto& program, const Options&... options) {
  return common_text(2, [&](const World& world) {
    auto communicator = comm::connect(world);
    Net net{make<Model>(), communicator, options..., 3};
    return program(net, world.rank);
  });
}
template <class Program>
std::string under_ddp(const Program& program, const DistributedDataParallelOptions& options = {}) {
  return under<DistributedDataParallel<Model>>(program, options);
}
template <class Program>
std::string under_server(const Program& program) {
  return under<ParameterServer<Model>>(program);
}
template <class Program>
std::string under_local_sgd(const Program& program, int period = 1) {
  return under<LocalSgd<Model>>(program, LocalSgdOptions{.period = period});
}
template <class Net>
std::string parameters_of(Net& net) {
  net.eval();
  return test::text_of(test::values(net.module()));
}
/// `program(net)` on one device.
std::vector<double> alone(const auto& program) {
  SingleDevice<Model> net{make<Model>(), 3};
  program(net);
  return test::values(net.module());
}
void check_near(const std::string& text, const std::vector<double>& expected) {
  INFO(text);
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("join: a rank that ends with gradients from no_sync learns a static graph from the others") {
  const auto program = [](auto& net, int rank) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    for (int epoch = 0; epoch < 2; ++epoch)
      net.join([&] {
        optimizer.zero_grad();
        {
          const auto quiet = net.no_sync();
          loss_of(net, rank, 0).backward();
        }
        if (rank == 0 && epoch == 0) return;
        loss_of(net, rank, 1).backward();
        optimizer.step();
      });
    return parameters_of(net);
  };
  check_near(under_ddp(program, {.static_graph = true}), test::numbers_in(under_ddp(program)));
}

TEST_CASE("join: behind it a backward pass without a forward pass is averaged") {
  const auto text = under_ddp([](auto& net, int rank) {
    net.join([&] { loss_of(net, rank, 0).backward(); });
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    const auto& m = net.module();
    (sum(square(m.fc1.weight)) + sum(square(m.fc1.bias)) + sum(square(m.fc2.weight)) + sum(square(m.fc2.bias)) +
     sum(square(m.fc3.weight)) + sum(square(m.fc3.bias)))
        .backward();
    std::vector<double> half;
    for (const double gradient : test::gradients(net.module())) half.push_back(gradient / 2);
    return distance(half, test::values(net.module())) < rounding ? std::string("the penalty's") : test::text_of(half);
  });
  CHECK(text == "the penalty's");
}

TEST_CASE("join: gradients from before come back to their parameters, which lie elsewhere by then") {
  for (const bool from_before : {true, false}) {
    CAPTURE(from_before);
    CHECK(common_text(2, [=](const World& world) {
            auto communicator = comm::connect(world);
            SingleDevice<Model> first{make<Model>(), 3};
            if (from_before) loss_of(first, 0, 0).backward();
            DistributedDataParallel<Model, NoCommunication> net{std::move(first.module()), communicator,
                                                                DistributedDataParallelOptions{}, 3};
            auto before = test::gradients(net.module());
            net.join([&] {
              if (!from_before) {
                const auto quiet = net.no_sync();
                loss_of(net, world.rank, 0).backward();
                before = test::gradients(net.module());
              }
              if (world.rank == 1) loss_of(net, 1, 1).backward();
            });
            const bool same = test::gradients(net.module()) == before;
            return std::string(same == (world.rank == 0) ? "as it should be" : "wrong");
          }) == "as it should be");
  }
}

struct Spare : nn::Module {
  nn::Linear<Cpu, double> fc1{5, 3}, spare{5, 3};
  CHORUS_MODULE(Spare, fc1, spare)
  auto forward(const auto& x) const { return fc1(x); }
};
TEST_CASE("join: what nobody uses in a static graph is stepped on no rank") {
  CHECK(common_text(2, [](const World& world) {
          Distributed<Spare> rank(world, {.static_graph = true});
          auto& net = rank.net;
          const auto before = net.module().spare.weight.value().to_vector();
          bool same = true;
          optim::Adam optimizer{net.parameters(), {.lr = 0.1, .weight_decay = 0.1}};
          const auto step = [&] {
            optimizer.step();
            same = same && net.module().spare.weight.value().to_vector() == before;
          };
          net.join(
              [&] {
                for (int i = 0; i < 2 * world.rank; ++i) {
                  optimizer.zero_grad();
                  loss_of(net, 1, i).backward();
                  step();
                }
              },
              {.step = step});
          return std::string(same ? "same" : "stepped");
        }) == "same");
}

TEST_CASE("join: logging_data has a rank's own iterations") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<Model> rank(world);
                       rank.net.join([&] {
                         for (int i = 0; i < 1 + 2 * world.rank; ++i) loss_of(rank.net, world.rank, i).backward();
                       });
                       const auto& data = rank.net.logging_data();
                       const bool sane = data.avg.backward_compute_time < 60 && data.avg.forward_compute_time < 60;
                       return cat(data.iterations, sane ? "" : " of absurd length");
                     }).texts();
  CHECK(texts == std::vector<std::string>{"1", "3"});
}

TEST_CASE("a zero_grad between a forward pass without samples and its backward counts") {
  const auto step_without_samples = [](auto& net, int rank, bool accumulates) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    if (accumulates) {
      const auto quiet = net.no_sync();
      loss_of(net, rank, 7, 3).backward();
    }
    for (int i = 0; i < 3; ++i) {
      const auto loss = loss_of(net, rank, i, i == 1 && rank == 0 ? 0 : 3);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
    return parameters_of(net);
  };
  const auto expected = alone([](auto& net) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      if (i != 1) (loss_of(net, 0, i, 3) * 0.5).backward();
      (loss_of(net, 1, i, 3) * (i == 1 ? 1 : 0.5)).backward();
      optimizer.step();
    }
  });
  for (const bool accumulates : {false, true}) {
    const auto program = [=](auto& net, int rank) { return step_without_samples(net, rank, accumulates); };
    check_near(under_ddp(program), expected);
    check_near(under_server(program), expected);
  }
}

TEST_CASE("parameter server: forward passes in training without gradients have the newest parameters") {
  const auto program = [](auto& net, int rank) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    std::vector<double> outputs;
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      loss_of(net, rank, i).backward();
      optimizer.step();
      const NoGrad no_grad;
      outputs.push_back(mean(net(numbers(2, 5, 99))).item());
    }
    return test::text_of(outputs);
  };
  check_near(under_server(program), test::numbers_in(under_ddp(program)));
}

TEST_CASE("local sgd: throw_on_early_termination ends all ranks at once, and they go on from there") {
  const auto texts = Ranks(2, [](const World& world) {
                       auto communicator = comm::connect(world);
                       LocalSgd<test::Synced<Cpu>> net{make<test::Synced<Cpu>>(), communicator, {.period = 4}, 3};
                       int passes = 0;
                       const auto train = [&](int batches) {
                         for (int i = 0; i < batches; ++i) {
                           loss_of(net, world.rank, i).backward();
                           ++passes;
                         }
                       };
                       std::string text;
                       try {
                         net.join([&] { train(world.rank == 1 ? 2 : 8); }, {.throw_on_early_termination = true});
                       } catch (const UsageError& error) {
                         text = cat(error.what(), " behind ", passes);
                       }
                       net.eval();
                       net.train();
                       train(5);
                       net.eval();
                       net.train();
                       net.join([&] { train(3); }, {.throw_on_early_termination = true});
                       return text;
                     }).texts();
  for (const auto& text : texts)
    CHECK(text == "LocalSgd::join: rank 1 has run out of batches; throw_on_early_termination ends all ranks behind 2");
}

TEST_CASE("join: with a GradScaler that knows the net, under every policy") {
  const auto program = [](auto& net, int rank) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    optim::GradScaler scaler{net};
    const auto step = [&] { scaler.step(optimizer); };
    net.join(
        [&] {
          for (int i = 0; i < 4 - 2 * rank; ++i) {
            optimizer.zero_grad();
            scaler.scale(loss_of(net, rank, i)).backward();
            step();
          }
        },
        {.step = step});
    return parameters_of(net);
  };
  const auto expected = alone([](auto& net) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (int i = 0; i < 4; ++i) {
      optimizer.zero_grad();
      (loss_of(net, 0, i) * (i < 2 ? 0.4 : 1)).backward();
      if (i < 2) (loss_of(net, 1, i) * 0.6).backward();
      optimizer.step();
    }
  });
  check_near(under_ddp(program), expected);
  check_near(under_server(program), expected);
  check_near(under_local_sgd(program), expected);
}

TEST_CASE("join: parameters are frozen in the midst of it, under every policy") {
  const auto program = [](auto& net, int rank) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (int epoch = 0; epoch < 2; ++epoch) {
      int steps = 0;
      net.module().fc2.weight.set_requires_grad(true);
      const auto step = [&] {
        optimizer.step();
        net.module().fc2.weight.set_requires_grad(++steps < 2);
      };
      net.join(
          [&] {
            for (int i = 0; i < 1 + 3 * rank; ++i) {
              optimizer.zero_grad();
              loss_of(net, rank, i).backward();
              step();
            }
          },
          {.step = step});
    }
    return parameters_of(net);
  };
  const auto expected = alone([](auto& net) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (int epoch = 0; epoch < 2; ++epoch)
      for (int i = 0; i < 4; ++i) {
        net.module().fc2.weight.set_requires_grad(i < 2);
        optimizer.zero_grad();
        if (i == 0) (loss_of(net, 0, i) * 0.4).backward();
        (loss_of(net, 1, i) * (i == 0 ? 0.6 : 1)).backward();
        optimizer.step();
      }
  });
  check_near(under_ddp(program), expected);
  check_near(under_server(program), expected);
  check_near(under_local_sgd(program), expected);
  for (const int period : {2, 3}) CHECK(!under_local_sgd(program, period).empty());
}

TEST_CASE("join: a step of several averaged passes, which goes on where a rank has ended") {
  const auto program = [](auto& net, int rank) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    int passes = 0;
    const auto step = [&] {
      if (++passes % 2 != 0) return;
      optimizer.step();
      optimizer.zero_grad();
    };
    net.join(
        [&] {
          for (int i = 0; i < 2 + 2 * rank; ++i) {
            loss_of(net, rank, i).backward();
            step();
          }
        },
        {.step = step});
    return parameters_of(net);
  };
  const auto expected = alone([](auto& net) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (int i = 0; i < 4; ++i) {
      if (i < 2) (loss_of(net, 0, i) * 0.4).backward();
      (loss_of(net, 1, i) * (i < 2 ? 0.6 : 1)).backward();
      if (i % 2 == 0) continue;
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  check_near(under_ddp(program), expected);
  check_near(under_server(program), expected);
}

TEST_CASE("join: a parameter server among several nets needs what steps it, too") {
  const auto join_it = [](const JoinOptions& options, auto... step) {
    return under_server([&](auto& net, int rank) {
      try {
        chorus::join(
            [&] {
              for (int i = 0; i < rank; ++i) loss_of(net, rank, i).backward();
            },
            options, net, step...);
      } catch (const UsageError& error) {
        return std::string(error.what());
      }
      return std::string("joined");
    });
  };
  CHECK(join_it({}).starts_with("ParameterServer::join: the server must step for all"));
  CHECK(join_it({}, [] {}) == "joined");
  CHECK(join_it({.step = [] {}}) == "joined");
}

}  // namespace join_edges_test
