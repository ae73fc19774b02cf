// Other ways to average than DistributedDataParallel's: LocalSgd and ParameterServer.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/launch/launch.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include <unit/parallel/ranks.hpp>

namespace averaging_test {

using namespace test::names;
using trace::Traffic;
using Model = test::Smooth<Cpu>;
constexpr std::uint64_t model_numbers = 111;

/// Trains with the common loop, under any policy.
template <class Net>
std::string train(Net& net, const World& world, const optim::SgdOptions& options) {
  optim::Sgd optimizer{net.parameters(), options};
  for (std::uint32_t number = 0; number < 6; ++number) test::step(net, optimizer, number, number == 3 ? 2 : 7, world);
  net.eval();
  return test::text_of(test::values(net.module()));
}
std::vector<double> train_alone(const optim::SgdOptions& options) {
  SingleDevice<Model> net{make<Model>(), 3};
  optim::Sgd optimizer{net.parameters(), options};
  for (std::uint32_t number = 0; number < 6; ++number) test::step(net, optimizer, number, number == 3 ? 2 : 7);
  return test::values(net.module());
}

template <class Net>
std::string launched(int ranks) {
  return common_text(ranks, [](const World& world) {
    test::become(world);
    std::string text;
    char program[] = "test";
    char* argv[] = {program, nullptr};
    const int status = launch<Net>(1, argv, [&](auto& run) {
      Net net{make<Model>(), run};
      text = train(net, world, {.lr = 0.3});
    });
    return status == 0 ? text : cat("status ", status);
  });
}

TEST_CASE("local sgd: with a period of 1 and plain sgd its steps are those of one device") {
  const optim::SgdOptions sgd{.lr = 0.3, .weight_decay = 0.01};
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    const auto text = common_text(ranks, [&](const World& world) {
      auto communicator = comm::connect(world);
      LocalSgd<Model> net{make<Model>(), communicator, {.period = 1}, 3};
      return train(net, world, sgd);
    });
    CHECK(distance(test::numbers_in(text), train_alone(sgd)) < rounding);
  }
}

