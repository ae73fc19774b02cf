// Edge cases of DistributedDataParallel: outputs and parameters of size 0, unused outputs, hooks, empty shares, grad,
// several nets on one communicator.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/ops/higher_order.hpp>
#include <map>
#include <tuple>

#include <unit/parallel/ranks.hpp>

namespace ddp_edges_test {

using namespace test::names;

constexpr double edge_rounding = 1e-12;

/// Two heads.
template <class D>
struct TwoHeads : nn::Module {
  nn::Linear<D, double> body{5, 7}, left{7, 3}, right{7, 3};
  CHORUS_MODULE(TwoHeads, body, left, right)
  auto forward(const auto& x) const {
    const auto h = tanh(body(x));
    return std::pair(left(h), right(h));
  }
};

/// A weight without outputs next to a normal one.
template <class D>
struct NoWidth : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  Parameter<double, 2, D> none{Tensor<double, 2, D>::empty({7, 0})};
  CHORUS_MODULE(NoWidth, fc1, none, fc2)
  auto forward(const auto& x) const {
    const auto h = tanh(fc1(x));
    return std::pair(fc2(h), matmul(h, none));
  }
};

/// Its backward function gives `gated` a gradient if the call says so.
template <class D>
struct Gated : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, gated{7, 3};
  CHORUS_MODULE(Gated, fc1, gated)
  auto forward(const auto& x, bool open) const {
    const auto y = gated(tanh(fc1(x)));
    return record(
        "gate", y.value(),
        [open](const auto& dy, auto dx) {
          if (open) dx->add(contiguous(dy));
        },
        y);
  }
};

template <class D>
struct Scores : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 1};
  CHORUS_MODULE(Scores, fc1, fc2)
  auto forward(const auto& x) const { return fc2(tanh(fc1(x))); }
};
template <class D>
struct Makes : nn::Module {
  nn::Linear<D, double> fc{4, 5};
  CHORUS_MODULE(Makes, fc)
  auto forward(const auto& x) const { return tanh(fc(x)); }
};

void forget_gradients(const auto& net) {
  for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
}

/// Rows [begin, end) of a batch, by rank.
Tensor<double, 2> rows(const Tensor<double, 2>& x, const std::vector<Index>& sizes, int rank) {
  Index begin = 0;
  for (int r = 0; r < rank; ++r) begin += sizes[static_cast<std::size_t>(r)];
  return contiguous(x.slice(0, begin, begin + sizes[static_cast<std::size_t>(rank)]));
}

TEST_CASE("ddp edges: an output that the loss leaves out gives its parameters no gradient, then the old one stays") {
  for (const bool is_static : {false, true}) {
    INFO("static " << is_static);
    const auto run = [](auto& net, const auto& cut) {
      std::vector<double> out;
      for (std::uint32_t number = 0; number < 3; ++number) {
        const auto [left, right] = net(cut(numbers(8, 5, number)));
        mean(square(left)).backward();
        out.push_back(net.module().right.weight.grad().defined() ? 1 : 0);
      }
      for (const double g : test::gradients(net.module())) out.push_back(g);
      return out;
    };
    SingleDevice<TwoHeads<Cpu>> single{make<TwoHeads<Cpu>>(), 3};
    const auto expected = run(single, [](const auto& x) { return x; });
    const auto text = common_text(2, [&](const World& world) {
      Distributed<TwoHeads<Cpu>> rank(world, {.find_unused_parameters = !is_static, .static_graph = is_static});
      return test::text_of(run(rank.net, [&](const auto& x) { return test::share(x, world); }));
    });
    CHECK(distance(test::numbers_in(text), expected) < edge_rounding);
  }
  // Used once, then skipped: its gradient stays, as on one device.
  const auto text = common_text(2, [](const World& world) {
    Distributed<TwoHeads<Cpu>> rank(world, {.find_unused_parameters = true});
    const auto pass = [&](bool both) {
      const auto [left, right] = rank.net(test::share(numbers(8, 5, 1), world));
      (both ? mean(left) + mean(right) : mean(left)).backward();
      return rank.net.module().right.weight.grad().to_vector();
    };
    const auto first = pass(true);
    return cat(first == pass(false), first == pass(false));
  });
  CHECK(text == "truetrue");
}

