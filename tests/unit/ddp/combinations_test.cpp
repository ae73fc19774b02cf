// Combinations of DistributedDataParallel's features: join and hooks, join and SyncBatchNorm, no_sync around half an
// iteration, weights that some ranks use twice, backward within backward, buffers that a program replaces.
#include <catch.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_combinations_test {

using namespace test::names;

template <class Net>
auto loss_of(Net& net, const Tensor<double, 2>& x, int key) {
  return cross_entropy(net(x), labels(x.size(0), 3, static_cast<std::uint32_t>(key)));
}

/// Its backward function runs a backward pass of its own, in which fc1 gets a second part of its gradient.
template <class D>
struct Reentrant : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  CHORUS_MODULE(Reentrant, fc1, fc2)
  auto forward(const auto& x) const {
    const auto h = tanh(fc1(x));
    return fc2(record(
        "again", h.value(),
        [this, x](const auto& dy, auto dx) {
          const GradMode recording(true);
          mean(square(fc1(x))).backward();
          dx->add(contiguous(dy));
        },
        h));
  }
};

/// The middle layer is used once or twice.
template <class D>
struct Repeating : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, middle{7, 7}, other{7, 7}, fc2{7, 3};
  CHORUS_MODULE(Repeating, fc1, middle, other, fc2)
  auto forward(const auto& x, bool twice) const {
    const auto h = tanh(middle(tanh(fc1(x))));
    return fc2(twice ? tanh(middle(tanh(other(h)))) : h);
  }
};

/// Fails on one rank, at its third bucket.
struct FailingHook : AllReduce {
  int rank = -1, calls = 0;
  template <class T, class D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    if (communicator.rank() == rank && ++calls == 3) fail<Error>("the hook's own error");
    return AllReduce::start(bucket, communicator);
  }
};

TEST_CASE("ddp: a gradient that comes in several parts is refused by name, and right in a static graph") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Reentrant<Cpu>> rank(world);
    const auto x = test::share(numbers(7, 5, 1), world);
    const auto message = message_of<UsageError>([&] { loss_of(rank.net, x, 1).backward(); });
    return message.substr(message.find(": fc1") == std::string::npos ? 0 : message.find(": fc1"));
  });
  CHECK_THAT(text,
             Contains("received its gradient in several parts in one backward pass") && Contains("set static_graph"));

  const auto train = [](auto& net, const auto& cut) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.2}};
    for (std::uint32_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const auto x = cut(numbers(7, 5, number));
      mean(square(net(x))).backward();
      optimizer.step();
    }
    return test::values(net.module());
  };
  SingleDevice<Reentrant<Cpu>> single{make<Reentrant<Cpu>>(), 3};
  const auto expected = train(single, [](const auto& x) { return x; });
  const auto trained = common_text(2, [&](const World& world) {
    Distributed<Reentrant<Cpu>> rank(world, {.first_bucket_cap_mb = 0, .bucket_cap_mb = 0, .static_graph = true});
    return test::text_of(train(rank.net, [&](const auto& x) { return test::share(x, world); }));
  });
  CHECK(distance(test::numbers_in(trained), expected) < rounding);
}

TEST_CASE("ddp: a layer that some ranks use twice and others once, beside one that they leave out") {
  SingleDevice<Repeating<Cpu>> single{make<Repeating<Cpu>>(), 3};
  const auto text = common_text(2, [](const World& world) {
    Distributed<Repeating<Cpu>> rank(world,
                                     {.first_bucket_cap_mb = 0, .bucket_cap_mb = 0, .find_unused_parameters = true});
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.2}};
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      mean(
          square(rank.net(test::share(numbers(8, 5, static_cast<std::uint32_t>(step)), world), world.rank == step % 2)))
          .backward();
      optimizer.step();
    }
    return test::text_of(test::values(rank.net.module()));
  });
  optim::Sgd optimizer{single.parameters(), {.lr = 0.2}};
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto x = numbers(8, 5, static_cast<std::uint32_t>(step));
    for (const int rank : {0, 1})
      (mean(square(single(contiguous(x.slice(0, 4 * rank, 4 * rank + 4)), rank == step % 2))) * 0.5).backward();
    optimizer.step();
  }
  CHECK(distance(test::numbers_in(text), test::values(single.module())) < rounding);
}

