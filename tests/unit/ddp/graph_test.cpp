// DistributedDataParallel with special graphs: static_graph, unused parameters, non-finite gradients, and micro-batches
// of different sizes.
#include <catch.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_graph_test {

using namespace test::names;

/// Uses the layers that the call names; never `never`.
template <class D>
struct Parts : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, never{7, 7}, extra{7, 7}, fc2{7, 3};
  CHORUS_MODULE(Parts, fc1, never, extra, fc2)
  auto forward(const auto& x, bool use_extra) const {
    auto h = tanh(fc1(x));
    if (use_extra) h = tanh(extra(h));
    return fc2(h);
  }
};

template <class Net>
void backward(Net& net, const World& world, std::uint32_t number, bool use_extra) {
  cross_entropy(net(test::share(numbers(7, 5, number), world), use_extra), test::share(labels(7, 3, number), world))
      .backward();
}

/// Its backward multiplies the gradient by the function's result.
template <class D>
struct Spoiled : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  CHORUS_MODULE(Spoiled, fc1, fc2)
  auto forward(const auto& x, double factor) const {
    const auto h = tanh(fc1(x));
    return fc2(record(
        "spoil", h.value(),
        [factor](const auto& dy, auto dx) {
          auto grad = contiguous(dy);
          for (Index i = 0; i < grad.numel(); ++i) grad.data()[i] *= factor;
          dx->add(grad);
        },
        h));
  }
};

/// Takes its arguments by name.
struct Named {
  Tensor<double, 2> x;
  double factor;
  auto fields() { return std::tie(x, factor); }
};
template <class D>
struct TakesNamed : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(TakesNamed, fc)
  auto forward(const Named& named) const { return mean(tanh(fc(named.x))) * named.factor; }
};

TEST_CASE("ddp: samples count, and so weigh, inside of a struct") {
  SingleDevice<TakesNamed<Cpu>> single{make<TakesNamed<Cpu>>(), 3};
  single.mean_loss(single(Named{numbers(7, 5, 1), 2})).backward();
  const auto text = common_text(3, [](const World& world) {
    Distributed<TakesNamed<Cpu>> rank(world);
    rank.net.mean_loss(rank.net(Named{contiguous(test::share(numbers(7, 5, 1), world)), 2})).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
}

TEST_CASE("static graph: a gradient by a parameter that was frozen in the first pass is named") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Parts<Cpu>> rank(world, {.static_graph = true});
    auto& weight = rank.net.module().extra.weight;
    weight.set_requires_grad(false);
    backward(rank.net, world, 1, true);
    weight.set_requires_grad(true);
    const auto message = message_of<UsageError>([&] { backward(rank.net, world, 2, true); });
    return message.substr(message.find("extra"));
  });
  CHECK_THAT(text, Catch::Matchers::StartsWith("extra.weight received a gradient, but not in the first backward pass"));
}

TEST_CASE("static graph: what no rank uses is dropped, what some use is averaged") {
  // Only rank 1 uses `extra`, in every pass.
  const auto text = common_text(3, [](const World& world) {
    Distributed<Parts<Cpu>> rank(world, {.static_graph = true});
    auto& net = rank.net;
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.1}};
    for (std::uint32_t number = 0; number < 4; ++number) {
      optimizer.zero_grad();
      backward(net, world, number, world.rank == 1);
      if (net.module().never.weight.grad().defined()) return std::string("a gradient for what nobody used");
      if (!net.module().extra.weight.grad().defined()) return std::string("no gradient for what rank 1 used");
      optimizer.step();
    }
    std::size_t bytes = 0;
    for (const auto bucket : net.bucket_bytes()) bytes += bucket;
    if (bytes != (42 + 56 + 24) * sizeof(double)) return cat(bytes, " bytes in buckets");
    return test::text_of(test::values(net.module()));
  });
  SingleDevice<Parts<Cpu>> single{make<Parts<Cpu>>(), 3};
  optim::Sgd optimizer{single.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.1}};
  for (std::uint32_t number = 0; number < 4; ++number) {
    optimizer.zero_grad();
    for (int rank = 0; rank < 3; ++rank) {
      const World world{.rank = rank, .size = 3};
      const auto x = test::share(numbers(7, 5, number), world);
      (cross_entropy(single(x, rank == 1), test::share(labels(7, 3, number), world)) *
       (static_cast<double>(x.size(0)) / 7))
          .backward();
    }
    optimizer.step();
  }
  INFO(text);
  CHECK(distance(test::numbers_in(text), test::values(single.module())) < rounding);
}

TEST_CASE("static graph: a graph that changes is refused, and the parameters named") {
  const auto later = [](bool first, bool then) {
    return Ranks(2,
                 [=](const World& world) {
                   Distributed<Parts<Cpu>> rank(world, {.static_graph = true});
                   backward(rank.net, world, 1, first);
                   return message_of<Error>([&] { backward(rank.net, world, 2, then); });
                 })
        .texts()[1];
  };
  CHECK_THAT(later(true, false), Contains("rank 1: no gradient, or only a part, arrived for extra.") &&
                                     Contains("static_graph all passes must use the same parameters"));
  CHECK_THAT(later(false, true), Contains("rank 1: extra.") && Contains("not in the first backward pass"));
}

