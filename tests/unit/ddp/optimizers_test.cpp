// Optimizers for DistributedDataParallel: fused into backward, and with sharded state.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/optim/schedules.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_optimizers_test {

using namespace test::names;

/// The same calls for each form of an optimizer.
void make_groups(auto& optimizer) {
  optimizer.no_decay_on_biases_and_norms();
  optimizer.set_group(optim::NameBegins{"fc2."}, {.lr_scale = 0.25});
}

/// Parameters after some steps with changing learning rate, on one device with the plain optimizer.
template <class Opt>
std::vector<double> plain(const typename Opt::options_type& options, bool grouped = false) {
  SingleDevice<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), 3};
  Opt optimizer{net.parameters(), options};
  if (grouped) make_groups(optimizer);
  for (std::uint32_t number = 0; number < 4; ++number) {
    optimizer.set_lr(options.lr / (1 + number));
    test::step(net, optimizer, number, 7);
  }
  return test::values(net.module());
}

/// The same on ranks, with an optimizer made by `Made{net, options}`.
template <class Made, class Options>
std::string distributed(int ranks, const Options& options, const DistributedDataParallelOptions& net_options = {},
                        bool grouped = false) {
  return common_text(ranks, [=](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, net_options);
    Made optimizer{rank.net, options};
    if (grouped) make_groups(optimizer);
    optim::HasLearningRate& rate = optimizer;  // a schedule's view of it
    for (std::uint32_t number = 0; number < 4; ++number) {
      rate.set_lr(options.lr / (1 + number));
      optimizer.zero_grad();
      cross_entropy(rank.net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world))
          .backward();
      optimizer.step();
    }
    return test::text_of(test::values(rank.net.module()));
  });
}

const optim::SgdOptions sgd{.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01};
const optim::AdamOptions adam{.lr = 0.05, .amsgrad = true};
using Sgd = optim::Sgd<Cpu>;
using Adam = optim::Adam<Cpu>;

template <class D>
struct Part : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, extra{7, 7}, fc2{7, 3};
  CHORUS_MODULE(Part, fc1, extra, fc2)
  auto forward(const auto& x, bool use) const { return use ? fc2(tanh(extra(tanh(fc1(x))))) : fc2(tanh(fc1(x))); }
};

TEST_CASE("fused optimizer: the steps are those of the plain one, in one bucket or many") {
  for (const int ranks : {1, 2, 3})
    for (const double cap : {25.0, 0.0}) {
      const DistributedDataParallelOptions options{.first_bucket_cap_mb = cap, .bucket_cap_mb = cap};
      CHECK(distance(test::numbers_in(distributed<FusedOptimizer<Sgd>>(ranks, sgd, options)), plain<Sgd>(sgd)) <
            rounding);
      CHECK(distance(test::numbers_in(distributed<FusedOptimizer<Adam>>(ranks, adam, options)), plain<Adam>(adam)) <
            rounding);
    }
}

template <class Net>
void check_fused_in_step(Net& net) {
  FusedOptimizer<Sgd> optimizer{net, sgd};
  const optim::HasLearningRate& rate = optimizer;
  CHECK(rate.lr() == sgd.lr);
  for (std::uint32_t number = 0; number < 4; ++number) {
    optimizer.set_lr(sgd.lr / (1 + number));
    optimizer.zero_grad();
    const auto before = test::values(net.module());
    cross_entropy(net(numbers(7, 5, number)), labels(7, 3, number)).backward();
    CHECK(test::values(net.module()) == before);
    optimizer.step();
  }
  CHECK(distance(test::values(net.module()), plain<Sgd>(sgd)) < rounding);
}
TEST_CASE("fused optimizer: in one process it steps in its step") {
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  check_fused_in_step(single);
  DataParallel<test::Smooth<Cpu>> several{make<test::Smooth<Cpu>>(), {.device_ids = {0, 1}}, 3};
  check_fused_in_step(several);
}

TEST_CASE("fused optimizer: parameters have moved when backward ends, and not under no_sync") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    FusedOptimizer<Sgd> optimizer{rank.net, {.lr = 0.3}};
    const auto moved = [&] {
      const auto before = test::values(rank.net.module());
      sum(rank.net(test::share(numbers(8, 5, 1), world))).backward();
      return test::values(rank.net.module()) == before ? "same " : "moved ";
    };
    std::string log = moved();
    optimizer.zero_grad();
    {
      const auto quiet = rank.net.no_sync();
      log += moved();
    }
    return log + moved();
  });
  CHECK(text == "moved same moved ");
}

