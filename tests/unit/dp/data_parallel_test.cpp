// DataParallel against SingleDevice: devices, inputs, outputs, errors, flags, buffers, hooks and memory.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <stdexcept>
#include <tuple>

#include <unit/parallel/policies.hpp>

namespace data_parallel_test {

using namespace test::names;

template <class Model>
struct Parallel : DataParallel<Model> {
  explicit Parallel(std::vector<int> ids, int output_device = -1, int dim = 0)
      : DataParallel<Model>(make<Model>(), {.device_ids = std::move(ids), .output_device = output_device, .dim = dim},
                            3) {}
};
template <class Model>
struct Single : SingleDevice<Model> {
  Single() : SingleDevice<Model>(make<Model>(), 3) {}
};

/// Trains under DataParallel like `test::train`, with the labels on the output device.
template <class Model>
test::Run train(Parallel<Model>& net) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01}};
  const Cpu output{net.options().output_device};
  auto losses = test::each_step([&](std::uint32_t number, Index size) {
    optimizer.zero_grad();
    const auto host = labels(size, 3, number);
    const auto y = net(numbers(size, 5, number));
    CHECK(y.device() == output);
    const auto loss = cross_entropy(y, Tensor<std::int64_t, 1>::from(host.to_vector(), host.shape(), output));
    loss.backward();
    optimizer.step();
    return static_cast<double>(loss.item());
  });
  return {std::move(losses), test::values(net.module())};
}

template <class Model>
void require_same_run(Parallel<Model>&& net) {
  static const auto expected = test::train_single<Model>();
  const auto got = train(net);
  CHECK(distance(got.losses, expected.losses) < rounding);
  CHECK(distance(got.parameters, expected.parameters) < rounding);
}

/// Two inputs that are cut; a number and an object that are not.
template <class D>
struct TwoInputs : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{4, 3};
  CHORUS_MODULE(TwoInputs, fc1, fc2)
  auto forward(const auto& x, const auto& y, double factor, const std::vector<double>& shared) const {
    return fc2(tanh(fc1(x)) * y) * (factor * shared.at(1));
  }
};

/// For each share: its mean, the output, and one more.
template <class D>
struct Outputs : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{4, 3};
  CHORUS_MODULE(Outputs, fc1, fc2)
  auto forward(const auto& x) const {
    const auto h = tanh(fc1(x));
    return std::tuple(mean(h), fc2(h), std::tuple(h, value_of(h)));
  }
};

/// The width of its outputs is its share's first number.
template <class D>
struct Uneven : nn::Module {
  nn::Linear<D, double> fc{5, 4};
  CHORUS_MODULE(Uneven, fc)
  auto forward(const auto& x) const {
    return Tensor<double, 2, D>::zeros({x.size(0), static_cast<Index>(x(0, 0))}, x.device());
  }
};

/// Columns are samples.
template <class D>
struct Columns : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  CHORUS_MODULE(Columns, fc1, fc2)
  auto forward(const auto& x) const { return transpose(fc2(tanh(fc1(transpose(x, 0, 1)))), 0, 1); }
};

enum class Harm { none, shape, out_of_range, comm, backward };

/// Does harm on the device that has a sample beginning with 7.
template <class D>
struct Harmed : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{4, 3};
  CHORUS_MODULE(Harmed, fc1, fc2)
  auto forward(const auto& x, Harm harm) const {
    bool here = false;
    for (Index i = 0; i < x.size(0); ++i) here = here || x(i, 0) == 7;
    if (here && harm == Harm::shape) fail<ShapeError>("seven is no shape");
    if (here && harm == Harm::out_of_range) throw std::out_of_range("seven is too much");
    if (here && harm == Harm::comm) fail<CommError>("seven does not answer");
    const auto y = fc2(tanh(fc1(x)));
    return record(
        "harm", y.value(),
        [harmful = here && harm == Harm::backward](const auto& dy, auto dx) {
          check<UsageError>(!harmful, "seven can't go back");
          dx->add(dy);
        },
        y);
  }
};

/// Returns which of its modules are in training.
template <class D>
struct Flags : nn::Module {
  nn::Linear<D, double> fc{5, 4};
  nn::Dropout dropout{0.5};
  nn::BatchNorm<D, double> norm{3};
  CHORUS_MODULE(Flags, fc, dropout, norm)
  auto forward(const auto& x) const {
    auto out = Tensor<std::int64_t, 2, D>::empty({x.size(0), 4}, x.device());
    for (Index i = 0; i < x.size(0); ++i) {
      out(i, 0) = training();
      out(i, 1) = dropout.training();
      out(i, 2) = norm.training();
      out(i, 3) = grad_enabled();
    }
    return out;
  }
};