TEST_CASE("ddp edges: outputs of no size, and parameters without numbers, do no harm") {
  const auto run = [](auto& net, const auto& cut) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const auto [y, empty] = net(cut(numbers(8, 5, number)));
      CHECK(empty.numel() == 0);
      (mean(square(y)) + sum(empty)).backward();
      optimizer.step();
    }
    return test::values(net.module());
  };
  SingleDevice<NoWidth<Cpu>> single{make<NoWidth<Cpu>>(), 3};
  const auto expected = run(single, [](const auto& x) { return x; });
  for (const double cap : {25.0, 0.0}) {  // with 0, an empty bucket
    const auto text = common_text(2, [&](const World& world) {
      Distributed<NoWidth<Cpu>> rank(world, {.first_bucket_cap_mb = cap, .bucket_cap_mb = cap});
      return test::text_of(run(rank.net, [&](const auto& x) { return test::share(x, world); }));
    });
    CHECK(distance(test::numbers_in(text), expected) < edge_rounding);
  }
}

TEST_CASE("ddp edges: a hook on a parameter runs once a pass, with this rank's gradient, before it is averaged") {
  const auto texts =
      Ranks(2, [](const World& world) -> std::string {
        auto model = make<Scores<Cpu>>();
        std::vector<std::vector<double>> seen;
        model.fc1.weight.register_hook([&](const auto& gradient) { seen.push_back(gradient.to_vector()); });
        Distributed<Scores<Cpu>> rank(world, {}, model);
        rank.net.module().fc2.weight.register_hook([](const auto& gradient) { return gradient * 2.0; });
        SingleDevice<Scores<Cpu>> alone{make<Scores<Cpu>>(), 3};
        for (std::uint32_t number = 0; number < 2; ++number) {
          forget_gradients(rank.net);
          forget_gradients(alone);
          const auto x = contiguous(test::share(numbers(8, 5, number), world));
          mean(rank.net(x)).backward();
          mean(alone(x)).backward();
          if (seen.size() != number + 1) return cat(seen.size(), " calls");
          if (distance(seen.back(), alone.module().fc1.weight.grad().to_vector()) > edge_rounding)
            return "not this rank's gradient";
          if (distance(seen.back(), rank.net.module().fc1.weight.grad().to_vector()) < 1e-6) return "not averaged";
        }
        return test::text_of(rank.net.module().fc2.weight.grad().to_vector());
      }).texts();
  // The average is taken of the other hook's results for each rank's gradient.
  SingleDevice<Scores<Cpu>> single{make<Scores<Cpu>>(), 3};
  mean(single(numbers(8, 5, 1))).backward();
  auto expected = single.module().fc2.weight.grad().to_vector();
  for (double& g : expected) g *= 2;
  INFO(texts[0]);
  CHECK(texts[0] == texts[1]);
  CHECK(distance(test::numbers_in(texts[0]), expected) < edge_rounding);
}

TEST_CASE("ddp edges: a backward function that gives no gradient counts as zeros, not as the last step's") {
  const auto expected = [](bool rank1_open) {
    SingleDevice<Gated<Cpu>> single{make<Gated<Cpu>>(), 3};
    for (int rank = 0; rank < 2; ++rank)
      if (rank == 0 || rank1_open)
        (mean(single(contiguous(test::share(numbers(8, 5, 2), World{.rank = rank, .size = 2})), true)) * 0.5)
            .backward();
    return test::gradients(single.module());
  };
  for (const bool find_unused : {false, true}) {
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Gated<Cpu>> rank(world, {.find_unused_parameters = find_unused});
      const auto pass = [&](std::uint32_t number, bool open) {
        forget_gradients(rank.net);
        mean(rank.net(test::share(numbers(8, 5, number), world), open)).backward();
        return test::text_of(test::gradients(rank.net.module()));
      };
      pass(1, true);
      const auto one = pass(2, world.rank == 0);  // closed on rank 1
      const auto none = pass(3, false);           // closed on both
      return one + "|" + none + "|" + cat(rank.net.module().gated.weight.grad().defined());
    });
    INFO(text);
    const auto bar = text.find('|');
    REQUIRE(bar != std::string::npos);
    CHECK(distance(test::numbers_in(text.substr(0, bar)), expected(false)) < edge_rounding);
    for (const double g : test::numbers_in(text.substr(bar + 1))) CHECK(g == 0);
    // If parameters may be unused, one without a gradient on any rank has none.
    CHECK_THAT(text, Catch::Matchers::EndsWith(find_unused ? "false" : "true"));
  }
}

