// DistributedDataParallel with real processes: results, agreement and refusals of its ranks.
#include <catch.hpp>
#include <chorus/core/trace.hpp>

#include <unit/parallel/ranks.hpp>

namespace distributed_data_parallel_test {

using namespace test::names;

template <class Model>
void require_same_run(int ranks) {
  static const auto expected = test::train_single<Model>();
  INFO(ranks << " ranks");
  const auto text = common_text(ranks, [](const World& world) { return test::train<Model>(world); });
  REQUIRE_THAT(text, Contains("|"));
  const auto got = test::numbers_in(text);
  REQUIRE(got.size() >= expected.losses.size());
  const auto border = got.begin() + static_cast<std::ptrdiff_t>(expected.losses.size());
  CHECK(distance({got.begin(), border}, expected.losses) < rounding);
  CHECK(distance({border, got.end()}, expected.parameters) < rounding);
  CHECK(common_text(ranks, [](const World& world) { return test::train<Model>(world); }) == text);  // bit by bit
}

/// `Smooth` with one difference.
template <class D>
struct Wider : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 8}, fc3{8, 3};
  CHORUS_MODULE(Wider, fc1, fc2, fc3)
};
template <class D>
struct Renamed : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, hidden{7, 6}, fc3{6, 3};
  CHORUS_MODULE(Renamed, fc1, hidden, fc3)
};
template <class D>
struct Single32 : nn::Module {
  nn::Linear<D, double> fc1{5, 7};
  nn::Linear<D, float> fc2{7, 6};
  nn::Linear<D, double> fc3{6, 3};
  CHORUS_MODULE(Single32, fc1, fc2, fc3)
};
template <class D>
struct Longer : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 6}, fc3{6, 3}, fc4{3, 3};
  CHORUS_MODULE(Longer, fc1, fc2, fc3, fc4)
};
template <class D>
struct Buffered : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 6}, fc3{6, 3};
  nn::BatchNorm<D, double> norm{3};
  CHORUS_MODULE(Buffered, fc1, fc2, fc3, norm)
};

template <class Model>
std::string construct(const World& world) {
  Model model;
  Distributed<Model> rank(world, {}, model);
  return "no error";
}

/// The common error of all ranks if rank 1 of 3 has `Other`, and the others `Smooth`.
template <class Other>
std::string refusal() {
  return common_text(3, [](const World& world) {
    return world.rank == 1 ? construct<Other>(world) : construct<test::Smooth<Cpu>>(world);
  });
}

/// Uses `extra` if the call says so.
template <class D>
struct Optional : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, extra{7, 7}, fc2{7, 3};
  CHORUS_MODULE(Optional, fc1, extra, fc2)
  auto forward(const auto& x, bool use) const {
    auto h = tanh(fc1(x));
    if (use) h = tanh(extra(h));
    return fc2(h);
  }
};

/// Waits, throws or dies in the backward pass of one rank.
template <class D>
struct Troubled : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  CHORUS_MODULE(Troubled, fc1, fc2)
  auto forward(const auto& x, const std::function<void()>& trouble) const {
    const auto h = tanh(fc1(x));
    return fc2(record(
        "trouble", h.value(),
        [trouble](const auto& dy, auto dx) {
          if (trouble) trouble();
          dx->add(dy);
        },
        h));
  }
};

TEST_CASE("ddp: one to four ranks take the steps of one device, bit-identical on all ranks and in every run") {
  for (int ranks = 1; ranks <= 4; ++ranks) require_same_run<test::Smooth<Cpu>>(ranks);
}

TEST_CASE("ddp: dropout masks are those of a single device") {
  require_same_run<test::Dropping<Cpu>>(2);
  require_same_run<test::Dropping<Cpu>>(3);
}

