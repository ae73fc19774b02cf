// DistributedDataParallel's find_unused_parameters: gradients that nobody has are not sent, and the warning where all
// are always there.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_unused_test {

using namespace test::names;

/// Three layers that a pass may go through or not, bit by bit of `use`.
template <class D>
struct Gated : nn::Module {
  nn::Linear<D, double> in{5, 7}, first{7, 7}, second{7, 7}, third{7, 7}, out{7, 3};
  CHORUS_MODULE(Gated, in, first, second, third, out)
  auto forward(const auto& x, int use) const {
    auto h = tanh(in(x));
    if (use & 1) h = tanh(first(h));
    if (use & 2) h = tanh(second(h));
    if (use & 4) h = tanh(third(h));
    return out(h);
  }
};
constexpr std::size_t gate_bytes = (7 * 7 + 7) * sizeof(double), model_bytes = (42 + 3 * 56 + 24) * sizeof(double);

/// What rank `rank` uses in pass `number`: of the layers each is used by all ranks, by one, by none, in many orders.
int uses(std::uint32_t number, int rank) {
  static constexpr int table[][2] = {{7, 7}, {1, 1}, {1, 1}, {0, 4}, {5, 4}, {2, 0}, {0, 0}, {0, 0}, {7, 0}, {3, 3}};
  return table[number % 10][rank % 2];
}

DistributedDataParallelOptions options(bool skip, double cap = 0) {
  return {.first_bucket_cap_mb = cap,
          .bucket_cap_mb = cap,
          .find_unused_parameters = true,
          .skip_all_reduce_unused_params = skip};
}

void pass(auto& net, const World& world, std::uint32_t number, Index size = 7) {
  cross_entropy(net(test::share(numbers(size, 5, number), world), uses(number, world.rank)),
                test::share(labels(size, 3, number), world))
      .backward();
}

/// Ten steps; with `micro_batches` each adds up two batches of different sizes.
template <class Hook = AllReduce>
std::vector<double> steps(int ranks, const DistributedDataParallelOptions& how, bool micro_batches = false) {
  return test::numbers_in(common_text(ranks, [=](const World& world) {
    Distributed<Gated<Cpu>, Hook> rank(world, how);
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.1}};
    std::string arrived;
    for (std::uint32_t number = 0; number < 10; ++number) {
      optimizer.zero_grad();
      if (micro_batches) {
        const auto quiet = rank.net.no_sync();
        pass(rank.net, world, number + 3, 5);
      }
      pass(rank.net, world, number);
      for (const auto& named : rank.net.parameters()) arrived += named.parameter->grad_arrived() ? "1 " : "0 ";
      optimizer.step();
    }
    return arrived + test::text_of(test::values(rank.net.module()));
  }));
}

TEST_CASE("ddp unused: skip_all_reduce_unused_params changes no step, whatever the ranks use") {
  for (const int ranks : {1, 2, 3})
    for (const double cap : {0.0, 1.0})
      for (const bool micro_batches : {false, true}) {
        INFO(ranks << " ranks, cap " << cap << ", micro-batches " << micro_batches);
        const auto expected = steps(ranks, options(false, cap), micro_batches);
        REQUIRE(expected.size() > 300);
        CHECK(distance(steps(ranks, options(true, cap), micro_batches), expected) < rounding);
      }
}

TEST_CASE("ddp unused: a gradient that rests is not sent, until a rank has it again") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Gated<Cpu>> rank(world, options(true));
    std::string sent;
    for (std::uint32_t number = 0; number < 10; ++number) {
      for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
      trace::reset_traffic();
      pass(rank.net, world, number);
      sent += cat(trace::bytes_sent(world.rank, trace::Traffic::gradients), " ");
    }
    return sent;
  });
  // A ring of two sends as many numbers as there are. Pass 1 and 6 find out that layers are unused.
  const auto with = [](int gates) { return model_bytes - static_cast<std::size_t>(3 - gates) * gate_bytes; };
  CHECK(text == cat(with(3), " ", with(3), " ", with(1), " ", with(2), " ", with(2), " ", with(3), " ", with(1), " ",
                    with(0), " ", with(3), " ", with(3), " "));
}

