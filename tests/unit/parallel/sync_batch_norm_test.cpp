// SyncBatchNorm: with the whole batch's statistics all policies take the steps of one device.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "ranks.hpp"

namespace sync_batch_norm_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using comm::World;
using test::common_text;
using test::distance;
using test::Distributed;
using test::make;
using test::numbers;

constexpr double rounding = 1e-12;

/// Two synchronised layers, over 3 channels of 4 numbers and over 4 channels of 1.
template <class D>
struct Synced : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 4}, fc3{4, 3};
  nn::SyncBatchNorm<D, double> first{3}, second{4};
  CHORUS_MODULE(Synced, fc1, first, fc2, second, fc3)
  auto forward(const auto& x) const {
    const auto h = first(reshape(fc1(x), std::array<Index, 3>{-1, 3, 4}));
    return fc3(tanh(second(fc2(tanh(flatten(h))))));
  }
};

/// A train of global batches: shares of three ranks are even, uneven, and empty.
constexpr Index batches[] = {12, 7, 2, 5, 9};

template <class Net, class Step>
std::vector<double> train(Net& net, const Step& step) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.2, .momentum = 0.9}};
  std::uint32_t number = 0;
  for (const Index size : batches) step(net, optimizer, number++, size);
  auto out = test::values(net.module());
  for (const auto& named : nn::named_buffers<Cpu>(net.module()))
    if (named.buffer->dtype() == DType::f64)
      for (Index i = 0; i < named.buffer->count(); ++i) out.push_back(static_cast<double*>(named.buffer->data())[i]);
  return out;
}

template <class Model>
std::vector<double> train_alone(Model model = make<Model>()) {
  SingleDevice<Model> net{std::move(model), 3};
  return train(net, [](auto& n, auto& optimizer, auto number, Index size) { test::step(n, optimizer, number, size); });
}

template <class Model>
std::string train_on_ranks(int ranks, const std::function<Model()>& make_model) {
  return common_text(ranks, [&](const World& world) {
    Distributed<Model> rank(world, {}, make_model());
    return test::text_of(train(rank.net, [&](auto& n, auto& optimizer, auto number, Index size) {
      test::step(n, optimizer, number, size, world);
    }));
  });
}

/// Has a synchronised layer on the way of samples whose first number is positive.
template <class D>
struct Sometimes : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  nn::SyncBatchNorm<D, double> norm{3};
  CHORUS_MODULE(Sometimes, fc, norm)
  auto forward(const auto& x) const {
    const auto y = fc(x);
    check<UsageError>(value_of(x)(0, 0) < 2, "a two is too much");
    return value_of(x)(0, 0) > 0 ? norm(y) : y;
  }
};