TEST_CASE("ddp edges: rank 0 may have no samples, and a batch may be empty on all ranks") {
  const std::vector<Index> sizes{0, 3, 4};
  SingleDevice<Scores<Cpu>> single{make<Scores<Cpu>>(), 3};
  mean(single(numbers(7, 5, 1))).backward();
  const auto text = common_text(3, [&](const World& world) {
    Distributed<Scores<Cpu>> rank(world);
    mean(rank.net(rows(numbers(7, 5, 1), sizes, world.rank))).backward();
    const auto got = test::text_of(test::gradients(rank.net.module()));
    forget_gradients(rank.net);
    sum(rank.net(numbers(0, 5, 2))).backward();
    for (const double g : test::gradients(rank.net.module()))
      if (g != 0) return cat("an empty batch has the gradient ", g);
    return got;
  });
  INFO(text);
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < edge_rounding);
}

TEST_CASE("ddp edges: backward twice through a graph that is retained averages twice") {
  SingleDevice<Scores<Cpu>> single{make<Scores<Cpu>>(), 3};
  const auto twice = [](auto& net, const auto& x) {
    const auto loss = mean(net(x));
    loss.backward(true);
    loss.backward();
    return test::gradients(net.module());
  };
  const auto expected = twice(single, numbers(7, 5, 1));
  const auto text = common_text(3, [&](const World& world) {
    Distributed<Scores<Cpu>> rank(world);
    return test::text_of(twice(rank.net, contiguous(test::share(numbers(7, 5, 1), world))));
  });
  CHECK(distance(test::numbers_in(text), expected) < edge_rounding);
}

TEST_CASE("ddp edges: no_sync inside of no_sync sends nothing until both have ended, and no buffers") {
  const auto text = common_text(2, [](const World& world) -> std::string {
    Distributed<test::Normed<Cpu>> rank(world);
    auto& net = rank.net;
    const auto sent = [&] {
      return trace::bytes_sent(world.rank, trace::Traffic::gradients) +
             trace::bytes_sent(world.rank, trace::Traffic::buffers);
    };
    const auto pass = [&](std::uint32_t number) {
      mean(square(net(test::share(numbers(8, 5, number), world)))).backward();
    };
    trace::reset_traffic();
    {
      const auto outer = net.no_sync();
      pass(1);
      {
        const auto inner = net.no_sync();
        pass(2);
      }
      pass(3);
      if (sent() != 0) return cat(sent(), " bytes too early");
    }
    pass(4);
    if (trace::bytes_sent(world.rank, trace::Traffic::gradients) == 0) return "not sent";
    return test::text_of(test::gradients(net.module()));
  });
  CHECK(test::numbers_in(text).size() > 10);
}

TEST_CASE("ddp edges: frozen parameters that a program changes between steps are used as they are") {
  const auto run = [](auto& net, const auto& take_step) {
    auto& m = net.module();
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 4; ++number) {
      for (double& v : std::span(m.fc2.weight.value().data(), 42)) v *= 0.9;
      take_step(net, optimizer, number);
    }
    return test::values(m);
  };
  const auto frozen = [] {
    auto model = make<test::Smooth<Cpu>>();
    model.fc2.weight.set_requires_grad(false);
    return model;
  };
  SingleDevice<test::Smooth<Cpu>> single{frozen(), 3};
  const auto expected =
      run(single, [](auto& net, auto& optimizer, auto number) { test::step(net, optimizer, number, 7); });
  const auto text = common_text(3, [&](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, {}, frozen());
    return test::text_of(
        run(rank.net, [&](auto& net, auto& optimizer, auto number) { test::step(net, optimizer, number, 7, world); }));
  });
  CHECK(distance(test::numbers_in(text), expected) < edge_rounding);
}

TEST_CASE("ddp edges: grad gives this rank's own gradient, sends nothing, and leaves backward as it was") {
  SingleDevice<Scores<Cpu>> single{make<Scores<Cpu>>(), 3};
  mean(single(numbers(8, 5, 1))).backward();
  const auto text = common_text(2, [](const World& world) -> std::string {
    Distributed<Scores<Cpu>> rank(world);
    SingleDevice<Scores<Cpu>> alone{make<Scores<Cpu>>(), 3};
    const auto x = contiguous(test::share(numbers(8, 5, 1), world));
    const auto loss = mean(rank.net(x));
    trace::reset_traffic();
    const auto own = grad(loss, rank.net.module().fc1.weight, {.retain_graph = true});
    if (trace::bytes_sent(world.rank) != 0) return "sent";
    mean(alone(x)).backward();
    if (distance(own.to_vector(), alone.module().fc1.weight.grad().to_vector()) > edge_rounding) return "not its own";
    loss.backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < edge_rounding);
}

TEST_CASE("ddp edges: a gradient penalty from outside of the model takes the steps of one device") {
  const auto steps = [](auto& net, const auto& cut) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const GraphVariable x(cut(numbers(7, 5, number)), true);
      const auto score = net(x);
      const auto slope = grad(sum(score), x, {.create_graph = true});
      (mean(score) + 10 * mean(square(sqrt(sum(square(slope), 1) + 1e-12) - 1))).backward();
      optimizer.step();
    }
    return test::values(net.module());
  };
  SingleDevice<Scores<Cpu>> single{make<Scores<Cpu>>(), 3};
  const auto expected = steps(single, [](const auto& x) { return x; });
  const auto text = common_text(3, [&](const World& world) {
    Distributed<Scores<Cpu>> rank(world);
    return test::text_of(steps(rank.net, [&](const auto& x) { return contiguous(test::share(x, world)); }));
  });
  CHECK(distance(test::numbers_in(text), expected) < edge_rounding);
}