TEST_CASE("ddp unused: layers rest under join and under a hook that keeps something for each bucket") {
  const auto joined = [](bool skip) {
    return test::numbers_in(common_text(3, [skip](const World& world) {
      Distributed<Gated<Cpu>> rank(world, options(skip));
      optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
      const auto step = [&] { optimizer.step(); };
      rank.net.join(
          [&] {
            for (std::uint32_t number = 0; number < 10 - 3 * static_cast<std::uint32_t>(world.rank); ++number) {
              optimizer.zero_grad();
              pass(rank.net, world, number);
              step();
            }
          },
          {.step = step});
      return test::text_of(test::values(rank.net.module()));
    }));
  };
  const auto expected = joined(false);
  REQUIRE(!expected.empty());
  CHECK(distance(joined(true), expected) < rounding);
  CHECK(!steps<PowerSgd>(2, options(true)).empty());  // all ranks end with the same numbers
}

TEST_CASE("ddp unused: a number that is none is traced to its rank also where a gradient that rested comes back") {
  const auto text = common_text(2, [](const World& world) -> std::string {
    auto how = options(true);
    how.non_finite = NonFinite::throw_error;
    Distributed<Gated<Cpu>> rank(world, how);
    sum(rank.net(numbers(3, 5, 1), 1)).backward();
    for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
    const double factor = world.rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
    const int use = world.rank == 1 ? 1 : 5;  // what comes back is rank 0's, and finite
    return message_of<NonFiniteError>([&] { (sum(rank.net(numbers(3, 5, 2), use)) * factor).backward(); });
  });
  CHECK_THAT(text, Contains("is not finite; it came from ") && Contains(" on rank 1"));
}

TEST_CASE("ddp unused: skip_all_reduce_unused_params without find_unused_parameters is refused") {
  const auto text = common_text(2, [](const World& world) {
    return message_of<UsageError>([&] { Distributed<Gated<Cpu>>(world, {.skip_all_reduce_unused_params = true}); });
  });
  CHECK_THAT(text, Contains("skip_all_reduce_unused_params goes with find_unused_parameters"));
  const auto in_parts = common_text(2, [](const World& world) {
    return message_of<UsageError>([&] { Distributed<Gated<Cpu>, ReduceScatter>(world, options(true)); });
  });
  CHECK_THAT(in_parts, Contains("this hook leaves each rank a part"));
  const auto texts = Ranks(2, [](const World& world) {
                       return message_of<UsageError>([&] { Distributed<Gated<Cpu>>(world, options(world.rank == 1)); });
                     }).texts();
  for (const auto& message : texts) CHECK_THAT(message, Contains("skip_all_reduce_unused_params"));
}

/// What the ranks write to stderr in `passes` passes that use everything but for pass number `partial`.
std::vector<std::string> said(std::uint32_t passes, std::uint32_t partial) {
  const auto run = [=](const World& world) {
    return test::with_stderr([&] {
      Distributed<Gated<Cpu>> rank(world, {.find_unused_parameters = true});
      for (std::uint32_t number = 0; number < passes; ++number) {
        for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
        sum(rank.net(numbers(3, 5, number), number == partial && world.rank == 1 ? 3 : 7)).backward();
      }
      return "";
    });
  };
  return Ranks(2, run).texts();
}

TEST_CASE("ddp unused: rank 0 warns, once, where find_unused_parameters finds none") {
  const auto texts = said(25, 99);
  CHECK(
      texts[0] ==
      "chorus: warning: DistributedDataParallel: find_unused_parameters is set, but in the first 10 backward passes "
      "every parameter got a gradient on every rank; without it a step has one collective less. If later passes leave "
      "parameters out, it is needed.\n");
  CHECK(texts[1].empty());
  for (const std::uint32_t partial : {0u, 9u}) {
    INFO("a parameter is left out by rank 1 in pass " << partial);
    for (const auto& text : said(25, partial)) CHECK(text.empty());
  }
  for (const auto& text : said(9, 99)) CHECK(text.empty());
}

TEST_CASE("ddp unused: logging data say whether static_graph would do, on each rank") {
  const auto run = [](const World& world) {
    Distributed<Gated<Cpu>> rank(world, options(true));
    std::string text;
    // Rank 1 uses other layers than rank 0, but from the fourth pass on always the same.
    for (const int use : {5, 5, 5, 3, 3, 3}) {
      for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
      sum(rank.net(numbers(3, 5, 1), world.rank == 0 ? 7 : use)).backward();
      text += rank.net.logging_data().can_set_static_graph ? "1" : "0";
    }
    rank.net.reset_logging_data();
    return text + (rank.net.logging_data().can_set_static_graph ? "1" : "0");
  };
  CHECK(Ranks(2, run).texts() == std::vector<std::string>{"1111111", "1110001"});
}

}  // namespace ddp_unused_test