TEST_CASE("dp: two, three and four devices take the steps of one") {
  require_same_run(Parallel<test::Smooth<Cpu>>({0, 1}));
  require_same_run(Parallel<test::Smooth<Cpu>>({0, 1, 2}));
  require_same_run(Parallel<test::Smooth<Cpu>>({0, 1, 2, 3}));
}

TEST_CASE("dp: one device, devices in another order, a device twice, another output device") {
  require_same_run(Parallel<test::Smooth<Cpu>>({0}));
  require_same_run(Parallel<test::Smooth<Cpu>>({2}));
  require_same_run(Parallel<test::Smooth<Cpu>>({1, 0}));
  require_same_run(Parallel<test::Smooth<Cpu>>({0, 0}));
  require_same_run(Parallel<test::Smooth<Cpu>>({0, 0, 1, 0}));
  require_same_run(Parallel<test::Smooth<Cpu>>({0, 1}, 1));
  require_same_run(Parallel<test::Smooth<Cpu>>({1, 2}, 0));
}

TEST_CASE("dp: devices and axes that make no sense are refused") {
  using Net = Parallel<test::Smooth<Cpu>>;
  CHECK_THAT(message_of<UsageError>([] { Net net({}); }), Contains("device_ids is empty"));
  CHECK_THAT(message_of<UsageError>([] { Net net({0, 1}, -1, -1); }), Contains("dim") && Contains("-1"));
  CHECK_THAT(message_of<DeviceError>([] { Net net({0, 64}); }), Contains("cpu:64") && Contains("0 to 63"));
  CHECK_THAT(message_of<DeviceError>([] { Net net({-3}); }), Contains("cpu:-3"));
  CHECK_THAT(message_of<DeviceError>([] { Net net({0, 1}, 64); }), Contains("cpu:64"));
}

TEST_CASE("dp: dropout masks are those of a single device") {
  require_same_run(Parallel<test::Dropping<Cpu>>({0, 1}));
  require_same_run(Parallel<test::Dropping<Cpu>>({0, 1, 2}));
  Parallel<test::Dropping<Cpu>> net({0, 1, 2});
  Single<test::Dropping<Cpu>> single;
  const auto first = single(numbers(8, 5, 1)).value().to_vector();
  CHECK(distance(net(numbers(8, 5, 1)).value().to_vector(), first) < rounding);
  const auto second = single(numbers(8, 5, 1)).value().to_vector();
  CHECK(distance(net(numbers(8, 5, 1)).value().to_vector(), second) < rounding);
  CHECK(distance(first, second) > 0.01);  // another step, another mask
}

TEST_CASE("dp: inputs are cut along another axis") {
  Parallel<Columns<Cpu>> net({0, 1, 2}, -1, 1);
  Single<Columns<Cpu>> single;
  const auto x = numbers(5, 8, 1), seed = numbers(3, 8, 2);
  const auto got = net(x), expected = single(x);
  CHECK(got.shape() == Shape<2>{3, 8});
  CHECK(distance(got.value().to_vector(), expected.value().to_vector()) < rounding);
  got.backward(seed);
  expected.backward(seed);
  CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
}

TEST_CASE("dp: several inputs, of which a variable gets its gradient, and arguments that are shared") {
  Parallel<TwoInputs<Cpu>> net({0, 1, 2});
  Single<TwoInputs<Cpu>> single;
  const auto run = [](auto& policy, bool leaf) {
    const Variable x(numbers(7, 5, 1), leaf), y(numbers(7, 4, 2), true);
    const auto scaled = y * 2.0;  // not a leaf
    policy(x, scaled, 0.5, std::vector<double>{0, 3}).backward(numbers(7, 3, 3));
    auto out = y.grad().to_vector();
    if (leaf) {
      const auto more = x.grad().to_vector();
      out.insert(out.end(), more.begin(), more.end());
    }
    const auto parameters = test::gradients(policy.module());
    out.insert(out.end(), parameters.begin(), parameters.end());
    return out;
  };
  for (const bool leaf : {true, false}) {
    net.module().fc1.weight.zero_grad();
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    for (const auto& named : single.parameters()) named.parameter->set_grad_arrived(false);
    CHECK(distance(run(net, leaf), run(single, leaf)) < rounding);
  }
  CHECK_THAT(message_of<ShapeError>([&] {
               net(numbers(7, 5, 1), numbers(6, 4, 1), 0.5, std::vector<double>{0, 3});
             }),
             Contains("do not broadcast"));
}

