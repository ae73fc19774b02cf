// Random numbers within the forward pass: a variational autoencoder trains on several devices as on one; initialisers,
// whose random numbers belong to no sample, are refused.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/init.hpp>
#include <chorus/ops/random.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include "ranks.hpp"

namespace random_operators_test {

using namespace test::names;

/// x: [batch, 5] -> [batch, 5 + 2 * 2]: the decoded sample of the latent variables, their means and their log
/// variances. It adds noise to the inputs and to the weights of a layer, and applies dropout to the inputs.
template <class D>
struct Vae : nn::Module {
  nn::Linear<D, double> encode{5, 6}, mean{6, 2}, log_var{6, 2}, decode{2, 6}, out{6, 5};
  CHORUS_MODULE(Vae, encode, mean, log_var, decode, out)

  auto forward(const auto& x) const {
    const auto device = value_of(x).device();
    const Index rows = value_of(x).size(0);
    const auto noise = rand<double, 2>({rows, 5}, device) * 0.2;
    const auto kept = bernoulli(Tensor<double, 2, D>::full({rows, 5}, 0.8, device));
    const auto h = tanh(encode((x + noise) * kept));
    const auto centre = mean(h), spread = log_var(h);
    const auto z = centre + exp(spread * 0.5) * randn_like(spread);
    const auto weight = decode.weight + randn_like(decode.weight) * 0.1;
    const auto shared = randn<double, 1>({6}, device, {.same_on_all = true}) * 0.1;
    return concat(1, out(tanh(linear(z, weight, decode.bias) + shared)), centre, spread);
  }
};
using Model = Vae<Cpu>;

/// The sum over pixels plus the divergence from N(0, 1), averaged over samples.
template <class Y>
auto loss_of(const Y& y, const Tensor<double, 2>& x) {
  const auto made = slice(y, 1, 0, 5), centre = slice(y, 1, 5, 7), spread = slice(y, 1, 7, 9);
  const auto divergence = (square(centre) + exp(spread) - spread - 1) * 0.5;
  const double rows = std::max<double>(static_cast<double>(x.size(0)), 1);
  return (sum(square(made - x)) + sum(divergence)) * (1 / rows);
}

/// The losses and parameters of some steps, with evaluations in between that also draw random numbers.
template <class Net>
std::vector<double> train(Net& net, const auto& cut) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.05}};
  std::vector<double> out;
  std::uint32_t number = 0;
  for (const Index size : {8, 7, 1, 9, 4}) {
    const auto x = cut(numbers(size, 5, number++));
    optimizer.zero_grad();
    const auto loss = loss_of(net(x), x);
    loss.backward();
    optimizer.step();
    out.push_back(net.mean(loss.item(), x.size(0)));
    net.eval();
    {
      const NoGrad scope;
      out.push_back(net.mean(loss_of(net(x), x).item(), x.size(0)));
    }
    net.train();
  }
  for (const double value : test::values(net.module())) out.push_back(value);
  out.push_back(net.forward_passes());
  return out;
}
const auto whole = [](const auto& x) { return x; };

std::vector<double> train_alone() {
  SingleDevice<Model> net{make<Model>(), 3};
  return train(net, whole);
}

TEST_CASE("a variational autoencoder: on several devices as on one") {
  const auto expected = train_alone();
  CHECK(expected == train_alone());
  CHECK(expected.back() == 10);
  for (const std::vector<int>& devices : {std::vector{0, 1}, {0, 1, 2}}) {
    DataParallel<Model> several{make<Model>(), {.device_ids = devices}, 3};
    auto got = train(several, whole);
    CHECK(distance(got, expected) < rounding);
  }
}

template <class Net>
void check_ranks(int ranks) {
  INFO(Net::name << " " << ranks);
  const auto text = common_text(ranks, [&](const World& world) {
    auto communicator = comm::connect(world);
    Net net{make<Model>(), communicator, {}, 3};
    const auto got = train(net, [&](const auto& x) { return contiguous(test::share(x, world)); });
    return test::text_of(got);
  });
  CHECK(distance(test::numbers_in(text), train_alone()) < rounding);
}
TEST_CASE("a variational autoencoder: on ranks as on one device") {
  check_ranks<DistributedDataParallel<Model>>(2);
  check_ranks<DistributedDataParallel<Model>>(3);
  check_ranks<ParameterServer<Model>>(2);
}

/// Returns its random numbers.
template <class D>
struct Noise : nn::Module {
  nn::Linear<D, double> fc{2, 1};
  bool like_samples = true;
  CHORUS_MODULE(Noise, fc)
  auto forward(const auto& x) const {
    const Index rows = like_samples ? value_of(x).size(0) : 4;
    const auto noise = randn<double, 1>({rows});
    return fc(x) * 0.0 + (like_samples ? noise : noise.slice(0, 0, 1)).view(Shape<2>{-1, 1});
  }
};
using NoiseModel = Noise<Cpu>;

