// SyncBatchNorm: with the whole batch's statistics all policies take the steps of one device.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "ranks.hpp"

namespace sync_batch_norm_test {

using namespace test::names;

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

/// A sequence of global batches: the shares of three ranks are even, uneven, and empty.
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

/// Uses a synchronised layer only for samples whose first number is positive.
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

/// Two inputs, each of which goes through the synchronised layer.
template <class D>
struct Beside : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  nn::SyncBatchNorm<D, double> norm{3};
  CHORUS_MODULE(Beside, fc, norm)
  auto forward(const auto& x, const auto& other) const { return norm(fc(x)) + norm(fc(other)); }
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

/// Layers without weights, without running statistics, and with cumulative running means.
template <class D>
struct Unusual : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 4}, fc3{4, 3};
  nn::SyncBatchNorm<D, double> first{3, {.momentum = {}, .affine = false}}, second{4, {.track_running_stats = false}};
  CHORUS_MODULE(Unusual, fc1, first, fc2, second, fc3)
  auto forward(const auto& x) const {
    const auto h = first(reshape(fc1(x), std::array<Index, 3>{-1, 3, 4}));
    return fc3(tanh(second(fc2(tanh(flatten(h))))));
  }
};

TEST_CASE("sync batch norm: without weights, running statistics or momentum, too") {
  const auto expected = train_alone<Unusual<Cpu>>();
  for (const int ranks : {2, 3}) {
    const auto text = train_on_ranks<Unusual<Cpu>>(ranks, [] { return make<Unusual<Cpu>>(); });
    INFO(ranks << " ranks: " << text);
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
  DataParallel<Unusual<Cpu>> net{make<Unusual<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const auto got =
      train(net, [](auto& n, auto& optimizer, auto number, Index size) { test::step(n, optimizer, number, size); });
  CHECK(distance(got, expected) < rounding);
}

/// With cumulative running means over batches, some of which have no samples.
template <class D>
struct Cumulative : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 3};
  nn::SyncBatchNorm<D, double> norm{3, {.momentum = {}}};
  CHORUS_MODULE(Cumulative, fc1, norm, fc2)
  auto forward(const auto& x) const {
    return fc2(tanh(flatten(norm(reshape(fc1(x), std::array<Index, 3>{x.size(0), 3, 4})))));
  }
};