TEST_CASE("dp: scalars become a vector, tuples are gathered, outputs may stay unused") {
  Parallel<Outputs<Cpu>> net({0, 1, 2});
  Single<Outputs<Cpu>> single;
  const auto x = numbers(7, 5, 1);
  const auto [means, y, more] = net(x);
  const auto [mean_h, expected_y, expected_more] = single(x);
  CHECK(distance(y.value().to_vector(), expected_y.value().to_vector()) < rounding);
  CHECK(distance(std::get<0>(more).value().to_vector(), std::get<0>(expected_more).value().to_vector()) < rounding);
  CHECK(distance(std::get<1>(more).to_vector(), std::get<1>(expected_more).to_vector()) < rounding);
  CHECK(means.shape() == Shape<1>{3});  // shares of 3, 2 and 2
  const auto m = means.value().to_vector();
  CHECK((3 * m[0] + 2 * m[1] + 2 * m[2]) / 7 == Approx(mean_h.item()));

  // Only the mean reaches the loss: fc2 gets no gradient, not even a stale one.
  const auto weights = Tensor<double, 1>::from({3.0 / 7, 2.0 / 7, 2.0 / 7}, {3});
  sum(means * Variable(weights)).backward();
  mean_h.backward();
  CHECK(distance(net.module().fc1.weight.grad().to_vector(), single.module().fc1.weight.grad().to_vector()) < rounding);
  CHECK_FALSE(net.module().fc2.weight.grad().defined());

  // A batch of two samples on three devices uses two devices.
  CHECK(std::get<0>(net(numbers(2, 5, 1))).shape() == Shape<1>{2});
  // One device: still a vector, of size 1.
  Parallel<Outputs<Cpu>> alone({0});
  CHECK(std::get<0>(alone(x)).shape() == Shape<1>{1});
}

TEST_CASE("dp: outputs that can't be joined are refused") {
  Parallel<Uneven<Cpu>> net({0, 1, 2});
  auto x = Tensor<double, 2>::full({6, 5}, 3);
  CHECK(net(x).shape() == Shape<2>{6, 3});
  x(4, 0) = 2;
  CHECK_THAT(message_of<ShapeError>([&] { net(x); }),
             Contains("replica 2's output of shape [2, 2]") && Contains("replica 0's of shape [2, 3]"));
}

TEST_CASE("dp: what a replica throws is thrown again, with replica and device and of its kind") {
  Parallel<Harmed<Cpu>> net({0, 3, 5});
  auto x = numbers(6, 5, 1);
  x(3, 0) = 7;  // on the second device
  CHECK(message_of<ShapeError>([&] { net(x, Harm::shape); }) ==
        "DataParallel: replica 1 on device cpu:3: seven is no shape");
  CHECK(message_of<CommError>([&] { net(x, Harm::comm); }) ==
        "DataParallel: replica 1 on device cpu:3: seven does not answer");
  CHECK(message_of<Error>([&] { net(x, Harm::out_of_range); }) ==
        "DataParallel: replica 1 on device cpu:3: seven is too much");
  x(0, 0) = 7;  // on two devices: the first is reported
  CHECK_THAT(message_of<ShapeError>([&] { net(x, Harm::shape); }), Contains("replica 0 on device cpu:0"));
}

TEST_CASE("dp: after an error in a replica the next step is right") {
  Parallel<Harmed<Cpu>> net({0, 1, 2});
  Single<Harmed<Cpu>> single;
  auto bad = numbers(6, 5, 1);
  bad(5, 0) = 7;  // on the last device: the others' gradients have arrived by then
  const auto y = net(bad, Harm::backward);
  CHECK(message_of<UsageError>([&] { y.backward(numbers(6, 3, 2)); }) ==
        "DataParallel: replica 2 on device cpu:2: seven can't go back");
  CHECK_THROWS_AS(net(bad, Harm::shape), ShapeError);
  for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);  // as zero_grad does
  net(bad, Harm::none).backward(numbers(6, 3, 2));
  single(bad, Harm::none).backward(numbers(6, 3, 2));
  CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
}

TEST_CASE("dp: the gradient mode and the training flags of all submodules hold on all devices") {
  Parallel<Flags<Cpu>> net({0, 1, 2});
  const auto flags = [&] {
    const auto out = net(numbers(3, 5, 1));
    for (Index i = 1; i < 3; ++i)
      for (Index j = 0; j < 4; ++j) CHECK(out(i, j) == out(0, j));
    return out[0].to_vector();
  };
  CHECK(flags() == std::vector<std::int64_t>{1, 1, 1, 1});
  net.module().dropout.eval();
  CHECK(flags() == std::vector<std::int64_t>{1, 0, 1, 1});
  net.eval();
  net.module().norm.train();
  const NoGrad no_grad;
  CHECK(flags() == std::vector<std::int64_t>{0, 0, 1, 0});
  net.train();
  CHECK(flags() == std::vector<std::int64_t>{1, 1, 1, 0});
}

