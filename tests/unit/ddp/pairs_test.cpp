// Pairs: two nets on one communicator, in one backward pass or alternating; two optimizers of one net.
#include <catch.hpp>
#include <chorus/parallel/fused_optimizer.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_pairs_test {

using namespace test::names;
using Sgd = optim::Sgd<Cpu>;

/// Two branches; a pass takes either or both. All layers have the same size, so that buckets could be mixed up.
template <class D>
struct Branches : nn::Module {
  nn::Linear<D, double> first{5, 5}, a{5, 5}, b{5, 5}, last{5, 5};
  CHORUS_MODULE(Branches, first, a, b, last)
  auto forward(const auto& x, int branch) const {
    const auto h = tanh(first(x));
    if (branch == 0) return last(tanh(a(h)));
    if (branch == 1) return last(tanh(b(h)));
    return last(tanh(a(h)) + tanh(b(h)));
  }
};
using Model = Branches<Cpu>;

/// Trains G and D with a loss through both. Returns the parameters of both.
template <class Net, class Part>
std::string trained(Net& g, Net& d, int steps, const Part& part, const auto& branch) {
  Sgd optimizer_g{g.parameters(), {.lr = 0.3, .momentum = 0.9}}, optimizer_d{d.parameters(), {.lr = 0.2}};
  for (int step = 0; step < steps; ++step) {
    optimizer_g.zero_grad();
    optimizer_d.zero_grad();
    const auto x = part(numbers(8, 5, static_cast<std::uint32_t>(step)));
    mean(square(d(g(x, branch(step, 0)), branch(step, 1)))).backward();
    optimizer_g.step();
    optimizer_d.step();
  }
  return test::text_of(test::values(g.module())) + test::text_of(test::values(d.module()));
}
std::string alone(int steps, const auto& branch) {
  SingleDevice<Model> g{make<Model>(1), 3}, d{make<Model>(2), 3};
  return trained(
      g, d, steps, [](const auto& x) { return x; }, branch);
}
std::vector<std::string> on_ranks(const DistributedDataParallelOptions& options, int steps, const auto& branch_of) {
  return Ranks(2,
               [&](const World& world) {
                 auto communicator = comm::connect(world);
                 using Net = DistributedDataParallel<Model>;
                 Net g{make<Model>(1), communicator, options, 3}, d{make<Model>(2), communicator, options, 3};
                 return trained(
                     g, d, steps, [&](const auto& x) { return test::share(x, world); }, branch_of(world.rank));
               })
      .texts();
}

TEST_CASE("ddp pairs: a loss that goes through two nets over one communicator") {
  const auto both = [](int, int) { return 2; };
  const auto expected = test::numbers_in(alone(4, both));
  for (const double cap : {0.0, 1.0}) {
    const auto texts = on_ranks({.first_bucket_cap_mb = cap, .bucket_cap_mb = cap}, 4, [&](int) { return both; });
    CHECK(distance(test::numbers_in(texts[0]), expected) < rounding);
    CHECK(texts[0] == texts[1]);
  }
}

TEST_CASE("ddp pairs: where ranks use other parameters of the nets, none gets the other net's gradients") {
  // Rank r uses branch r of a net; one device sends each half of the batch through its branch.
  for (const bool first_differs : {false, true}) {
    SingleDevice<Model> g{make<Model>(1), 3}, d{make<Model>(2), 3};
    Sgd optimizer_g{g.parameters(), {.lr = 0.3, .momentum = 0.9}}, optimizer_d{d.parameters(), {.lr = 0.2}};
    for (int step = 0; step < 3; ++step) {
      optimizer_g.zero_grad();
      optimizer_d.zero_grad();
      for (const int rank : {0, 1}) {
        const auto x = contiguous(numbers(8, 5, static_cast<std::uint32_t>(step)).slice(0, 4 * rank, 4 * rank + 4));
        (mean(square(d(g(x, first_differs ? rank : 2), first_differs ? 2 : rank))) * 0.5).backward();
      }
      optimizer_g.step();
      optimizer_d.step();
    }
    auto expected = test::values(g.module());
    const auto second = test::values(d.module());
    expected.insert(expected.end(), second.begin(), second.end());
    for (const double cap : {0.0, 1.0})
      for (const bool is_static : {false, true}) {
        INFO("cap " << cap << ", first differs " << first_differs << ", static " << is_static);
        const auto texts =
            on_ranks({.first_bucket_cap_mb = cap,
                      .bucket_cap_mb = cap,
                      .find_unused_parameters = !is_static,
                      .static_graph = is_static},
                     3, [=](int rank) { return [=](int, int net) { return (net == 0) == first_differs ? rank : 2; }; });
        CHECK(texts[0] == texts[1]);
        CHECK(distance(test::numbers_in(texts[0]), expected) < rounding);
      }
  }
}