TEST_CASE("sync batch norm: a batch that is empty on all ranks is not counted, as on one device") {
  const auto statistics = [](auto& net, const auto& cut) {
    for (const Index size : {0, 8, 1, 0, 3}) net(cut(numbers(size, 5, 1)));
    const auto& norm = net.module().norm;
    auto out = norm.running_mean.value().to_vector();
    for (const double v : norm.running_var.value().to_vector()) out.push_back(v);
    out.push_back(static_cast<double>(norm.num_batches_tracked.value().item()));
    return out;
  };
  const auto whole = [](const auto& x) { return x; };
  SingleDevice<Cumulative<Cpu>> single{make<Cumulative<Cpu>>(), 3};
  const auto expected = statistics(single, whole);
  CHECK(expected.back() == 3);
  DataParallel<Cumulative<Cpu>> dp{make<Cumulative<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK(distance(statistics(dp, whole), expected) < rounding);
  for (const int ranks : {1, 2, 3}) {
    const auto text = common_text(ranks, [&](const World& world) {
      Distributed<Cumulative<Cpu>> rank(world);
      return test::text_of(statistics(rank.net, [&](const auto& x) { return test::share(x, world); }));
    });
    INFO(ranks << " ranks: " << text);
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

/// Recomputes its layers in backward.
template <class D>
struct Recomputed : nn::Module {
  Synced<D> inner;
  CHORUS_MODULE(Recomputed, inner)
  auto forward(const auto& x) const {
    return checkpoint([this](const auto& in) { return inner.forward(in); }, x);
  }
};

TEST_CASE("sync batch norm: what is computed again in backward has the whole batch's statistics, too") {
  const auto expected = train_alone<Recomputed<Cpu>>();
  DataParallel<Recomputed<Cpu>> net{make<Recomputed<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const auto got =
      train(net, [](auto& n, auto& optimizer, auto number, Index size) { test::step(n, optimizer, number, size); });
  CHECK(distance(got, expected) < rounding);
  const auto text = train_on_ranks<Recomputed<Cpu>>(3, [] { return make<Recomputed<Cpu>>(); });
  INFO(text);
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("sync batch norm: convert_sync_batch_norm makes it of BatchNorm") {
  const auto expected = train_alone<test::Normed<Cpu>>();
  const auto text =
      train_on_ranks<test::Normed<Cpu>>(3, [] { return nn::convert_sync_batch_norm(make<test::Normed<Cpu>>()); });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
  const auto plain = train_on_ranks<test::Normed<Cpu>>(3, [] { return make<test::Normed<Cpu>>(); });
  CHECK(distance(test::numbers_in(plain), expected) > 1e-4);  // a share's own statistics differ
  CHECK(nn::convert_sync_batch_norm(nn::BatchNorm<Cpu>{4}).describe() == "SyncBatchNorm(4)");
}

TEST_CASE("sync batch norm: accumulating under no_sync weighs each micro-batch by its own sizes") {
  const auto pass = [](auto& net, std::uint32_t number, Index size, const auto& cut) {
    cross_entropy(net(cut(numbers(size, 5, number))), cut(labels(size, 3, number))).backward();
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

template <class D>
struct NotSynced : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(NotSynced, fc)
  auto forward(const auto& x) const { return fc(x); }
};

/// Bytes that a rank sends when backward begins, for any layers.
std::size_t bytes_of_weighing() {
  return std::stoul(common_text(2, [](const World& world) {
    Distributed<NotSynced<Cpu>> rank(world, {.broadcast_buffers = false});
    const auto x = test::share(numbers(8, 5, 1), world);
    rank.net(x).backward(numbers(4, 3, 1));
    const auto y = rank.net(x);
    trace::reset_traffic();
    y.backward(numbers(4, 3, 1));
    return cat(trace::bytes_sent(world.rank, trace::Traffic::control));
  }));
}

TEST_CASE("sync batch norm: sends 2 channels + 1 numbers forward and 2 channels back, nothing in evaluation") {
  const std::size_t weighing = bytes_of_weighing();
  const auto text = common_text(2, [weighing](const World& world) {
    Distributed<Synced<Cpu>> rank(world, {.broadcast_buffers = false});
    const auto x = test::share(numbers(8, 5, 1), world);
    const auto first = rank.net(x);
    first.backward(numbers(4, 3, 1));
    trace::reset_traffic();
    const auto y = rank.net(x);
    const auto forward = trace::bytes_sent(world.rank, trace::Traffic::control);
    trace::reset_traffic();
    y.backward(numbers(4, 3, 1));
    const auto back = trace::bytes_sent(world.rank, trace::Traffic::control) - weighing;
    rank.net.eval();
    trace::reset_traffic();
    const NoGrad no_grad;
    rank.net(x);
    return cat(forward, " ", back, " ", trace::bytes_sent(world.rank));
  });
  // Two layers, of 3 and of 4 channels; in a ring of two a rank sends as many numbers as the data has.
  CHECK(text == cat((7 + 9) * 8, " ", (6 + 8) * 8, " 0"));
}

TEST_CASE("sync batch norm: one number a channel in the whole batch is refused on all ranks") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Synced<Cpu>> rank(world);
    return message_of<ShapeError>([&] { rank.net(numbers(1 - world.rank, 5, 1)); }).substr(0, 90);
  });
  CHECK(text == "sync_batch_norm: expected several values per channel, got one in the batches of all ranks,");
}

TEST_CASE("sync batch norm: under dp a copy without the layer, or that fails, ends the others") {
  DataParallel<Sometimes<Cpu>> net{make<Sometimes<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  auto x = Tensor<double, 2>::full({6, 5}, 0.5);
  net(x).backward(numbers(6, 3, 1));
  x(3, 0) = 0.25;
  x(2, 0) = -1;  // the second device's first sample
  CHECK_THAT(message_of<UsageError>([&] { net(x); }),
             Contains("replica 1 on device cpu:1 ended without calling this layer"));
  x(2, 0) = 3;
  CHECK(message_of<UsageError>([&] { net(x); }) == "DataParallel: replica 1 on device cpu:1: a two is too much");
  x(2, 0) = 0.5;
  net(x).backward(numbers(6, 3, 1));
}

/// The gradient of all scores by the inputs, for a gradient penalty.
auto slope_of(const auto& score, const auto& x, bool create_graph = true) {
  return grad(sum(square(score)), x, {.create_graph = create_graph, .retain_graph = true});
}

/// The penalty inside the model.
template <class D>
struct Penalised : nn::Module {
  Synced<D> critic;
  CHORUS_MODULE(Penalised, critic)
  auto forward(const auto& x) const {
    const GraphVariable at(value_of(x), true);
    const auto score = critic.forward(at);
    return (sum(square(slope_of(score, at)), 1) + sum(score, 1)).as_variable();
  }
};

void append(std::vector<double>& out, const auto& tensor) {
  for (const double v : tensor.to_vector()) out.push_back(v);
}

/// Results of a recorded pass: outputs, first and second gradients, running statistics; and a plain step after it.
template <class Net>
std::vector<double> recorded_pass(Net& net, Index size) {
  const GraphVariable x(numbers(size, 5, 1), true);
  const auto y = net(x);
  auto out = y.value().to_vector();
  append(out, slope_of(y, x, false).value());
  const auto slope = slope_of(y, x);
  append(out, slope.value());
  const auto penalty = sum(square(slope)) + sum(y);
  append(out, grad(penalty, x, {.retain_graph = true}).value());
  penalty.backward();
  append(out, x.grad());
  net(numbers(7, 5, 2)).backward(numbers(7, 3, 3));
  for (const double g : test::gradients(net.module())) out.push_back(g);
  append(out, net.module().second.running_mean.value());
  append(out, net.module().first.running_var.value());
  return out;
}

TEST_CASE("sync batch norm: under dp a recorded pass has one device's gradients, and gradients of gradients") {
  for (const Index size : {7, 3}) {
    SingleDevice<Synced<Cpu>> single{make<Synced<Cpu>>(), 3};
    const auto expected = recorded_pass(single, size);
    for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 1}, {0, 1, 2}, {1, 0, 1}}) {
      INFO(size << " samples, " << ids.size() << " devices");
      DataParallel<Synced<Cpu>> net{make<Synced<Cpu>>(), {.device_ids = ids, .output_device = 0}, 3};
      CHECK(distance(recorded_pass(net, size), expected) < rounding);
    }
  }
}

TEST_CASE("sync batch norm: a penalty inside of the model takes the steps of one device, under dp and ddp") {
  const auto penalised = [](auto& net, const auto& cut) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.02, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < std::size(batches); ++number) {
      optimizer.zero_grad();
      mean(net(cut(numbers(batches[number], 5, number)))).backward();
      optimizer.step();
    }
    return test::values(net.module());
  };
  const auto whole = [](const auto& x) { return x; };
  SingleDevice<Penalised<Cpu>> single{make<Penalised<Cpu>>(), 3};
  const auto expected = penalised(single, whole);
  for (const std::vector<int>& ids : {std::vector<int>{0, 1}, {0, 1, 2}}) {
    DataParallel<Penalised<Cpu>> net{make<Penalised<Cpu>>(), {.device_ids = ids}, 3};
    CHECK(distance(penalised(net, whole), expected) < rounding);
  }
  for (const int ranks : {2, 3}) {
    const auto text = common_text(ranks, [&](const World& world) {
      Distributed<Penalised<Cpu>> rank(world);
      return test::text_of(penalised(rank.net, [&](const auto& x) { return test::share(x, world); }));
    });
    INFO(ranks << " ranks: " << text);
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

TEST_CASE("sync batch norm: under dp gradients of gradients are the slopes of a penalty") {
  DataParallel<Synced<Cpu>> net{make<Synced<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  test::check_slopes(
      net,
      [&] {
        const GraphVariable x(numbers(7, 5, 1), true);
        return sum(square(slope_of(net(x), x)));
      },
      3);
}

/// The gradient of the score by the input (which may be the caller's GraphVariable), computed inside the model.
template <class D>
struct InnerSlope : nn::Module {
  Synced<D> critic;
  bool create_graph = true;
  CHORUS_MODULE(InnerSlope, critic)
  auto forward(const auto& x) const {
    const auto at = [&] {
      if constexpr (AnyTensor<decltype(x)>)
        return GraphVariable(x, true);
      else
        return GraphVariable(x);
    }();
    const auto score = critic.forward(at);
    const auto slope = slope_of(score, at, create_graph);
    return sum(square(slope), 1) + sum(square(slope_of(score, at, create_graph)), 1) + sum(score, 1);
  }
};

/// Results of one recorded pass: outputs, and gradients by inputs and parameters.
template <class Net>
std::vector<double> inner_pass(Net& net, Index size) {
  const GraphVariable x(numbers(size, 5, 1), true);
  const auto y = net(x);
  auto out = y.value().to_vector();
  const auto loss = sum(square(y));
  append(out, grad(loss, x, {.retain_graph = true}).value());
  loss.backward();
  append(out, x.grad());
  for (const double g : test::gradients(net.module())) out.push_back(g);
  return out;
}

TEST_CASE("sync batch norm: under dp, inside of a recorded pass, `grad` has one device's gradients") {
  for (const bool create_graph : {true, false}) {
    const auto make_model = [&] {
      auto model = make<InnerSlope<Cpu>>();
      model.create_graph = create_graph;
      return model;
    };
    for (const Index size : {7, 3}) {
      SingleDevice<InnerSlope<Cpu>> single{make_model(), 3};
      const auto expected = inner_pass(single, size);
      for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 1}, {0, 1, 2}, {1, 0, 1}}) {
        INFO(size << " samples, " << ids.size() << " devices, create_graph " << create_graph);
        DataParallel<InnerSlope<Cpu>> net{make_model(), {.device_ids = ids, .output_device = 0}, 3};
        CHECK(distance(inner_pass(net, size), expected) < rounding);
      }
    }
  }
}

