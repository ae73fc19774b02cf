// Forward passes in training without gradients (a GAN's fakes, recomputed running statistics), and random numbers that
// are those of one device under every policy.
#include <catch.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include "ranks.hpp"

namespace no_grad_training_test {

using namespace test::names;

template <class D>
struct Critic : nn::Module {
  nn::Linear<D, double> fc1{3, 7}, fc2{7, 1};
  CHORUS_MODULE(Critic, fc1, fc2)
  auto forward(const auto& x) const { return fc2(tanh(fc1(x))); }
};

/// Steps of a GAN; the critic gets fakes for which the generator records no gradient.
template <class Generator, class Judge, class Cut>
std::vector<double> train(Generator& generator, Judge& critic, const Cut& cut) {
  optim::Sgd slow{generator.parameters(), {.lr = 0.1}}, fast{critic.parameters(), {.lr = 0.1}};
  for (std::uint32_t step = 0; step < 3; ++step) {
    fast.zero_grad();
    const auto fakes = [&] {
      const NoGrad scope;
      return contiguous(generator(cut(numbers(7, 5, step))).value());
    }();
    (mean(critic(cut(numbers(7, 3, 50 + step)))) - mean(critic(fakes))).backward();
    fast.step();
    slow.zero_grad();
    mean(critic(generator(cut(numbers(7, 5, 20 + step))))).backward();
    slow.step();
  }
  auto out = test::values(generator.module());
  for (const double value : test::values(critic.module())) out.push_back(value);
  return out;
}

template <class Model>
void check_gan() {
  using Judge = Critic<Cpu>;
  const auto whole = [](const auto& x) { return x; };
  SingleDevice<Model> alone{make<Model>(1), 3};
  SingleDevice<Judge> critic{make<Judge>(2), 3};
  const auto expected = train(alone, critic, whole);
  DataParallel<Model> copies{make<Model>(1), {.device_ids = {0, 1}}, 3};
  DataParallel<Judge> copied{make<Judge>(2), {.device_ids = {0, 1}}, 3};
  CHECK(distance(train(copies, copied, whole), expected) < rounding);
  const auto text = common_text(2, [&](const World& world) {
    auto communicator = comm::connect(world);
    DistributedDataParallel<Model> net{make<Model>(1), communicator, {}, 3};
    DistributedDataParallel<Judge> judge{make<Judge>(2), communicator, {}, 3};
    return test::text_of(train(net, judge, [&](const auto& x) { return contiguous(test::share(x, world)); }));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("ddp: a GAN whose fakes are made without gradients trains as on one device, with synchronised batch norm") {
  check_gan<test::Synced<Cpu>>();
}
TEST_CASE("ddp: a GAN whose fakes are made without gradients trains as on one device, with dropout") {
  check_gan<test::Dropping<Cpu>>();
}

/// Running statistics and outputs of a pass without gradients.
template <class Net>
std::vector<double> look(Net& net, const Tensor<double, 2>& x) {
  const NoGrad scope;
  auto out = net(x).value().to_vector();
  for (const auto& named : nn::named_buffers<Cpu>(net.module()))
    if (named.buffer->dtype() == DType::f64)
      for (Index i = 0; i < named.buffer->count(); ++i) out.push_back(static_cast<double*>(named.buffer->data())[i]);
  return out;
}

template <template <class...> class Net, class Model>
double off(const std::vector<double>& expected) {
  const auto texts = Ranks(2, [&](const World& world) {
                       auto communicator = comm::connect(world);
                       Net<Model> net{make<Model>(), communicator};
                       return test::text_of(look(net, contiguous(test::share(numbers(6, 5, 1), world))));
                     }).texts();
  auto all = test::numbers_in(texts[0]);
  const auto second = test::numbers_in(texts[1]);
  all.insert(all.begin() + 9, second.begin(), second.begin() + 9);  // the outputs, then what both have
  return distance(all, expected);
}

TEST_CASE("local SGD and parameter server: passes in training without gradients see the whole batch") {
  using Model = test::Synced<Cpu>;
  SingleDevice<Model> alone{make<Model>()};
  const auto expected = look(alone, numbers(6, 5, 1));
  CHECK(off<ParameterServer, Model>(expected) < rounding);
  CHECK(off<LocalSgd, Model>(expected) < rounding);
}

TEST_CASE("ddp: a pass in training without gradients that draws random numbers on some ranks alone is named") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<test::Dropping<Cpu>> rank(world);
                       return message_of<Error>([&] {
                         const GradMode mode(world.rank == 1);
                         const auto y = rank.net(numbers(2, 5, 1));
                         if (world.rank == 1) mean(square(y)).backward();
                       });
                     }).texts();
  CHECK_THAT(texts[0], Contains("rank 0 runs a forward pass without gradients, rank 1 one that records them"));
  CHECK_THAT(texts[1], Contains("rank 1 runs a forward pass that records gradients, rank 0 one without"));
}

TEST_CASE("ddp: in evaluation ranks pass on their own, also with dropout and synchronised batch norm") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Dropping<Cpu>> dropping(world);
    dropping.net.eval();
    if (world.rank == 1) look(dropping.net, numbers(3, 5, 1));
    return std::string("done");
  });
  CHECK(text == "done");
}

/// Applies dropout to rows of [batch * 3, 4].
template <class D>
struct Flattened : nn::Module {
  nn::Linear<D, double> fc{12, 12};
  nn::Dropout dropout{0.5};
  CHORUS_MODULE(Flattened, fc, dropout)
  auto forward(const auto& x) const {
    const Index samples = value_of(x).size(0);
    return reshape(dropout(reshape(fc(x), std::array<Index, 2>{samples * 3, 4})), std::array<Index, 2>{samples, 12});
  }
};

TEST_CASE("dropout: of rows that are several a sample, ranks and devices drop those that one device drops") {
  using Model = Flattened<Cpu>;
  const auto gradients = [](auto& net, const auto& x) {
    (sum(square(net(x))) * (1.0 / static_cast<double>(x.size(0)))).backward();
    return test::gradients(net.module());
  };
  SingleDevice<Model> alone{make<Model>(), 3};
  const auto expected = gradients(alone, numbers(5, 12, 1));
  DataParallel<Model> copies{make<Model>(), {.device_ids = {0, 1}}, 3};
  CHECK(distance(gradients(copies, numbers(5, 12, 1)), expected) < rounding);
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world);
    return test::text_of(gradients(rank.net, contiguous(test::share(numbers(5, 12, 1), world))));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("ddp: ranks that were seeded differently take rank 0's seed, and share the samples out without overlap") {
  const auto texts =
      Ranks(2, [](const World& world) {
        auto communicator = comm::connect(world);
        const auto seed = static_cast<std::uint64_t>(40 + world.rank);
        DistributedDataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), communicator, {}, seed};
        LocalSgd<test::Smooth<Cpu>> local{make<test::Smooth<Cpu>>(), communicator, {}, seed};
        ParameterServer<test::Smooth<Cpu>> server{make<test::Smooth<Cpu>>(), communicator, seed};
        return cat(net.seed(), " ", local.seed(), " ", server.seed());
      }).texts();
  CHECK(texts == std::vector<std::string>{"40 40 40", "40 40 40"});
}

}  // namespace no_grad_training_test