TEST_CASE("ddp edges: two nets on one communicator, one after the other and one behind the other") {
  const auto steps = [](auto& makes, auto& scores, const auto& cut) {
    optim::Sgd first{makes.parameters(), {.lr = 0.1, .momentum = 0.9}};
    optim::Sgd second{scores.parameters(), {.lr = 0.1, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 4; ++number) {
      const auto z = cut(numbers(7, 4, number));
      second.zero_grad();
      (mean(scores(cut(numbers(7, 5, number)))) - mean(scores(makes(z).value()))).backward();
      second.step();
      first.zero_grad();
      mean(square(scores(makes(z)))).backward();  // through both nets
      first.step();
    }
    auto out = test::values(makes.module());
    for (const double v : test::values(scores.module())) out.push_back(v);
    return out;
  };
  SingleDevice<Makes<Cpu>> one{make<Makes<Cpu>>(1), 3};
  SingleDevice<Scores<Cpu>> other{make<Scores<Cpu>>(2), 3};
  const auto expected = steps(one, other, [](const auto& x) { return x; });
  const auto text = common_text(3, [&](const World& world) {
    auto communicator = comm::connect(world);
    const DistributedDataParallelOptions small{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0};
    DistributedDataParallel<Makes<Cpu>> makes{make<Makes<Cpu>>(1), communicator, small, 3};
    DistributedDataParallel<Scores<Cpu>> scores{make<Scores<Cpu>>(2), communicator, small, 3};
    return test::text_of(steps(makes, scores, [&](const auto& x) { return contiguous(test::share(x, world)); }));
  });
  CHECK(distance(test::numbers_in(text), expected) < edge_rounding);
}

TEST_CASE("ddp edges: a sum is a sum, whose gradients are added") {
  SingleDevice<Scores<Cpu>> single{make<Scores<Cpu>>(), 3};
  sum(single(numbers(8, 5, 1))).backward();
  const auto text = common_text(2, [](const World& world) {
    Distributed<Scores<Cpu>> rank(world);
    sum(rank.net(test::share(numbers(8, 5, 1), world))).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < edge_rounding);
}

/// Its outputs are in nested containers.
template <class D>
struct Nested : nn::Module {
  nn::Linear<D, double> body{5, 7}, a{7, 3}, b{7, 3}, c{7, 3};
  CHORUS_MODULE(Nested, body, a, b, c)
  auto forward(const auto& x) const {
    const auto h = tanh(body(x));
    const std::vector list{a(h), b(h)};
    return std::tuple(list, std::map<std::string, std::vector<std::remove_cvref_t<decltype(c(h))>>>{{"c", {c(h)}}});
  }
};
TEST_CASE("ddp edges: outputs in tuples, lists and maps train as on one device, in a static graph, too") {
  const auto train = [](auto& net, const auto& batch) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (std::uint32_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const auto [list, named] = net(batch(number));
      (mean(square(list[0])) + mean(list[1]) + mean(square(named.at("c")[0]))).backward();
      optimizer.step();
    }
    return test::values(net.module());
  };
  SingleDevice<Nested<Cpu>> single{make<Nested<Cpu>>(), 3};
  const auto expected = train(single, [](auto number) { return numbers(7, 5, number); });
  for (const bool is_static : {false, true}) {
    const auto text = common_text(3, [&](const World& world) {
      Distributed<Nested<Cpu>> rank(world, {.find_unused_parameters = !is_static, .static_graph = is_static});
      return test::text_of(
          train(rank.net, [&](auto number) { return contiguous(test::share(numbers(7, 5, number), world)); }));
    });
    CHECK(distance(test::numbers_in(text), expected) < edge_rounding);
  }
}

}  // namespace ddp_edges_test