TEST_CASE("sync batch norm: ddp takes the steps of one device, with even, uneven and empty shares") {
  const auto expected = train_alone<Synced<Cpu>>();
  for (const int ranks : {1, 2, 3, 4}) {
    const auto text = train_on_ranks<Synced<Cpu>>(ranks, [] { return make<Synced<Cpu>>(); });
    INFO(ranks << " ranks: " << text);
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

TEST_CASE("sync batch norm: dp takes the steps of one device") {
  const auto expected = train_alone<Synced<Cpu>>();
  for (const std::vector<int>& ids : {std::vector<int>{0, 1}, {0, 1, 2}, {0, 0}}) {
    DataParallel<Synced<Cpu>> net{make<Synced<Cpu>>(), {.device_ids = ids}, 3};
    const auto got =
        train(net, [](auto& n, auto& optimizer, auto number, Index size) { test::step(n, optimizer, number, size); });
    CHECK(distance(got, expected) < rounding);
  }
}

TEST_CASE("sync batch norm: convert_sync_batch_norm makes it of BatchNorm") {
  const auto expected = train_alone<test::Normed<Cpu>>();
  const auto text =
      train_on_ranks<test::Normed<Cpu>>(3, [] { return nn::convert_sync_batch_norm(make<test::Normed<Cpu>>()); });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
  const auto plain = train_on_ranks<test::Normed<Cpu>>(3, [] { return make<test::Normed<Cpu>>(); });
  CHECK(distance(test::numbers_in(plain), expected) > 1e-4);  // statistics of shares are others
  CHECK(nn::convert_sync_batch_norm(nn::BatchNorm<Cpu>{4}).describe() == "SyncBatchNorm(4)");
}

TEST_CASE("sync batch norm: accumulating under no_sync weighs each micro-batch by its own sizes") {
  const auto pass = [](auto& net, std::uint32_t number, Index size, const auto& cut) {
    cross_entropy(net(cut(numbers(size, 5, number))), cut(test::labels(size, 3, number))).backward();
  };
  SingleDevice<Synced<Cpu>> single{make<Synced<Cpu>>(), 3};
  pass(single, 1, 7, [](const auto& x) { return x; });
  pass(single, 2, 5, [](const auto& x) { return x; });
  const auto text = common_text(3, [&](const World& world) {
    Distributed<Synced<Cpu>> rank(world);
    const auto cut = [&](const auto& x) { return test::share(x, world); };
    {
      const auto quiet = rank.net.no_sync();
      pass(rank.net, 1, 7, cut);
    }
    pass(rank.net, 2, 5, cut);
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
}

TEST_CASE("sync batch norm: sends 2 channels + 1 numbers forward and 2 channels back, nothing in evaluation") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Synced<Cpu>> rank(world, {.broadcast_buffers = false});
    const auto x = test::share(numbers(8, 5, 1), world);
    const auto first = rank.net(x);
    first.backward(numbers(4, 3, 1));
    trace::reset_traffic();
    const auto y = rank.net(x);
    const auto forward = trace::bytes_sent(world.rank, trace::Traffic::control) - sizeof(std::int64_t);
    trace::reset_traffic();
    y.backward(numbers(4, 3, 1));
    const auto back = trace::bytes_sent(world.rank, trace::Traffic::control);
    rank.net.eval();
    trace::reset_traffic();
    const NoGrad no_grad;
    rank.net(x);
    return cat(forward, " ", back, " ", trace::bytes_sent(world.rank));
  });
  // Two layers, of 3 and of 4 channels; a ring of two sends as many numbers as there are.
  CHECK(text == cat((7 + 9) * 8, " ", (6 + 8) * 8, " 0"));
}

TEST_CASE("sync batch norm: one number a channel in the whole batch is refused on all ranks") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Synced<Cpu>> rank(world);
    return test::message_of<ShapeError>([&] { rank.net(numbers(1 - world.rank, 5, 1)); }).substr(0, 90);
  });
  CHECK(text == "sync_batch_norm: training needs more than one value per channel, got one in the batches of");
}

TEST_CASE("sync batch norm: under dp a copy without the layer, or that fails, ends the others") {
  DataParallel<Sometimes<Cpu>> net{make<Sometimes<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  auto x = Tensor<double, 2>::full({6, 5}, 0.5);
  net(x).backward(numbers(6, 3, 1));
  x(3, 0) = 0.25;
  x(2, 0) = -1;  // the second device's first sample
  CHECK_THAT(test::message_of<UsageError>([&] { net(x); }), Contains("another device's copy of the model ended"));
  x(2, 0) = 3;
  CHECK_THAT(test::message_of<UsageError>([&] { net(x); }), Contains("replica"));
  x(2, 0) = 0.5;
  net(x).backward(numbers(6, 3, 1));
}

TEST_CASE("sync batch norm: under dp a recorded pass has the whole batch's statistics, and refuses gradients by name") {
  SingleDevice<Synced<Cpu>> single{make<Synced<Cpu>>(), 3};
  DataParallel<Synced<Cpu>> net{make<Synced<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const GraphVariable x(numbers(7, 5, 1), true);
  const auto y = net(x);
  CHECK(distance(y.value().to_vector(), single(numbers(7, 5, 1)).value().to_vector()) < rounding);
  const auto refused = Contains("SyncBatchNorm under DataParallel: no gradient goes through it in a recorded");
  CHECK_THAT(test::message_of<UsageError>([&] { grad(sum(y), x, {.retain_graph = true}); }), refused);
  CHECK_THAT(test::message_of<UsageError>([&] { grad(sum(y), x, {.create_graph = true}); }),
             Contains("'sync_batch_norm' has no derivative"));
  CHECK_THAT(test::message_of<UsageError>([&] { sum(y).backward(); }), refused);
  // Passes that are not recorded go on as ever, and recorded ones in evaluation.
  const auto step = [](auto& policy) {
    for (const auto& named : policy.parameters()) named.parameter->set_grad_arrived(false);
    policy(numbers(7, 5, 2)).backward(numbers(7, 3, 3));
    return test::gradients(policy.module());
  };
  CHECK(distance(step(net), step(single)) < rounding);
  net.eval();
  single.eval();
  const auto slope = [&](auto& policy) { return grad(sum(square(policy(x))), x, {.create_graph = true}); };
  CHECK(distance(slope(net).value().to_vector(), slope(single).value().to_vector()) < rounding);
}

}  // namespace sync_batch_norm_test