TEST_CASE("dp: without gradients nothing is recorded on any device") {
  Parallel<test::Smooth<Cpu>> net({0, 1, 2});
  const NoGrad no_grad;
  const Variable x(numbers(6, 5, 1), true);
  CHECK_FALSE(net(x).requires_grad());
}

TEST_CASE("dp: batch norm's buffers are the first device's") {
  Parallel<test::Normed<Cpu>> net({0, 1, 2});
  Single<test::Normed<Cpu>> single;
  const auto x = numbers(8, 5, 1);
  net(x);
  const auto share = contiguous(x.slice(0, 0, 3));  // 8 on 3 devices: 3, 3, 2
  single(share);
  const auto buffers = [](auto& policy) {
    const auto& norm = policy.module().norm;
    auto all = norm.running_mean.value().to_vector();
    for (const double v : norm.running_var.value().to_vector()) all.push_back(v);
    all.push_back(static_cast<double>(norm.num_batches_tracked.value().item()));
    return all;
  };
  CHECK(distance(buffers(net), buffers(single)) < rounding);
  CHECK(buffers(net).back() == 1);
  // In evaluation all devices normalise with them.
  net.eval();
  single.eval();
  CHECK(distance(net(x).value().to_vector(), single(x).value().to_vector()) < rounding);
}

TEST_CASE("dp: hooks fire once for each backward and see the sum of all devices") {
  Parallel<test::Smooth<Cpu>> net({0, 1, 2});
  Single<test::Smooth<Cpu>> single;
  std::vector<std::vector<double>> seen;
  net.module().fc1.weight.register_hook([&] { seen.push_back(net.module().fc1.weight.grad().to_vector()); });
  const auto x = numbers(7, 5, 1), seed = numbers(7, 3, 2);
  net(x).backward(seed);
  single(x).backward(seed);
  REQUIRE(seen.size() == 1);
  CHECK(distance(seen[0], single.module().fc1.weight.grad().to_vector()) < rounding);
  // Two forward passes for one loss.
  single.module().fc1.weight.zero_grad();
  net.module().fc1.weight.zero_grad();
  const auto both = [&](auto& policy) {
    (sum(policy(x)) + sum(policy(numbers(4, 5, 5)))).backward();
    return policy.module().fc1.weight.grad().to_vector();
  };
  const auto expected = both(single);
  CHECK(distance(both(net), expected) < rounding);
  REQUIRE(seen.size() == 2);
  CHECK(distance(seen[1], expected) < rounding);
}

TEST_CASE("dp: a hook on a parameter that is also in the loss runs once, and sees the whole gradient") {
  // One of the loss's own terms is recorded before the forward pass, so it is the last to send a gradient.
  const auto run = [](auto& policy, bool before, bool after, int passes) {
    std::vector<std::vector<double>> seen;
    const auto& weight = policy.module().fc1.weight;
    weight.register_hook([&] { seen.push_back(weight.grad().to_vector()); });
    policy.module().fc2.weight.register_hook([](const auto& gradient) { return gradient * 2.0; });
    auto loss = before ? sum(weight * weight) : Variable<double, 0>(Tensor<double, 0>::full({}, 0));
    for (int pass = 0; pass < passes; ++pass) loss = loss + sum(policy(numbers(7, 5, 1)));
    if (after) loss = loss + sum(weight * weight) * 3.0;
    loss.backward();
    REQUIRE(seen.size() == 1);
    CHECK(seen[0] == weight.grad().to_vector());
    for (const double g : test::gradients(policy.module())) seen[0].push_back(g);
    return seen[0];
  };
  for (const bool before : {false, true})
    for (const bool after : {false, true})
      for (const int passes : {1, 2}) {
        INFO(before << after << passes);
        Parallel<test::Smooth<Cpu>> net({0, 1, 2});
        Single<test::Smooth<Cpu>> single;
        CHECK(distance(run(net, before, after, passes), run(single, before, after, passes)) < rounding);
      }
}

TEST_CASE("dp: hooks of parameters run where the net is called inside of a checkpoint, and not where none was used") {
  Parallel<test::Smooth<Cpu>> net({0, 1});
  int fired = 0;
  net.module().fc1.weight.register_hook([&] { ++fired; });
  const Variable<double, 2> x(numbers(7, 5, 1), true);
  sum(checkpoint([&](const auto& in) { return net(in); }, x)).backward();
  CHECK(fired == 1);
  net.module().fc1.weight.zero_grad();
  net.module().fc1.weight.set_requires_grad(false);
  sum(net(x)).backward();
  CHECK(fired == 1);
}