TEST_CASE("local sgd: ranks go apart and come together, and send 2(n-1)/n of the model each period") {
  const std::uint64_t n = 3;
  const auto text = common_text(static_cast<int>(n), [](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Model> net{make<Model>(), communicator, {.period = 4}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    std::string log;
    for (std::uint32_t number = 0; number < 9; ++number) {
      trace::reset_traffic();
      test::step(net, optimizer, number, 7, world);
      std::vector<double> sent{static_cast<double>(trace::bytes_sent(world.rank, Traffic::parameters)),
                               static_cast<double>(trace::bytes_sent(world.rank, Traffic::gradients))};
      net.sum(sent);
      log += cat(sent[0] / 8, sent[1] == 0 ? " " : "! ");
    }
    const auto same = [&] { return net.same_on_all_ranks(io::parameters_sha256(net.module())); };
    log += cat(same(), " ");
    net.eval();
    return log + cat(same());
  });
  const auto all = cat(2 * (n - 1) * model_numbers);
  CHECK(text == cat("0 0 0 0 ", all, " 0 0 0 ", all, " false true"));
}

TEST_CASE("local sgd: a period means optimizer steps, and a mean weighs ranks by their samples") {
  // Rank 0 has no samples: the mean is the other rank's parameters.
  const auto texts = Ranks(2, [](const World& world) {
                       auto communicator = comm::connect(world);
                       LocalSgd<Model> net{make<Model>(), communicator, {.period = 2}, 3};
                       optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
                       for (std::uint32_t number = 0; number < 2; ++number) {
                         optimizer.zero_grad();
                         const Index size = world.rank == 0 ? 0 : 4;
                         {
                           const auto quiet = net.no_sync();
                           cross_entropy(net(numbers(size, 5, 9)), labels(size, 3, 9)).backward();
                         }
                         cross_entropy(net(numbers(size, 5, number)), labels(size, 3, number)).backward();
                         optimizer.step();
                       }
                       const auto before = test::text_of(test::values(net.module()));
                       net(numbers(1, 5, 1));
                       return before + "|" + test::text_of(test::values(net.module()));
                     }).texts();
  const auto before = [](const std::string& text) { return test::numbers_in(text.substr(0, text.find('|'))); };
  const auto after = [](const std::string& text) { return test::numbers_in(text.substr(text.find('|') + 1)); };
  CHECK(distance(before(texts[0]), before(texts[1])) > 1e-3);
  CHECK(after(texts[0]) == after(texts[1]));
  CHECK(after(texts[0]) == before(texts[1]));
}

TEST_CASE("parameter server: its steps are those of one device, with momentum and uneven shares") {
  const optim::SgdOptions sgd{.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01};
  for (const int ranks : {1, 2, 4}) {
    INFO(ranks << " ranks");
    const auto text = common_text(ranks, [&](const World& world) {
      auto communicator = comm::connect(world);
      ParameterServer<Model> net{make<Model>(), communicator, 3};
      return train(net, world, sgd);
    });
    CHECK(distance(test::numbers_in(text), train_alone(sgd)) < rounding);
  }
}

TEST_CASE("parameter server: per step it sends n-1 times the model, each worker once") {
  for (const std::uint64_t n : {2u, 3u}) {
    const auto texts = Ranks(static_cast<int>(n), [](const World& world) {
                         auto communicator = comm::connect(world);
                         ParameterServer<Model> net{make<Model>(), communicator, 3};
                         optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
                         test::step(net, optimizer, 1, 7, world);
                         trace::reset_traffic();
                         test::step(net, optimizer, 2, 7, world);
                         std::size_t state = 0;
                         for (const auto& tensor : optimizer.state())
                           if (tensor.dtype == DType::f64 && static_cast<double*>(tensor.data)[0] != 0) ++state;
                         return cat(trace::bytes_sent(world.rank, Traffic::parameters) / 8, " ",
                                    trace::bytes_sent(world.rank, Traffic::gradients) / 8, " ", state);
                       }).texts();
    CHECK(texts[0] == cat((n - 1) * model_numbers, " 0 6"));
    for (std::size_t worker = 1; worker < n; ++worker) CHECK(texts[worker] == cat("0 ", model_numbers, " 0"));
  }
}

TEST_CASE("parameter server: gradients accumulate over backward passes, batch norm's buffers are the server's") {
  SingleDevice<Model> single{make<Model>(), 3};
  for (std::uint32_t number = 0; number < 3; ++number)
    cross_entropy(single(numbers(7, 5, number)), labels(7, 3, number)).backward();
  const auto texts =
      Ranks(3, [](const World& world) {
        auto communicator = comm::connect(world);
        ParameterServer<Model> net{make<Model>(), communicator, 3};
        for (std::uint32_t number = 0; number < 3; ++number)
          cross_entropy(net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world))
              .backward();
        return test::text_of(test::gradients(net.module()));
      }).texts();
  CHECK(distance(test::numbers_in(texts[0]), test::gradients(single.module())) < rounding);
  CHECK(distance(test::numbers_in(texts[1]), std::vector<double>(model_numbers)) == 0);  // the server's parameters
  const auto buffers = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<test::Normed<Cpu>> net{make<test::Normed<Cpu>>(), communicator, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    for (std::uint32_t number = 0; number < 3; ++number) test::step(net, optimizer, number, 8, world);
    net.eval();
    return test::text_of(net.module().norm.running_mean.value().to_vector());
  });
  CHECK_FALSE(buffers.empty());
}

TEST_CASE("parameter server: gathered() has the server's parameters after the last step") {
  const auto text = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    ParameterServer<Model> net{make<Model>(), communicator, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    test::step(net, optimizer, 0, 7, world);
    std::string whole;
    net.gathered([&](Model& model) { whole = test::text_of(test::values(model)); });
    return whole;
  });
  SingleDevice<Model> single{make<Model>(), 3};
  optim::Sgd optimizer{single.parameters(), {.lr = 0.3}};
  test::step(single, optimizer, 0, 7);
  CHECK(distance(test::numbers_in(text), test::values(single.module())) < rounding);
}

TEST_CASE("policies: a program changes from one to the other by its type") {
  CHECK(distance(test::numbers_in(launched<DistributedDataParallel<Model>>(2)), train_alone({.lr = 0.3})) < rounding);
  CHECK(distance(test::numbers_in(launched<ParameterServer<Model>>(2)), train_alone({.lr = 0.3})) < rounding);
  CHECK(test::numbers_in(launched<LocalSgd<Model>>(2)).size() == model_numbers);
}

}  // namespace averaging_test
