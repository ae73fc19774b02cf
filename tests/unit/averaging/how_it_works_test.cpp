// How the other ways to average work: LocalSgd averages parameters, a ParameterServer steps for all.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include <unit/parallel/ranks.hpp>

namespace averaging_how_it_works_test {

using namespace test::names;
using Model = test::Smooth<Cpu>;
constexpr double model_bytes = 111 * 8;

TEST_CASE("how local sgd works: each rank steps by itself, and after every period all take the mean") {
  const auto texts = Ranks(2, [](const World& world) {
                       auto communicator = comm::connect(world);
                       LocalSgd<Model> net{make<Model>(), communicator, {.period = 2}, 3};
                       optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
                       test::step(net, optimizer, 0, 8, world);
                       test::step(net, optimizer, 1, 8, world);
                       const auto own = test::text_of(test::values(net.module()));
                       net.eval();  // all ranks call it
                       return own + "|" + test::text_of(test::values(net.module()));
                     }).texts();
  std::vector<std::vector<double>> own, mean;
  for (const auto& text : texts) {
    own.push_back(test::numbers_in(text.substr(0, text.find('|'))));
    mean.push_back(test::numbers_in(text.substr(text.find('|') + 1)));
  }
  CHECK(own[0] != own[1]);
  CHECK(mean[0] == mean[1]);
  for (std::size_t i = 0; i < own[0].size(); ++i) CHECK(std::abs(mean[0][i] - (own[0][i] + own[1][i]) / 2) < rounding);
}

TEST_CASE("how a parameter server works: workers push gradients, rank 0 steps, and they pull its parameters") {
  const auto texts = Ranks(3, [](const World& world) {
                       auto communicator = comm::connect(world);
                       ParameterServer<Model> net{make<Model>(), communicator, 3};
                       optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
                       test::step(net, optimizer, 0, 6, world);
                       net.eval();
                       trace::reset_traffic();
                       test::step(net, optimizer, 1, 6, world);  // pushes
                       net.eval();                               // pulls
                       return cat(trace::bytes_sent(world.rank, trace::Traffic::gradients), " ",
                                  trace::bytes_sent(world.rank, trace::Traffic::parameters), " ",
                                  test::text_of(test::values(net.module())));
                     }).texts();
  std::vector<std::vector<double>> all;
  for (const auto& text : texts) all.push_back(test::numbers_in(text));
  // The server receives from each worker, and sends to each of two workers.
  CHECK(std::vector(all[0].begin(), all[0].begin() + 2) == std::vector{0.0, 2 * model_bytes});
  CHECK(std::vector(all[1].begin(), all[1].begin() + 2) == std::vector{model_bytes, 0.0});
  CHECK(std::equal(all[0].begin() + 2, all[0].end(), all[2].begin() + 2, all[2].end()));
  SingleDevice<Model> single{make<Model>(), 3};
  optim::Sgd optimizer{single.parameters(), {.lr = 0.3}};
  for (std::uint32_t number = 0; number < 2; ++number) test::step(single, optimizer, number, 6);
  CHECK(distance({all[1].begin() + 2, all[1].end()}, test::values(single.module())) < rounding);
}

}  // namespace averaging_how_it_works_test
