// Ranks whose weights in the average vary between steps, down to 0: residuals of communication hooks, accumulation
// under no_sync, and loss terms without samples.
#include <catch.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/hooks/quantize.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <cmath>

#include <unit/parallel/ranks.hpp>

namespace ddp_uneven_test {

using namespace test::names;
using test::length;

using Model = test::Wide<Cpu>;
/// Its numbers are one block of Quantize8Bit.
template <class D>
struct One : nn::Module {
  nn::Linear<D, double> fc{20, 16};
  CHORUS_MODULE(One, fc)
  auto forward(const auto& x) const { return fc(x); }
};

/// The backward pass of a rank with `rows` rows, the same in each step; gradients are means over rows.
template <class Net>
void pass(Net& net, int rank, Index rows, double factor = 1) {
  const auto key = static_cast<std::uint32_t>(rank);
  const auto y = net(numbers(rows, 20, 1 + key)) * (rows == 0 ? 0 : factor / static_cast<double>(rows));
  y.backward(numbers(rows, 16, 101 + key));
}

/// The relative difference between the sum of the averages over `steps` steps and its exact value; rank r has
/// `rows[step % rows.size()][r]` rows.
template <class Hook>
double not_sent(const Hook& hook, const std::vector<std::array<Index, 2>>& rows, int steps = 40) {
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model, Hook> rank(world, {}, make<Model>(), hook);
    std::vector<double> sum;
    for (int step = 0; step < steps; ++step) {
      for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
      pass(rank.net, world.rank,
           rows[static_cast<std::size_t>(step) % rows.size()][static_cast<std::size_t>(world.rank)]);
      const auto seen = test::gradients(rank.net.module());
      sum.resize(seen.size());
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += seen[i];
    }
    return test::text_of(sum);
  });
  SingleDevice<Model> net{make<Model>(), 3};
  for (int step = 0; step < steps; ++step) {
    const auto [first, second] = rows[static_cast<std::size_t>(step) % rows.size()];
    const auto all = static_cast<double>(first + second);
    pass(net, 0, first, static_cast<double>(first) / all);
    pass(net, 1, second, static_cast<double>(second) / all);
  }
  const auto expected = test::gradients(net.module());
  auto difference = test::numbers_in(text);
  REQUIRE(difference.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) difference[i] -= expected[i];
  return length(difference) / length(expected);
}

TEST_CASE("hooks: what is left for the next step counts as it was weighed, whatever shares ranks have by then") {
  const std::vector<std::array<Index, 2>> even{{4, 4}}, empty{{4, 0}, {4, 4}}, uneven{{4, 4}, {1, 7}};
  for (const auto& rows : {even, empty, uneven}) {
    INFO(rows.back()[0] << " and " << rows.back()[1] << " rows, after " << rows[0][0] << " and " << rows[0][1]);
    CHECK(not_sent(PowerSgd{}, rows) < 0.2);
    CHECK(not_sent(Quantize8Bit{}, rows) < 0.0005);
    CHECK(not_sent(Bf16Compress{}, rows) < 0.003);  // sums are rounded, too
  }
}

TEST_CASE("quantise: a NaN anywhere in a block is seen by all ranks, and is not remembered") {
  for (const Index at : {0, 3, 15}) {
    const auto text = common_text(2, [=](const World& world) {
      Distributed<One<Cpu>, Quantize8Bit> rank(world, {}, make<One<Cpu>>());
      std::string seen;
      for (int step = 0; step < 4; ++step) {
        for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
        auto seed = numbers(4, 16, 101);
        if (step == 1 && world.rank == 1) seed.data()[at] = NAN;
        rank.net(numbers(4, 20, 1)).backward(seed);
        bool finite = true;
        for (const double x : test::gradients(rank.net.module())) finite = finite && std::isfinite(x);
        seen += finite ? "finite " : "not ";
      }
      return seen;
    });
    CHECK(text == "finite not finite finite ");
  }
}

TEST_CASE("no_sync under hooks that leave each rank its own gradients adds them up as they are") {
  const auto check = [](auto hook) {
    const auto texts = Ranks(2, [&](const World& world) {
                         Distributed<Model, decltype(hook)> rank(world, {}, make<Model>(), hook);
                         {
                           const auto quiet = rank.net.no_sync();
                           pass(rank.net, world.rank, world.rank == 0 ? 9 : 1);
                         }
                         pass(rank.net, world.rank, world.rank == 0 ? 1 : 9);
                         return test::text_of(test::gradients(rank.net.module()));
                       }).texts();
    for (int rank = 0; rank < 2; ++rank) {
      SingleDevice<Model> net{make<Model>(), 3};
      pass(net, rank, 9);
      pass(net, rank, 1);
      CHECK(distance(test::numbers_in(texts[static_cast<std::size_t>(rank)]), test::gradients(net.module())) <
            rounding);
    }
  };
  check(NoCommunication{});
  check(PostLocalSgd{.start_local_sgd_iter = 0, .period = 10});
}

/// The loss of `rows` rows, with a term without samples.
template <class Net>
auto penalised(Net& net, Index rows, std::uint32_t key) {
  const auto y = net(numbers(rows, 20, key));
  return mse_loss(y, Tensor<double, 2>::zeros(value_of(y).shape())) + sum(square(net.module().fc2.weight));
}

TEST_CASE("a rank without samples adds nothing of a penalty either: under no_sync, and as a server") {
  // In two passes each rank has one without samples, or the first rank has two.
  const std::vector<std::array<Index, 2>> plans[] = {
      {{4, 4}, {0, 4}}, {{0, 4}, {4, 4}}, {{4, 0}, {0, 4}}, {{0, 4}, {0, 4}}, {{4, 4}, {4, 4}}};
  for (const auto& rows : plans) {
    INFO(rows[0][0] << " and " << rows[0][1] << " rows, then " << rows[1][0] << " and " << rows[1][1]);
    SingleDevice<Model> net{make<Model>(), 3};
    for (std::uint32_t number = 0; number < 2; ++number)
      for (std::uint32_t rank = 0; rank < 2; ++rank)
        if (const auto mine = rows[number][rank]; mine > 0)
          (penalised(net, mine, 10 * number + rank) *
           (static_cast<double>(mine) / static_cast<double>(rows[number][0] + rows[number][1])))
              .backward();
    const auto expected = test::gradients(net.module());
    const auto loss = [&rows](auto& policy, std::uint32_t number, const World& world) {
      return penalised(policy, rows[number][static_cast<std::size_t>(world.rank)],
                       10 * number + static_cast<std::uint32_t>(world.rank));
    };
    for (const bool find_unused : {false, true}) {
      const auto text = common_text(2, [&](const World& world) {
        Distributed<Model> rank(world, {.find_unused_parameters = find_unused});
        {
          const auto quiet = rank.net.no_sync();
          loss(rank.net, 0, world).backward();
        }
        loss(rank.net, 1, world).backward();
        return test::text_of(test::gradients(rank.net.module()));
      });
      CHECK(distance(test::numbers_in(text), expected) < rounding);
    }
    const auto texts = Ranks(2, [&](const World& world) {
                         auto communicator = comm::connect(world);
                         ParameterServer<Model> policy{make<Model>(), communicator, 3};
                         for (std::uint32_t number = 0; number < 2; ++number) loss(policy, number, world).backward();
                         return world.rank == 0 ? test::text_of(test::gradients(policy.module())) : "";
                       }).texts();
    CHECK(distance(test::numbers_in(texts[0]), expected) < rounding);
  }
}

}  // namespace ddp_uneven_test