TEST_CASE("no_sync: backward decides, wherever forward was") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    auto& net = rank.net;
    const auto x = test::share(numbers(8, 5, 1), world);
    const auto within = [&](bool quietly, const auto& part) {
      if (!quietly) return part();
      const auto quiet = net.no_sync();
      return part();
    };
    const auto gradients = [&](bool forward_inside, bool backward_inside) {
      for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
      const auto loss = within(forward_inside, [&] { return loss_of(net, x, 1); });
      within(backward_inside, [&] { loss.backward(); });
      return test::gradients(net.module());
    };
    const auto averaged = gradients(false, false);
    const bool as_averaged = gradients(true, false) == averaged;
    const auto own = gradients(false, true);
    return cat(as_averaged, own == gradients(true, true), own != averaged);
  });
  CHECK(text == "truetruetrue");
}

/// Two epochs in which rank r has 1 + 2 r batches; returns the parameters, equal on all ranks.
template <class Hook>
std::string joined(const Hook& hook, const DistributedDataParallelOptions& options = {}) {
  return common_text(3, [=](const World& world) {
    Distributed<test::Smooth<Cpu>, Hook> rank(world, options, make<test::Smooth<Cpu>>(), hook);
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
    for (int epoch = 0; epoch < 2; ++epoch)
      rank.net.join([&] {
        for (int step = 0; step < 1 + 2 * world.rank; ++step) {
          optimizer.zero_grad();
          loss_of(rank.net, numbers(3, 5, static_cast<std::uint32_t>(10 * step + world.rank)), step).backward();
          optimizer.step();
        }
      });
    return test::text_of(test::values(rank.net.module()));
  });
}

TEST_CASE("join: hooks that compress, of one round and of several, work for ranks that have ended") {
  const DistributedDataParallelOptions small{.first_bucket_cap_mb = 1e-4, .bucket_cap_mb = 1e-4};
  const auto exact = test::numbers_in(joined(AllReduce{}));
  REQUIRE(!exact.empty());
  CHECK(distance(test::numbers_in(joined(AllReduce{}, small)), exact) < rounding);
  CHECK(distance(test::numbers_in(joined(Fp16Compress{}, small)), exact) < 2e-3);
  CHECK(distance(test::numbers_in(joined(Bf16Compress{}, small)), exact) < 2e-2);
  // With full rank, PowerSGD is exact.
  CHECK(distance(test::numbers_in(joined(PowerSgd{.matrix_approximation_rank = 7}, small)), exact) < 1e-2);
}

TEST_CASE("join: throw_on_early_termination ends ranks that synchronise batch norm, before it waits for them") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Synced<Cpu>> rank(world);
    return message_of<UsageError>([&] {
      rank.net.join(
          [&] {
            for (int step = 0; step < 2 + world.rank; ++step)
              loss_of(rank.net, numbers(3, 5, static_cast<std::uint32_t>(step)), step).backward();
          },
          {.throw_on_early_termination = true});
    });
  });
  CHECK_THAT(text, Contains("rank 0 has run out of batches"));
}

TEST_CASE("ddp: a forward pass without gradients, of some ranks, between forward and backward changes no weight") {
  const auto steps = [](auto& net, const auto& begin, const auto& end, bool looks) {
    for (std::uint32_t number = 0; number < 2; ++number) {
      const auto loss = mean(square(net(contiguous(numbers(6, 5, number).slice(0, begin, end)))));
      if (looks) {
        const NoGrad scope;
        net(numbers(4, 5, 9));
      }
      loss.backward();
    }
    return test::gradients(net.module());
  };
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  const auto expected = steps(single, 0, 6, false);
  const auto text = common_text(2, [&](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);  // one sample and five
    return test::text_of(steps(rank.net, world.rank, world.rank == 0 ? 1 : 6, world.rank == 1));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("join: a batch that is empty on the ranks that are left keeps what earlier passes have averaged") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    std::string averaged;
    rank.net.join([&] {
      for (int step = 0; step < 1 + world.rank % 2; ++step) {
        const Index rows = step == 0 ? 3 : 0;
        mean(square(rank.net(numbers(rows, 5, static_cast<std::uint32_t>(world.rank))))).backward();
        if (step == 0) averaged = test::text_of(test::gradients(rank.net.module()));
      }
    });
    return averaged + test::text_of(test::gradients(rank.net.module()));
  });
  const auto both = test::numbers_in(text);
  REQUIRE(!both.empty());
  const auto half = both.begin() + static_cast<std::ptrdiff_t>(both.size() / 2);
  CHECK(distance({half, both.end()}, {both.begin(), half}) < rounding);
}

