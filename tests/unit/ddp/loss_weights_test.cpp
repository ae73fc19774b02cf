// The weights of gradients: the elements of the loss's mean, however the batch is cut; and refusals.
#include <catch.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_loss_weights_test {

using namespace test::names;
using Model = test::Smooth<Cpu>;
using Labels = Tensor<std::int64_t, 1>;

const Labels& tokens() {
  static const auto all = Labels::from({2, -100, -100, -100, 0, 1, 2, 0, -100, 1}, {10});
  return all;
}

/// The distance of the gradients of `loss_of(net, world)`, equal on all ranks, from one device's.
template <class Loss>
double error_of(int ranks, const Loss& loss_of, const DistributedDataParallelOptions& options = {}) {
  SingleDevice<Model> single{make<Model>(), 3};
  loss_of(single, World{.rank = 0, .size = 1}).backward();
  const auto text = common_text(ranks, [&](const World& world) {
    Distributed<Model> rank(world, options);
    loss_of(rank.net, world).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  const auto got = test::numbers_in(text);
  const auto expected = test::gradients(single.module());
  return got.size() == expected.size() ? distance(got, expected) : 1;
}

TEST_CASE("loss weights: tokens that count, class weights, several losses, plain means and sums by hand") {
  const auto rows = [](const World& world) { return test::share(numbers(10, 5, 1), world); };
  const auto classes = Tensor<double, 1>::from({1, 5, 0.5}, {3});
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks");
    const auto some_tokens = [&](auto& net, const World& world) {
      return cross_entropy(net(rows(world)), test::share(tokens(), world));
    };
    CHECK(error_of(ranks, some_tokens) < rounding);
    CHECK(error_of(ranks, some_tokens, {.find_unused_parameters = true}) < rounding);
    CHECK(error_of(ranks, some_tokens, {.static_graph = true}) < rounding);
    CHECK(error_of(ranks, [&](auto& net, const World& world) {
            return cross_entropy(net(rows(world)), test::share(labels(10, 3, 1), world), classes);
          }) < rounding);
    // A loss over tokens, one over samples, and a penalty, equal on all ranks.
    CHECK(error_of(ranks, [&](auto& net, const World& world) {
            const auto y = net(rows(world));
            return cross_entropy(y, test::share(tokens(), world)) + mean(square(y)) +
                   mean(square(net.module().fc1.weight)) * 0.1;
          }) < rounding);
    // Six losses of three kinds.
    CHECK(error_of(ranks, [&](auto& net, const World& world) {
            const auto y = net(rows(world));
            const auto first = test::share(tokens(), world), second = test::share(labels(10, 3, 1), world);
            return cross_entropy(y, first) + cross_entropy(y, second) + cross_entropy(y, second, classes) +
                   mean(square(y)) + cross_entropy(y * 2.0, first) + cross_entropy(y * 0.5, second, classes);
          }) < rounding);
  }
}

TEST_CASE("loss weights: rows of which none counts on a rank, or on any") {
  const auto nothing_on_rank_0 = Labels::from({-100, -100, -100, 1, 2, 0}, {6});
  const auto nothing = Labels::full({6}, -100);
  for (const auto& all : {nothing_on_rank_0, nothing})
    CHECK(error_of(2, [&](auto& net, const World& world) {
            return cross_entropy(net(test::share(numbers(6, 5, 1), world)), test::share(all, world));
          }) < rounding);
}

TEST_CASE("loss weights: micro-batches under no_sync, each by its own tokens, as on one device") {
  const auto loss_of = [](auto& net, const World& world, std::uint32_t part) {
    const auto x = numbers(10, 5, 1).slice(0, 5 * part, 5 * part + 5);
    const auto y = tokens().slice(0, 5 * part, 5 * part + 5);
    // Both sums are divided by the number of all ranks' tokens.
    double counted = 0;
    for (Index i = 0; i < 10; ++i) counted += tokens().data()[i] >= 0;
    return cross_entropy(net(test::share(x, world)), test::share(y, world), {.mean_over = counted});
  };
  SingleDevice<Model> whole{make<Model>(), 3};
  cross_entropy(whole(numbers(10, 5, 1)), tokens()).backward();
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world);
    {
      const auto quiet = rank.net.no_sync();
      loss_of(rank.net, world, 0).backward();
    }
    loss_of(rank.net, world, 1).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(whole.module())) < rounding);
}