TEST_CASE("ddp: batch norm trains through empty shares, with rank 0's buffers everywhere") {
  const auto run = [](const World& world) {
    Distributed<test::Normed<Cpu>> rank(world);
    auto& net = rank.net;
    optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
    auto losses = test::each_step(
        [&](std::uint32_t number, Index size) { return test::step(net, optimizer, number, size, world); });
    // The next pass sends rank 0's buffers; a batch without samples leaves them unchanged.
    net(numbers(0, 5, 0)).backward(numbers(0, 3, 0));
    auto state = net.module().norm.running_mean.value().to_vector();
    state.push_back(static_cast<double>(net.module().norm.num_batches_tracked.value().item()));
    return test::text_of(losses) + "|" + test::text_of(test::values(net.module())) + "|" + test::text_of(state);
  };
  for (const int ranks : {3, 4}) {
    const auto text = common_text(ranks, run);
    INFO(text);
    REQUIRE_THAT(text, Contains("|") && !Contains("nan") && !Contains("inf"));
    CHECK(test::numbers_in(text.substr(text.rfind('|') + 1)).back() == static_cast<double>(test::sizes.size()));
    CHECK(common_text(ranks, run) == text);
  }
}

TEST_CASE("ddp: all ranks start from rank 0's parameters and buffers") {
  const auto text = common_text(3, [](const World& world) {
    manual_seed(static_cast<std::uint64_t>(world.rank));
    Buffered<Cpu> model;
    model.norm.running_mean.value()(1) = world.rank + 5;
    Distributed<Buffered<Cpu>> rank(world, {}, model);
    return io::parameters_sha256(rank.net.module()) + cat(" ", rank.net.module().norm.running_mean.value()(1));
  });
  manual_seed(0);
  Buffered<Cpu> model;
  CHECK(text == io::parameters_sha256(model) + " 5");
}

TEST_CASE("ddp: all ranks name the first difference of their models") {
  const std::string start = "DistributedDataParallel: expected one model: rank 1 has ";
  CHECK(refusal<Wider<Cpu>>() == start + "fc2.weight F64 [8, 7] where rank 0 has fc2.weight F64 [6, 7]");
  CHECK(refusal<Renamed<Cpu>>() == start + "hidden.weight F64 [6, 7] where rank 0 has fc2.weight F64 [6, 7]");
  CHECK(refusal<Single32<Cpu>>() == start + "fc2.weight F32 [6, 7] where rank 0 has fc2.weight F64 [6, 7]");
  CHECK(refusal<Longer<Cpu>>() == start + "fc4.weight F64 [3, 3] where rank 0 has nothing");
  CHECK(refusal<Buffered<Cpu>>() == start + "norm.weight F64 [3] where rank 0 has nothing");
  const auto frozen = common_text(2, [](const World& world) {
    auto model = make<test::Smooth<Cpu>>();
    if (world.rank == 1) model.fc2.bias.set_requires_grad(false);
    Distributed<test::Smooth<Cpu>> rank(world, {}, model);
    return std::string("no error");
  });
  CHECK(frozen == start + "fc2.bias F64 [6], frozen, where rank 0 has fc2.bias F64 [6]");
}

TEST_CASE("ddp: a model that is frozen altogether is refused") {
  const auto text = common_text(2, [](const World& world) {
    auto model = make<test::Smooth<Cpu>>();
    for (const auto& named : nn::named_parameters<Cpu>(model)) named.parameter->set_wants_grad(false);
    Distributed<test::Smooth<Cpu>> rank(world, {}, model);
    return std::string("no error");
  });
  CHECK(text == "DistributedDataParallel: the model has no parameter that requires a gradient");
}