/// A recorded pass of a model with two inputs, the second of which is made by `other`.
std::vector<double> beside_pass(auto& net, const auto& other) {
  const GraphVariable x(numbers(7, 5, 1), true);
  const auto second = other(numbers(7, 5, 2));
  const auto y = net(x, second);
  auto out = y.value().to_vector();
  append(out, grad(sum(square(y)), x, {.retain_graph = true}).value());
  const auto slope = slope_of(y, x);
  append(out, slope.value());
  (sum(square(slope)) + sum(square(y))).backward();
  append(out, x.grad());
  if constexpr (AnyVariable<decltype(second)>) append(out, second.grad());
  for (const double g : test::gradients(net.module())) out.push_back(g);
  return out;
}

TEST_CASE("sync batch norm: under dp a recorded pass takes plain Tensors and Variables beside GraphVariables") {
  const auto compare = [](const auto& other) {
    SingleDevice<Beside<Cpu>> single{make<Beside<Cpu>>(), 3};
    const auto expected = beside_pass(single, other);
    for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 1}, {0, 1, 2}, {1, 0, 1}}) {
      INFO(ids.size() << " devices");
      DataParallel<Beside<Cpu>> net{make<Beside<Cpu>>(), {.device_ids = ids, .output_device = 0}, 3};
      CHECK(distance(beside_pass(net, other), expected) < rounding);
    }
  };
  compare([](const auto& x) { return x; });
  compare([](const auto& x) { return Variable(x, true); });
  compare([](const auto& x) { return GraphVariable(x, true); });
}