TEST_CASE("loss weights: a ParameterServer counts as DistributedDataParallel does") {
  SingleDevice<Model> single{make<Model>(), 3};
  cross_entropy(single(numbers(10, 5, 1)), tokens()).backward();
  const auto texts = Ranks(2, [&](const World& world) {
                       auto communicator = comm::connect(world);
                       ParameterServer<Model> net{make<Model>(), communicator, 3};
                       cross_entropy(net(test::share(numbers(10, 5, 1), world)), test::share(tokens(), world))
                           .backward();
                       return test::text_of(test::gradients(net.module()));
                     }).texts();
  CHECK(distance(test::numbers_in(texts[0]), test::gradients(single.module())) < rounding);
}

TEST_CASE("loss weights: a pass through module() is averaged by its loss, or refused") {
  SingleDevice<Model> single{make<Model>(), 3};
  mean(square(single(numbers(7, 5, 1)))).backward();
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world);
    mean(square(rank.net.module()(test::share(numbers(7, 5, 1), world)))).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);

  const auto refused = Ranks(2, [&](const World& world) {
                         Distributed<Model> rank(world);
                         return message_of<UsageError>([&] {
                           const auto y = rank.net.module()(test::share(numbers(10, 5, 1), world));
                           (cross_entropy(y, test::share(tokens(), world)) + mean(square(y))).backward();
                         });
                       }).texts();
  for (const auto& message : refused) CHECK_THAT(message, Contains("call the net, not its module()"));

  const auto by_server = Ranks(2, [&](const World& world) {
                           auto communicator = comm::connect(world);
                           ParameterServer<Model> net{make<Model>(), communicator, 3};
                           return message_of<UsageError>(
                               [&] { mean(square(net.module()(test::share(numbers(7, 5, 1), world)))).backward(); });
                         }).texts();
  for (const auto& message : by_server) CHECK_THAT(message, Contains("so that workers fetch the parameters"));
}

TEST_CASE("loss weights: a backward pass that throws leaves its weights to nobody") {
  SingleDevice<Model> single{make<Model>(), 3};
  cross_entropy(single(numbers(10, 5, 1)), tokens()).backward();
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world);
    const auto x = test::share(numbers(10, 5, 1), world);
    {
      const auto quiet = rank.net.no_sync();
      const auto y = rank.net(x);
      y.register_hook([](const Tensor<double, 2>&) { fail<Error>("broken"); });
      CHECK(message_of<Error>([&] { mean(square(y)).backward(); }) == "broken");
    }
    optim::Sgd(rank.net.parameters(), {.lr = 1}).zero_grad();
    cross_entropy(rank.net.module()(x), test::share(tokens(), world)).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
}

TEST_CASE("loss weights: a step with gradients that were never averaged is refused") {
  const auto refusal = [](auto& net, const World& world) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    {
      const auto quiet = net.no_sync();
      mean(square(net(test::share(numbers(6, 5, 1), world)))).backward();
    }
    auto text = message_of<UsageError>([&] { optimizer.step(); });
    optimizer.zero_grad();
    mean(square(net(test::share(numbers(6, 5, 1), world)))).backward();
    optimizer.step();
    return text;
  };
  const auto texts = Ranks(2, [&](const World& world) {
                       Distributed<Model> rank(world);
                       return refusal(rank.net, world);
                     }).texts();
  const auto of_server = Ranks(2, [&](const World& world) {
                           auto communicator = comm::connect(world);
                           ParameterServer<Model> net{make<Model>(), communicator, 3};
                           return refusal(net, world);
                         }).texts();
  for (const auto& all : {texts, of_server})
    for (const auto& message : all) CHECK_THAT(message, Contains("was accumulated under no_sync and never averaged"));
}

}  // namespace ddp_loss_weights_test