TEST_CASE("fused optimizer: what no rank uses stays, with find_unused_parameters") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Part<Cpu>> rank(world, {.find_unused_parameters = true});
    FusedOptimizer<Sgd> optimizer{rank.net, {.lr = 0.3, .weight_decay = 0.1}};
    std::string log;
    for (const bool use : {false, true}) {
      optimizer.zero_grad();
      const auto before = rank.net.module().extra.weight.value().to_vector();
      sum(rank.net(test::share(numbers(8, 5, 1), world), use && world.rank == 1)).backward();
      log += rank.net.module().extra.weight.value().to_vector() == before ? "same " : "moved ";
    }
    return log + test::text_of(test::values(rank.net.module()));
  });
  CHECK_THAT(text, Contains("same moved "));
}

TEST_CASE("fused optimizer: parameters that are each rank's own are stepped, too, by this rank's gradient") {
  for (const bool find_unused : {false, true}) {
    const auto texts = Ranks(2, [find_unused](const World& world) {
                         Distributed<Part<Cpu>> rank(world, {.find_unused_parameters = find_unused,
                                                             .parameters_and_buffers_to_ignore = {"fc2.bias"}});
                         FusedOptimizer<Sgd> optimizer{rank.net, {.lr = 0.5}};
                         auto before = rank.net.module().fc2.bias.value().to_vector();
                         (mean(rank.net(numbers(4, 5, 1), true)) * (world.rank + 1.0)).backward();
                         for (double& value : before) value -= 0.5 * (world.rank + 1) / static_cast<double>(before.size());
                         return cat(distance(rank.net.module().fc2.bias.value().to_vector(), before) < rounding);
                       }).texts();
    CHECK(texts == std::vector<std::string>{"true", "true"});
  }
}

TEST_CASE("fused optimizer: goes with no NonFinite policy, and leaves the net as it was") {
  comm::AnyCommunicator alone;
  DistributedDataParallel<test::Smooth<Cpu>> strict{
      make<test::Smooth<Cpu>>(), alone, {.non_finite = NonFinite::skip_step}};
  CHECK_THAT(message_of<UsageError>([&] { FusedOptimizer<Sgd> optimizer(strict, {}); }), Contains("NonFinite"));
  DistributedDataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), alone};
  { FusedOptimizer<Sgd> optimizer{net, {.lr = 0.3}}; }
  const auto before = test::values(net.module());
  sum(net(numbers(8, 5, 1))).backward();
  CHECK(test::values(net.module()) == before);
}

TEST_CASE("fused optimizer: groups are made between steps without a step, under every policy") {
  const auto check_net = [](auto& net) {
    FusedOptimizer<Sgd> optimizer{net, {.lr = 0.3}};
    sum(net(numbers(8, 5, 1))).backward();
    const auto before = test::values(net.module());
    optimizer.no_decay_on_biases_and_norms();
    CHECK((test::values(net.module()) == before));  // a failure prints only a bool
  };
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  check_net(single);
  DataParallel<test::Smooth<Cpu>> dp{make<test::Smooth<Cpu>>(), {.device_ids = {0, 1}}, 3};
  check_net(dp);
  comm::AnyCommunicator alone;
  DistributedDataParallel<test::Smooth<Cpu>> ddp{make<test::Smooth<Cpu>>(), alone, {}, 3};
  check_net(ddp);
}

TEST_CASE("sharded optimizer: the steps are those of the plain one") {
  // 111 numbers: shares of 3 ranks are even, those of 2 and 4 are not.
  for (const int ranks : {1, 2, 3, 4}) {
    INFO(ranks << " ranks");
    CHECK(distance(test::numbers_in(distributed<ShardedOptimizer<Sgd>>(ranks, sgd)), plain<Sgd>(sgd)) < rounding);
    CHECK(distance(test::numbers_in(distributed<ShardedOptimizer<Adam>>(ranks, adam)), plain<Adam>(adam)) < rounding);
  }
}

