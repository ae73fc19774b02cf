// A whole net inside of `checkpoint`: recomputation in backward draws the same random numbers as the first pass.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include <unit/parallel/ranks.hpp>

namespace checkpointed_net_test {

using namespace test::names;

using Model = test::Dropping<Cpu>;

enum class Way { plain, checkpointed, twice };

/// Three steps of two forward passes each; returns parameters, and the number of passes.
template <class Net>
std::vector<double> train(Net& net, Way way, const World& world = {}) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  const auto once = [&](const auto& x) {
    return way == Way::plain ? net(x) : checkpoint([&](const auto& in) { return net(in); }, x);
  };
  for (std::uint32_t number = 0; number < 3; ++number) {
    const auto x = test::share(numbers(8, 5, number), world), more = test::share(numbers(8, 5, number + 9), world);
    optimizer.zero_grad();
    const auto both = [&](const auto& in) { return mean(square(once(in))) + mean(square(once(more))) * 2.0; };
    (way == Way::twice ? checkpoint(both, x) : both(x)).backward();
    optimizer.step();
  }
  auto out = test::values(net.module());
  out.push_back(net.forward_passes());
  return out;
}

TEST_CASE("a net inside of a checkpoint: one device draws the same numbers again") {
  SingleDevice<Model> plain{make<Model>(), 3}, checkpointed{make<Model>(), 3}, twice{make<Model>(), 3};
  const auto expected = train(plain, Way::plain);
  CHECK(expected.back() == 6);
  CHECK(distance(train(checkpointed, Way::checkpointed), expected) < rounding);
  CHECK(distance(train(twice, Way::twice), expected) < rounding);
}

TEST_CASE("a net inside of a checkpoint: copies on several devices draw the same numbers again") {
  SingleDevice<Model> single{make<Model>(), 3};
  const auto expected = train(single, Way::plain);
  for (const auto way : {Way::plain, Way::checkpointed, Way::twice}) {
    DataParallel<Model> net{make<Model>(), {.device_ids = {0, 1, 2}}, 3};
    CHECK(distance(train(net, way), expected) < rounding);
  }
}

/// Layers that a call may skip, share, or use twice.
template <class D>
struct Varied : nn::Module {
  nn::Linear<D, double> first{5, 7}, a{7, 7}, b{7, 7}, last{7, 3};
  bool again = true;
  CHORUS_MODULE(Varied, first, a, b, last)
  auto forward(const auto& x, int use) const {
    const auto part = [&](const auto& f, const auto& h) { return again ? checkpoint(f, h) : f(h); };
    const auto one = [this](const auto& h) { return tanh(a(h)); };
    const auto other = [this](const auto& h) { return tanh(b(h)); };
    const auto both = [this](const auto& h) { return tanh(a(tanh(b(h)))); };
    auto h = tanh(first(x));
    if (use == 0) h = part(both, h);
    if (use == 1) h = part(one, part(one, h));
    if (use == 2) h = part(other, h);
    if (use == 3) h = part(both, part(one, h));
    return last(h);
  }
};

TEST_CASE("ddp: parts in checkpoints that use other layers on each rank and in each step, with weights shared") {
  constexpr int uses[][2] = {{0, 0}, {1, 2}, {3, 1}, {4, 0}, {2, 2}, {1, 3}};
  const double cap = GENERATE(0.0, 25.0);
  const auto train = [&](auto& net, const auto& backward) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      backward(numbers(7, 5, step), uses[step]);
      optimizer.step();
    }
    return test::values(net.module());
  };
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Varied<Cpu>> rank(world,
                                  {.first_bucket_cap_mb = cap, .bucket_cap_mb = cap, .find_unused_parameters = true});
    return test::text_of(train(rank.net, [&](const auto& x, const int* use) {
      mean(square(rank.net(contiguous(test::share(x, world)), use[world.rank]))).backward();
    }));
  });
  SingleDevice<Varied<Cpu>> single{make<Varied<Cpu>>(), 3};
  single.module().again = false;
  const auto expected = train(single, [&](const auto& x, const int* use) {
    for (int rank = 0; rank < 2; ++rank) {
      const auto rows = contiguous(x.slice(0, rank == 0 ? 0 : 4, rank == 0 ? 4 : 7));
      (mean(square(single(rows, use[rank]))) * (static_cast<double>(rows.size(0)) / 7)).backward();
    }
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("a net inside of a checkpoint: synchronised batch norm counts each batch once") {
  using Normed = test::Synced<Cpu>;
  const auto statistics = [](auto& net, Way way, const World& world = {}) {
    train(net, way, world);
    return net.module().norm.running_stats();
  };
  SingleDevice<Normed> plain{make<Normed>(), 3}, checkpointed{make<Normed>(), 3}, twice{make<Normed>(), 3};
  const auto expected = statistics(plain, Way::plain);
  CHECK(expected[0] == 6);
  CHECK(distance(statistics(checkpointed, Way::checkpointed), expected) < rounding);
  CHECK(distance(statistics(twice, Way::twice), expected) < rounding);
  DataParallel<Normed> copies{make<Normed>(), {.device_ids = {0, 1, 2}}, 3};
  CHECK(distance(statistics(copies, Way::checkpointed), expected) < rounding);
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Normed> rank(world);
    return test::text_of(statistics(rank.net, Way::checkpointed, world));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("a net inside of a checkpoint: ranks draw the same numbers again") {
  SingleDevice<Model> single{make<Model>(), 3};
  const auto expected = train(single, Way::plain);
  for (const auto way : {Way::plain, Way::checkpointed}) {
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Model> rank(world);
      return test::text_of(train(rank.net, way, world));
    });
    INFO(text);
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

}  // namespace checkpointed_net_test
