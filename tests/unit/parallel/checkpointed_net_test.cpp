// A whole net inside of `checkpoint`: what is computed again in backward draws the numbers that were drawn at first.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "ranks.hpp"

namespace checkpointed_net_test {

using namespace test::names;

using Model = test::Dropping<Cpu>;

enum class Way { plain, checkpointed, twice };

/// Three steps of two forward passes each; parameters, and passes counted.
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