/// Uses whole-batch statistics before branches that ranks choose.
template <class D>
struct NormedBranches : nn::Module {
  nn::Linear<D, double> first{5, 5}, a{5, 5}, b{5, 5}, last{5, 10};
  nn::SyncBatchNorm<D, double> norm{5};
  CHORUS_MODULE(NormedBranches, first, norm, a, b, last)
  auto forward(const auto& x, int branch) const {
    const auto h = norm(first(x));
    if (branch == 0) return last(tanh(a(h)));
    if (branch == 1) return last(tanh(b(h)));
    const auto half = h.size(0) / 2;
    return last(concat(0, tanh(a(slice(h, 0, 0, half))), tanh(b(slice(h, 0, half, h.size(0))))));
  }
};
TEST_CASE("ddp pairs: buckets and SyncBatchNorm's sums take turns where ranks use different parameters") {
  using Normed = NormedBranches<Cpu>;
  const auto train = [](auto& net, const auto& part, int branch) {
    Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      mean(square(net(part(numbers(8, 5, step)), branch))).backward();
      optimizer.step();
    }
    return test::text_of(test::values(net.module()));
  };
  SingleDevice<Normed> single{make<Normed>(), 3};
  const auto expected = train(
      single, [](const auto& x) { return x; }, 2);
  for (const bool is_static : {false, true}) {
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Normed> rank(world, {.first_bucket_cap_mb = 0,
                                       .bucket_cap_mb = 0,
                                       .find_unused_parameters = !is_static,
                                       .static_graph = is_static});
      return train(
          rank.net, [&](const auto& x) { return test::share(x, world); }, world.rank);
    });
    CHECK(distance(test::numbers_in(text), test::numbers_in(expected)) < rounding);
  }
}

TEST_CASE("ddp pairs: a net whose pass broke off, and that another thread destroys, leaves nothing behind") {
  const int communicator = 0;
  std::optional<ddp::SendingOrder> broken_off(std::in_place), next(std::in_place);
  broken_off->begin(&communicator, true, false);
  next->begin(&communicator, false, false);
  CHECK(next->waits());
  next->end();
  std::thread([&] { broken_off.reset(); }).join();
  next->begin(&communicator, false, false);
  CHECK(!next->waits());
}

TEST_CASE("ddp pairs: of two optimizers that step in backward the second one is refused, until the first has gone") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    auto optimizer = std::make_unique<FusedOptimizer<Sgd>>(rank.net, optim::SgdOptions{.lr = 0.3});
    const auto refused = message_of<UsageError>(
        [&] { optimizer = std::make_unique<FusedOptimizer<Sgd>>(rank.net, optim::SgdOptions{.lr = 0.1}); });
    optimizer.reset();
    optimizer = std::make_unique<FusedOptimizer<Sgd>>(rank.net, optim::SgdOptions{.lr = 0.1});
    const auto before = test::values(rank.net.module());
    optimizer->zero_grad();
    cross_entropy(rank.net(numbers(4, 5, 1)), labels(4, 3, 1)).backward();
    return refused + (distance(test::values(rank.net.module()), before) > 0 ? ", then it steps" : ", and never steps");
  });
  CHECK(text ==
        "DistributedDataParallel: another optimizer steps this net in backward: destroy it first, then it steps");
}

}  // namespace ddp_pairs_test