TEST_CASE("dp: a parameter may also be in the loss by itself") {
  Parallel<test::Smooth<Cpu>> net({0, 1, 2});
  Single<test::Smooth<Cpu>> single;
  const auto run = [&](auto& policy) {
    const auto& weight = policy.module().fc1.weight;
    (sum(policy(numbers(7, 5, 1))) + sum(weight * weight)).backward();
    return test::gradients(policy.module());
  };
  CHECK(distance(run(net), run(single)) < rounding);
}

TEST_CASE("dp: frozen parameters get no gradient, whenever they were frozen") {
  const auto freeze = [](auto& net, bool frozen) {
    net.module().fc2.weight.set_requires_grad(!frozen);
    net.module().fc2.bias.set_requires_grad(!frozen);
  };
  const auto x = numbers(7, 5, 1), seed = numbers(7, 3, 2);
  const auto both_agree = [&](auto& net, auto& single) {
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    for (const auto& named : single.parameters()) named.parameter->set_grad_arrived(false);
    net(x).backward(seed);
    single(x).backward(seed);
    CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
    for (const auto& named : net.parameters()) CHECK(named.parameter->grad_arrived() == named.parameter->wants_grad());
    CHECK(optim::clip_grad_norm(net.parameters(), 1) == Approx(optim::clip_grad_norm(single.parameters(), 1)));
  };
  auto model = make<test::Smooth<Cpu>>();
  model.fc2.weight.set_requires_grad(false);
  model.fc2.bias.set_requires_grad(false);
  DataParallel<test::Smooth<Cpu>> net(model, {.device_ids = {0, 1, 2}});
  Single<test::Smooth<Cpu>> single;
  freeze(single, true);
  both_agree(net, single);
  freeze(net, false);  // unfrozen later
  freeze(single, false);
  both_agree(net, single);
  freeze(net, true);  // and frozen again
  freeze(single, true);
  both_agree(net, single);
}

TEST_CASE("dp: gradients accumulate over backward passes") {
  Parallel<test::Smooth<Cpu>> net({0, 1, 2});
  Single<test::Smooth<Cpu>> single;
  for (std::uint32_t pass = 0; pass < 3; ++pass) {
    const Index size = pass == 1 ? 2 : 7;  // the second uses one device less
    net(numbers(size, 5, pass)).backward(numbers(size, 3, 9));
    single(numbers(size, 5, pass)).backward(numbers(size, 3, 9));
  }
  CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
}

TEST_CASE("dp: backward runs twice through a graph that is retained") {
  Parallel<test::Smooth<Cpu>> net({0, 1, 2});
  Single<test::Smooth<Cpu>> single;
  const auto twice = [](auto& policy) {
    const Variable x(numbers(7, 5, 1), true);
    const auto loss = sum(policy(x));
    loss.backward(true);
    loss.backward();
    auto all = x.grad().to_vector();
    for (const double g : test::gradients(policy.module())) all.push_back(g);
    CHECK_THAT(message_of<UsageError>([&] { loss.backward(); }), Contains("freed by an earlier backward"));
    return all;
  };
  CHECK(distance(twice(net), twice(single)) < rounding);
}

TEST_CASE("dp: each device holds its own parameters, gradients and activations") {
  const auto held = [](int device, trace::Memory kind) { return trace::memory(device, kind); };
  std::size_t before[3][2];
  for (int i = 0; i < 3; ++i) {
    before[i][0] = held(20 + i, trace::Memory::parameters);
    before[i][1] = held(20 + i, trace::Memory::gradients);
  }
  Parallel<test::Smooth<Cpu>> net({20, 21, 22});
  const std::size_t bytes = net.flat_parameters().bytes();
  {
    const auto y = net(numbers(9, 5, 1));
    for (int i = 0; i < 3; ++i) {
      CHECK(held(20 + i, trace::Memory::parameters) - before[i][0] >= bytes);
      CHECK(held(20 + i, trace::Memory::parameters) - before[i][0] < bytes + 1024);
      CHECK(held(20 + i, trace::Memory::gradients) - before[i][1] >= bytes);
      CHECK(held(20 + i, trace::Memory::activations) >= 3 * (7 + 6 + 3) * sizeof(double));
    }
    sum(y).backward();
  }
  CHECK(held(21, trace::Memory::activations) == 0);
  CHECK(held(22, trace::Memory::activations) == 0);
}

}  // namespace data_parallel_test