TEST_CASE("ddp: ranks that freeze other parameters are an error on all, also where buckets are as large") {
  for (const bool both : {true, false}) {
    const auto text = common_text(2, [both](const World& world) {
      Distributed<Repeating<Cpu>> rank(world);
      auto& model = rank.net.module();
      const auto x = numbers(3, 5, 1);
      mean(square(rank.net(x, true))).backward();
      if (world.rank == 0) model.middle.weight.set_requires_grad(false);
      if (world.rank == 1 && both) model.other.weight.set_requires_grad(false);
      return message_of<UsageError>([&] { mean(square(rank.net(x, true))).backward(); });
    });
    CHECK_THAT(text,
               Contains("expected one model: rank 1 has") && Contains("rank 0 has") && Contains("weight, frozen,"));
  }
}

TEST_CASE("ddp: a hook that throws on one rank ends all soon, and says why") {
  Ranks ranks(3, [](const World& world) {
    FailingHook hook;
    hook.rank = 1;
    Distributed<test::Smooth<Cpu>, FailingHook> rank(world, {.first_bucket_cap_mb = 0, .bucket_cap_mb = 0},
                                                     make<test::Smooth<Cpu>>(), hook);
    for (int step = 0;; ++step) loss_of(rank.net, numbers(4, 5, static_cast<std::uint32_t>(step)), step).backward();
    return std::string("no error");
  });
  const auto start = comm::Clock::now();
  const auto texts = ranks.texts();
  CHECK(comm::Clock::now() - start < 5s);
  CHECK(texts[1] == "the hook's own error");
  for (const std::size_t rank : {0u, 2u}) CHECK_THAT(texts[rank], Contains("rank 1 gave up"));
}

TEST_CASE("ddp: parameters and buffers that were replaced since the net was built are named") {
  const auto message = [](const auto& replace) {
    return common_text(2, [&](const World& world) {
      Distributed<test::Normed<Cpu>> rank(world, {.find_unused_parameters = true});
      const auto pass = [&] { loss_of(rank.net, test::share(numbers(8, 5, 1), world), 1).backward(); };
      pass();
      replace(rank.net.module());
      return message_of<UsageError>(pass);
    });
  };
  CHECK(message([](auto& model) { model.fc2 = nn::Linear<Cpu, double>(12, 3); }) ==
        "policy: the model's 'fc2.weight' was added or replaced after the policy took the model: write values into the "
        "original");
  CHECK_THAT(message([](auto& model) { model.norm.running_mean = Buffer<double, 1>(Tensor<double, 1>::zeros({3})); }),
             Contains("'norm.running_mean' was added or replaced"));
}

/// A layer may be added and removed.
struct Growing : nn::Module {
  nn::Linear<Cpu, double> first{5, 3};
  std::optional<nn::Linear<Cpu, double>> second;
  CHORUS_MODULE(Growing, first, second)
  auto forward(const auto& x) const { return second ? (*second)(first(x)) : first(x); }
};

TEST_CASE("ddp: parameters that came or went since the net was built are an error") {
  const auto message = [](bool comes) {
    comm::AnyCommunicator alone;
    Growing model;
    if (!comes) model.second.emplace(3, 3);
    DistributedDataParallel<Growing> net{std::move(model), alone};
    if (comes)
      net.module().second.emplace(3, 3);
    else
      net.module().second.reset();
    return message_of<UsageError>([&] { net(numbers(8, 5, 1)); });
  };
  CHECK_THAT(message(true), Contains("'second.weight' was added or replaced after"));
  CHECK_THAT(message(false), Contains("lost 2 parameters and buffers after"));
}

}  // namespace ddp_combinations_test