TEST_CASE("static graph: without it, a parameter that is never used is named with the options that help") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<Parts<Cpu>> rank(world);
                       return message_of<UsageError>([&] { backward(rank.net, world, 1, true); });
                     }).texts();
  CHECK_THAT(texts[0], Contains("never.weight") && Contains("never.bias") && Contains("set find_unused_parameters") &&
                           Contains("set_requires_grad(false)"));
}

TEST_CASE("ddp: an output that the loss doesn't use leaves its parameters without a gradient, on all ranks") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Parts<Cpu>> rank(world, {.find_unused_parameters = true});
    const auto& m = rank.net.module();
    std::string state;
    for (std::uint32_t number = 0; number < 3; ++number) {
      backward(rank.net, world, number, number == 1);
      state +=
          cat(m.never.weight.grad().defined(), m.extra.weight.grad().defined(), m.fc2.weight.grad().defined(), " ");
    }
    return state;
  });
  CHECK(text == "falsefalsetrue falsetruetrue falsetruetrue ");  // it stays, since zero_grad was not called
}

TEST_CASE("non-finite: a NaN on one rank is named, with the parameter, on all ranks") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<Spoiled<Cpu>> rank(world, {.non_finite = NonFinite::throw_error});
    const auto step = [&](double factor) { sum(rank.net(test::share(numbers(7, 5, 1), world), factor)).backward(); };
    step(1);
    return message_of<NonFiniteError>([&] { step(world.rank == 1 ? NAN : 1); });
  });
  CHECK_THAT(text, Contains("the averaged gradient of fc1.") && Contains("is not finite; its source: fc1.") &&
                       Contains(" on rank 1") && !Contains("rank 0") && !Contains("rank 2"));
}

TEST_CASE("non-finite: skipped steps are skipped on all ranks, and counted") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<Spoiled<Cpu>> rank(world, {.non_finite = NonFinite::skip_step});
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    std::string log;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const bool bad = (step == 1 && world.rank == 2) || (step == 3 && world.rank == 0);
      sum(rank.net(test::share(numbers(7, 5, 1), world), bad ? INFINITY : 1)).backward();
      const auto before = test::values(rank.net.module());
      optimizer.step();
      log += test::values(rank.net.module()) == before ? "same " : "moved ";
    }
    return log + cat(rank.net.skipped_steps());
  });
  CHECK(text == "moved same moved same 2");
}

TEST_CASE("non-finite: by default it goes to all ranks") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Spoiled<Cpu>> rank(world);
    sum(rank.net(test::share(numbers(7, 5, 1), world), world.rank == 1 ? NAN : 1)).backward();
    return cat(std::isnan(rank.net.module().fc1.weight.grad()(0, 0)));
  });
  CHECK(text == "true");
}

TEST_CASE("no_sync: micro-batches of uneven sizes on each rank weigh as on one device") {
  // Sizes of the ranks' parts of three micro-batches; rank 2 has no samples in one of them.
  const std::vector<std::vector<Index>> parts{{3, 1, 2}, {1, 4, 0}, {2, 2, 5}};
  for (const std::size_t last : {1u, 2u}) {  // the pass that synchronises
    const auto text = common_text(3, [&](const World& world) {
      Distributed<test::Smooth<Cpu>> rank(world);
      const auto pass = [&](std::size_t k) {
        Index begin = 0, size = parts[k][static_cast<std::size_t>(world.rank)];
        for (int r = 0; r < world.rank; ++r) begin += parts[k][static_cast<std::size_t>(r)];
        const auto key = static_cast<std::uint32_t>(k);
        cross_entropy(rank.net(numbers(9, 5, key).slice(0, begin, begin + size)),
                      labels(9, 3, key).slice(0, begin, begin + size))
            .backward();
      };
      for (int round = 0; round < 2; ++round) {  // the second time on top of averaged gradients
        {
          const auto quiet = rank.net.no_sync();
          for (std::size_t k = 0; k < last; ++k) pass(k);
        }
        pass(last);
      }
      return test::text_of(test::gradients(rank.net.module()));
    });
    SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
    for (int round = 0; round < 2; ++round)
      for (std::size_t k = 0; k <= last; ++k) {
        const Index size = parts[k][0] + parts[k][1] + parts[k][2];
        const auto key = static_cast<std::uint32_t>(k);
        cross_entropy(single(contiguous(numbers(9, 5, key).slice(0, 0, size))),
                      contiguous(labels(9, 3, key).slice(0, 0, size)))
            .backward();
      }
    INFO(text);
    CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
  }
}

}  // namespace ddp_graph_test