TEST_CASE("ddp: frozen parameters stay and are not sent") {
  const auto run = [](auto& net, const auto& take_step) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 3; ++number) take_step(net, optimizer, number);
    return test::values(net.module());
  };
  auto model = make<test::Smooth<Cpu>>();
  model.fc2.weight.set_requires_grad(false);
  model.fc3.bias.set_requires_grad(false);
  SingleDevice<test::Smooth<Cpu>> single{std::move(model), 3};
  const auto expected =
      run(single, [](auto& net, auto& optimizer, auto number) { test::step(net, optimizer, number, 7); });
  const auto text = common_text(3, [&](const World& world) {
    auto own = make<test::Smooth<Cpu>>();
    own.fc2.weight.set_requires_grad(false);
    own.fc3.bias.set_requires_grad(false);
    Distributed<test::Smooth<Cpu>> rank(world, {}, own);
    CHECK(rank.net.bucket_bytes() == std::vector<std::size_t>{(35 + 7 + 6 + 18) * sizeof(double)});
    const auto got =
        run(rank.net, [&](auto& net, auto& optimizer, auto number) { test::step(net, optimizer, number, 7, world); });
    return test::text_of(got);
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("ddp: unused parameters are named") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Optional<Cpu>> rank(world);
    const auto x = test::share(numbers(8, 5, 1), world);
    const auto message = message_of<UsageError>([&] { sum(rank.net(x, false)).backward(); });
    const auto expected = cat("DistributedDataParallel: on rank ", world.rank, " no gradient arrived for extra.");
    if (message.find(expected) != 0 || message.find("extra.weight") == std::string::npos ||
        message.find("extra.bias") == std::string::npos || message.find("find_unused_parameters") == std::string::npos)
      return message;
    return message_of<UsageError>([&] { rank.net(x, true); });
  });
  CHECK_THAT(text, Contains("the last backward pass ended early"));
}

TEST_CASE("ddp: a parameter that one rank alone leaves out is named there, and the others soon end") {
  Ranks ranks(3, [](const World& world) {
    Distributed<Optional<Cpu>> rank(world);
    sum(rank.net(test::share(numbers(8, 5, 1), world), world.rank != 1)).backward();
    return std::string("no error");
  });
  const auto start = comm::Clock::now();
  const auto texts = ranks.texts();
  CHECK(comm::Clock::now() - start < 5s);
  CHECK_THAT(texts[1], Contains("on rank 1 no gradient arrived for extra."));
  CHECK_THAT(texts[0], Contains("rank 0: ") && Contains("rank "));
  CHECK_THAT(texts[2], Contains("rank 2: ") && Contains("rank "));
}

TEST_CASE("ddp: accumulating under no_sync equals one big batch, and sends once") {
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  cross_entropy(single(numbers(12, 5, 1)), labels(12, 3, 1)).backward();
  for (const int ranks : {2, 3}) {
    const auto text = common_text(ranks, [](const World& world) {
      Distributed<test::Smooth<Cpu>> rank(world);
      auto& net = rank.net;
      trace::reset_traffic();
      const auto part = [&](Index begin) {
        const auto x = numbers(12, 5, 1).slice(0, begin, begin + 6);
        const auto y = labels(12, 3, 1).slice(0, begin, begin + 6);
        (cross_entropy(net(test::share(x, world)), test::share(y, world)) * 0.5).backward();
      };
      {
        const auto quiet = net.no_sync();
        part(0);
      }
      if (trace::bytes_sent(world.rank, trace::Traffic::gradients) != 0) return std::string("sent too early");
      part(6);
      if (trace::bytes_sent(world.rank, trace::Traffic::gradients) == 0) return std::string("not sent");
      return test::text_of(test::gradients(net.module()));
    });
    CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
  }
}

TEST_CASE("ddp: several forward passes before one backward") {
  SingleDevice<test::Dropping<Cpu>> single{make<test::Dropping<Cpu>>(), 3};
  const auto forward = [](auto& net, const auto& cut) {
    const auto first = net(cut(numbers(8, 5, 1)));
    return mean(first) + mean(net(cut(numbers(8, 5, 2)))) + mean(net(cut(numbers(8, 5, 3))));
  };
  forward(single, [](const auto& x) { return x; }).backward();
  const auto text = common_text(2, [&](const World& world) {
    Distributed<test::Dropping<Cpu>> rank(world);
    forward(rank.net, [&](const auto& x) { return contiguous(test::share(x, world)); }).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
}

TEST_CASE("ddp: the norm of the gradients is the same number on all ranks") {
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  cross_entropy(single(numbers(7, 5, 1)), labels(7, 3, 1)).backward();
  const double expected = optim::clip_grad_norm(single.parameters(), 0.01);
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    cross_entropy(rank.net(test::share(numbers(7, 5, 1), world)), test::share(labels(7, 3, 1), world)).backward();
    const double norm = optim::clip_grad_norm(rank.net.parameters(), 0.01);
    return cat(norm, " ") + test::text_of(test::gradients(rank.net.module()));
  });
  const auto got = test::numbers_in(text);
  REQUIRE(got.size() > 1);
  CHECK(got[0] == Approx(expected).epsilon(1e-12));
  CHECK(distance({got.begin() + 1, got.end()}, test::gradients(single.module())) < rounding);
}