TEST_CASE("noise: the same bits on one device and on several, on the device of the pass") {
  const auto x = numbers(7, 2, 1);
  SingleDevice<NoiseModel> net{NoiseModel{}, 3};
  DataParallel<NoiseModel> several{NoiseModel{}, {.device_ids = {1, 0, 2}}, 3};
  const auto device_1 = Tensor<double, 2>::from(x.to_vector(), {7, 2}, Cpu{1});
  for (int pass = 0; pass < 3; ++pass) {
    const auto expected = net(x).value().to_vector();
    CHECK(several(device_1).value().to_vector() == expected);
    CHECK(expected[0] != expected[1]);
  }
}

TEST_CASE("noise: shapes that could be the samples' or not are named on all ranks or on one") {
  NoiseModel model;
  model.like_samples = false;
  SingleDevice<NoiseModel> net{model, 3};
  net(numbers(7, 2, 1));
  DataParallel<NoiseModel> several{model, {.device_ids = {0, 1}}, 3};
  // Shares of 4 and 3 samples: a shape of 4 could be rows of the first share, or a size that both have in common.
  CHECK_THAT(message_of<UsageError>([&] { several(numbers(7, 2, 1)); }),
             Contains("randn: the shape [4] has a size of 4: another device has that many samples, this device has 3"));
  CHECK_THAT(message_of<UsageError>([&] { several(numbers(4, 2, 1)); }), Contains("may be several rows"));
  SingleDevice<NoiseModel> again{model, 3};
  DataParallel<NoiseModel> shared{model, {.device_ids = {0, 1}}, 3};
  CHECK(shared(numbers(6, 2, 1)).value().to_vector() == again(numbers(6, 2, 1)).value().to_vector());
  const auto texts = Ranks(2, [&](const World& world) {
                       NoiseModel own;
                       own.like_samples = false;
                       Distributed<NoiseModel> rank(world, {}, std::move(own));
                       const NoGrad scope;
                       return message_of<UsageError>([&] { rank.net(numbers(4 - world.rank, 2, 1)); });
                     }).texts();
  CHECK_THAT(texts[1], Contains("another device has that many samples, this device has 3"));
}

/// Noise in a part of the model that backward may recompute.
template <class D>
struct Recomputed : nn::Module {
  nn::Linear<D, double> fc1{5, 6}, fc2{6, 3};
  bool again = false;
  CHORUS_MODULE(Recomputed, fc1, fc2)
  auto forward(const auto& x) const {
    const auto part = [this](const auto& in) {
      const auto h = tanh(fc1(in));
      return fc2(h * randn_like(h));
    };
    return again ? checkpoint(part, x) : part(x);
  }
};

TEST_CASE("noise: what is computed again in backward draws what it drew, and the pass counts in evaluation, too") {
  using Part = Recomputed<Cpu>;
  const auto gradients = [](auto& net, bool again, const auto& cut) {
    net.module().again = again;
    net.eval();
    const auto x = cut(numbers(7, 5, 2));
    for (int pass = 0; pass < 2; ++pass) (sum(square(net(x))) * (1.0 / static_cast<double>(x.size(0)))).backward();
    auto out = test::gradients(net.module());
    out.push_back(net.forward_passes());
    return out;
  };
  SingleDevice<Part> plain{make<Part>(), 3}, single{make<Part>(), 3};
  const auto expected = gradients(plain, false, whole);
  CHECK(expected.back() == 2);
  CHECK(gradients(single, true, whole) == expected);
  DataParallel<Part> several{make<Part>(), {.device_ids = {0, 1}}, 3};
  CHECK(distance(gradients(several, true, whole), expected) < rounding);
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Part> rank(world);
    return test::text_of(gradients(rank.net, true, [&](const auto& x) { return contiguous(test::share(x, world)); }));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

/// Initialisers within the forward pass.
template <class D>
struct Initialising : nn::Module {
  nn::Linear<D, double> fc{2, 2};
  int way = 0;
  CHORUS_MODULE(Initialising, fc)
  auto forward(const auto& x) const {
    const Index rows = value_of(x).size(0);
    const auto device = value_of(x).device();
    if (way == 0) return fc(x) + nn::init::normal<double, D, 2>({rows, 2}, 0, 1, device);
    if (way == 1) return fc(x) + nn::init::default_uniform<double, D, 2>({rows, 2}, 4, device);
    return nn::Linear<D, double>{2, 2}(x);
  }
};

TEST_CASE("initialisers in a forward pass are refused, and say what to use") {
  using Made = Initialising<Cpu>;
  const char* const expected[] = {"nn::init::normal: it was called", "nn::init::uniform", "nn::init::uniform"};
  const char* const instead[] = {"ch::randn or ch::randn_like", "ch::rand or ch::rand_like",
                                 "construct layers before it"};
  for (int way = 0; way < 3; ++way) {
    Made model;
    model.way = way;
    model(numbers(2, 2, 1));  // without a policy
    SingleDevice<Made> net{model, 3};
    DataParallel<Made> several{model, {.device_ids = {0, 1}}, 3};
    for (const auto& text : {message_of<UsageError>([&] { net(numbers(2, 2, 1)); }),
                             message_of<UsageError>([&] { several(numbers(2, 2, 1)); })})
      CHECK_THAT(text, Contains(expected[way]) && Contains(instead[way]));
    Made again;  // outside a forward pass
  }
}

}  // namespace random_operators_test
