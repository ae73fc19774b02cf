// DistributedDataParallel's find_unused_parameters: the warning if no parameter is ever unused, and logging data.
#include <catch.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_unused_test {

using namespace test::names;

/// Three layers that a pass may skip, bit by bit of `use`.
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

/// The ranks' stderr in `passes` passes that use everything except pass number `partial`.
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
  CHECK(texts[0] ==
        "chorus: warning: DistributedDataParallel: find_unused_parameters is set, but in the first 10 backward passes "
        "every parameter got a gradient on every rank; without it a step has one collective less. Keep it if later "
        "passes leave parameters out.\n");
  CHECK(texts[1].empty());
  for (const std::uint32_t partial : {0u, 9u}) {
    INFO("a parameter is left out by rank 1 in pass " << partial);
    for (const auto& text : said(25, partial)) CHECK(text.empty());
  }
  for (const auto& text : said(9, 99)) CHECK(text.empty());
}

TEST_CASE("ddp unused: logging data say whether static_graph would do, on each rank") {
  const auto run = [](const World& world) {
    Distributed<Gated<Cpu>> rank(world, {.find_unused_parameters = true});
    std::string text;
    // Rank 1 uses other layers than rank 0, and always the same from the fourth pass on.
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