TEST_CASE("fused and sharded optimizer: groups are those of the plain one, also where a rank has none of them") {
  const optim::SgdOptions decaying{.lr = 0.3, .momentum = 0.9, .weight_decay = 0.2};
  const auto expected = plain<Sgd>(decaying, true);
  REQUIRE(distance(expected, plain<Sgd>(decaying)) > 0.01);
  for (const int ranks : {1, 2, 4})
    for (const double cap : {25.0, 0.0}) {
      INFO(ranks << " ranks, buckets of " << cap << " MB");
      const DistributedDataParallelOptions options{.first_bucket_cap_mb = cap, .bucket_cap_mb = cap};
      const auto check = [&]<class Made>() {
        const auto text = distributed<Made>(ranks, decaying, options, true);
        CHECK(distance(test::numbers_in(text), expected) < rounding);
      };
      check.operator()<FusedOptimizer<Sgd>>();
      check.operator()<ShardedOptimizer<Sgd>>();
    }
}

TEST_CASE("fused and sharded optimizer: groups that make no sense are refused, and later ones hold in later steps") {
  comm::AnyCommunicator alone;
  const auto check = [&]<class Made>() {
    DistributedDataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), alone, {}, 3};
    Made optimizer{net, {.lr = 0.3}};
    const auto refused = [&](const std::string& name, const optim::GroupOptions& options) {
      return message_of<UsageError>([&] { optimizer.set_group(optim::NameBegins{name}, options); });
    };
    CHECK(refused("none", {}) == "optimizer: the group has no parameters");
    CHECK_THAT(refused("fc1.", {.lr_scale = -1}), Contains("of at least 0, got -1"));
    const auto moved = [&] {
      const auto before = net.module().fc1.weight.value().to_vector();
      optimizer.zero_grad();
      sum(net(numbers(8, 5, 1))).backward();
      optimizer.step();
      return net.module().fc1.weight.value().to_vector() != before;
    };
    CHECK(moved());
    optimizer.set_group(optim::NameBegins{"fc1."}, {.lr_scale = 0});
    CHECK_FALSE(moved());
  };
  check.operator()<FusedOptimizer<Sgd>>();
  check.operator()<ShardedOptimizer<Sgd>>();
}

TEST_CASE("sharded optimizer: each of n ranks holds an n-th of the state, and sends (n-1)/n of the parameters") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    ShardedOptimizer<Adam> optimizer{rank.net, {.lr = 0.1}};
    sum(rank.net(test::share(numbers(8, 5, 1), world))).backward();
    trace::reset_traffic();
    optimizer.step();
    std::size_t numbers_held = 0;
    for (const auto& tensor : optimizer.state())
      if (tensor.dtype == DType::f64) numbers_held += tensor.part_count.value_or(0);
    return cat(numbers_held, " ", trace::bytes_sent(world.rank, trace::Traffic::parameters) / 8);
  });
  CHECK(text == cat(2 * 37, " ", 2 * 37));
}

TEST_CASE("sharded optimizer: a step that no rank needs changes nothing; own parameters and gradients are refused") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    ShardedOptimizer<Sgd> optimizer{rank.net, {.lr = 0.3, .weight_decay = 0.1}};
    const auto before = test::values(rank.net.module());
    optimizer.step();
    return cat(test::values(rank.net.module()) == before);
  });
  CHECK(text == "true");
  comm::AnyCommunicator alone;
  DistributedDataParallel<test::Smooth<Cpu>> net{
      make<test::Smooth<Cpu>>(), alone, {.parameters_and_buffers_to_ignore = {"fc1.bias"}}};
  CHECK_THAT(message_of<UsageError>([&] { ShardedOptimizer<Sgd> optimizer(net, {}); }), Contains("own"));
  const auto refused = [&](auto hook) {
    DistributedDataParallel<test::Smooth<Cpu>, decltype(hook)> other{make<test::Smooth<Cpu>>(), alone};
    CHECK_THAT(message_of<UsageError>([&] { ShardedOptimizer<Sgd> optimizer(other, {}); }),
               Contains("expected a hook that averages gradients"));
  };
  refused(PostLocalSgd{});
  refused(NoCommunication{});
}

}  // namespace ddp_optimizers_test