/// Calls grad on plain Variables inside its forward function.
template <class D>
struct PlainInside : nn::Module {
  Synced<D> critic;
  CHORUS_MODULE(PlainInside, critic)
  auto forward(const auto& x, const auto& other) const {
    const Variable at(value_of(other), true);
    const auto slope = grad(sum(square(critic.forward(at))), at);
    return sum(critic.forward(x), 1) + sum(square(slope), 1);
  }
};

TEST_CASE("sync batch norm: under dp, inside of a recorded pass, gradients by plain Variables are one device's") {
  const auto pass = [](auto& net) {
    const GraphVariable x(numbers(6, 5, 1), true);
    const auto y = net(x, numbers(6, 5, 2));
    sum(square(y)).backward();
    auto out = x.grad().to_vector();
    for (const double g : test::gradients(net.module())) out.push_back(g);
    return out;
  };
  SingleDevice<PlainInside<Cpu>> single{make<PlainInside<Cpu>>(), 3};
  const auto expected = pass(single);
  for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 1}, {0, 1, 2}}) {
    DataParallel<PlainInside<Cpu>> net{make<PlainInside<Cpu>>(), {.device_ids = ids}, 3};
    CHECK(distance(pass(net), expected) < rounding);
  }
}

/// Returns a value that no policy can gather.
template <class D>
struct Smuggling : nn::Module {
  Synced<D> inner;
  CHORUS_MODULE(Smuggling, inner)
  auto forward(const auto& x) const { return std::make_shared<Variable<double, 2, D>>(inner.forward(x)); }
};

TEST_CASE("sync batch norm: under dp backward from a single device's output is refused by name") {
  DataParallel<Smuggling<Cpu>> net{make<Smuggling<Cpu>>(), {.device_ids = {0, 1}}, 3};
  const auto outputs = net(numbers(7, 5, 1));
  CHECK_THAT(message_of<UsageError>([&] { sum(*outputs.at(0)).backward(); }),
             Contains("one thread runs backward through this layer"));
}

TEST_CASE("sync batch norm: under dp a recorded pass in evaluation is each sample's own") {
  const GraphVariable x(numbers(7, 5, 1), true);
  DataParallel<Synced<Cpu>> net{make<Synced<Cpu>>(), {.device_ids = {0, 1}}, 3};
  net.eval();
  SingleDevice<Synced<Cpu>> single{make<Synced<Cpu>>(), 3};
  single.eval();
  CHECK(distance(slope_of(net(x), x).value().to_vector(), slope_of(single(x), x).value().to_vector()) < rounding);
}

}  // namespace sync_batch_norm_test