TEST_CASE("ddp: means are over samples, and whether ranks agree is known to all") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    auto& net = rank.net;
    const double nobody = net.mean(std::nan(""), 0);
    const double mean =
        net.mean(world.rank == 2 ? std::nan("") : 10.0 * (world.rank + 1), 2 - world.rank);  // 10, 10, 20
    double sums[2] = {1, static_cast<double>(world.rank)};
    net.sum(sums);
    const bool same = net.same_on_all_ranks("text"), longer = net.same_on_all_ranks(world.rank == 2 ? "texts" : "text"),
               empty = net.same_on_all_ranks(""), other = net.same_on_all_ranks(world.rank == 0 ? "text" : "test");
    return cat(nobody, " ", mean, " ", sums[0], " ", sums[1], " ", same, longer, empty, other);
  });
  CHECK(text == cat("0 ", 40.0 / 3, " 3 3 truefalsetruefalse"));
}

TEST_CASE("ddp: evaluation without gradients exchanges nothing") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Normed<Cpu>> rank(world);
    rank.net.eval();
    const NoGrad no_grad;
    trace::reset_traffic();
    for (int pass = 0; pass < 3 * world.rank; ++pass) rank.net(numbers(4, 5, 1));  // the number may differ by rank
    return cat(trace::bytes_sent(world.rank), " bytes");
  });
  CHECK(text == "0 bytes");
}

TEST_CASE("ddp: a rank that throws in the middle of backward, or between steps, ends all soon") {
  for (const bool in_backward : {true, false}) {
    Ranks ranks(3, [=](const World& world) {
      Distributed<Troubled<Cpu>> rank(world, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5});
      for (int step = 0;; ++step) {
        const bool now = world.rank == 1 && step == 2;
        const auto trouble = [] { throw std::runtime_error("a user's error"); };
        sum(rank.net(test::share(numbers(8, 5, 1), world),
                     now && in_backward ? std::function<void()>(trouble) : nullptr))
            .backward();
        if (now) trouble();
      }
      return std::string("no error");
    });
    const auto start = comm::Clock::now();
    const auto texts = ranks.texts();
    CHECK(comm::Clock::now() - start < 5s);
    CHECK(texts[1] == "a user's error");
    for (const std::size_t rank : {0u, 2u})
      CHECK_THAT(texts[rank], Contains(cat("rank ", rank, ": ")) && Contains("#"));
    CHECK_THAT(texts[0] + texts[2], Contains(in_backward ? "rank 1 gave up: it threw an exception in the middle"
                                                         : "rank 1 has left the group"));
  }
}

TEST_CASE("ddp: a rank that dies in the middle of backward is named by the others") {
  Ranks ranks(3, [](const World& world) {
    Distributed<Troubled<Cpu>> rank(world, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5});
    const std::function<void()> trouble = [] { raise(SIGKILL); };
    sum(rank.net(test::share(numbers(8, 5, 1), world), world.rank == 1 ? trouble : nullptr)).backward();
    return std::string("no error");
  });
  const auto start = comm::Clock::now();
  const auto texts = ranks.texts();
  CHECK(comm::Clock::now() - start < 5s);
  for (const std::size_t rank : {0u, 2u})
    CHECK_THAT(texts[rank], Contains(cat("rank ", rank, ": ")) && Contains("rank 1 is lost"));
}

TEST_CASE("ddp: the parameters and the loss may outlive the net") {
  const auto text = common_text(2, [](const World& world) {
    Variable<double, 0> loss;
    Parameter<double, 2> weight;
    {
      Distributed<test::Smooth<Cpu>> rank(world);
      loss = sum(rank.net(test::share(numbers(8, 5, 1), world)));
      weight = rank.net.module().fc1.weight;
    }
    loss.backward();  // on this rank only
    return std::string(weight.grad().defined() ? "a gradient" : "none");
  });
  CHECK(text == "a gradient");
}

}  // namespace distributed_data_parallel_test
