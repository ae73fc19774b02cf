// Skip connections across the stages of a pipeline: nn::Stash and nn::Pop.
#include <catch.hpp>

#include "models.hpp"

namespace pipeline_stash_test {

using namespace test::names;
using test::Piped;

constexpr double near = 1e-10;

/// Two skips: one from the first layer to the last but one, and one inside of that.
struct Skipping : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::Stash<"far"> stash;
  test::Block a;
  nn::Stash<"near"> stash_again;
  test::Block b, c;
  nn::Pop<"near"> pop_again;
  test::Block d;
  nn::Pop<"far"> pop;
  test::Head head;
  CHORUS_MODULE(Skipping, embed, a, b, c, d, head)
  CHORUS_PIPELINE(embed, stash, a, stash_again, b, c, pop_again, d, pop, head)
};

template <class Order>
std::string off(const World& world, comm::AnyCommunicator& all, const PipelineOptions& options,
                const std::vector<double>& alone) {
  std::string text;
  for (const bool gives_loss : {true, false}) {
    Pipeline<Skipping, Order> net{make<Skipping>(), all, world, options, 3};
    const double distance = test::distance(test::chain_losses(net, gives_loss), alone);
    if (!(distance < near)) text += cat(Order::name, " ", distance, " ");
  }
  return text;
}

TEST_CASE("pipeline stash: skips over no, one and two stages are one device's") {
  const auto alone = test::chain_losses_alone<Skipping>();
  const auto check = [&](int ranks, const PipelineOptions& options) {
    const auto texts = Ranks(
                           ranks,
                           [&](const World& world) -> std::string {
                             auto all = comm::connect(world);
                             return off<OneForwardOneBackward>(world, all, options, alone) +
                                    off<ZeroBubbleH1>(world, all, options, alone) +
                                    off<GPipe>(world, all, options, alone);
                           },
                           20s)
                           .texts();
    for (const auto& text : texts) CHECK(text == "");
  };
  check(2, {.micro_batches = 3, .cut = At{5}});
  check(3, {.micro_batches = 3, .cut = At{3, 5}});
  check(4, {.micro_batches = 3, .cut = At{2, 4, 7}});  // `far` passes two stages that don't use it
}

TEST_CASE("pipeline stash: interleaved stages") {
  const auto alone = test::chain_losses_alone<Skipping>();
  const auto texts = Ranks(
                         2,
                         [&](const World& world) -> std::string {
                           auto all = comm::connect(world);
                           return off<Interleaved<2>>(world, all, {.micro_batches = 3, .cut = At{2, 4, 7}}, alone);
                         },
                         20s)
                         .texts();
  for (const auto& text : texts) CHECK(text == "");
}

TEST_CASE("pipeline stash: a value and its gradient go over each edge between its layers once") {
  Ranks ranks(3, [](const World& world) -> std::string {
    Piped<Skipping> rank(world, {.micro_batches = 2, .cut = At{3, 5}});
    const auto before = trace::bytes_sent(world.rank, trace::Traffic::activations);
    rank.net(numbers(4, 5, 1), labels(4, 3, 1)).backward();
    return cat((trace::bytes_sent(world.rank, trace::Traffic::activations) - before) / (4 * 6 * sizeof(double)));
  });
  const auto texts = ranks.texts();
  CHECK(texts[0] == "2");  // x and far
  CHECK(texts[1] == "5");  // x, near and far forward; x and far backward
  CHECK(texts[2] == "3");
}

template <nn::detail::StashName In, nn::detail::StashName Out>
struct Wrong : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::Stash<In> stash;
  test::Block a;
  nn::Pop<Out> pop;
  test::Head head;
  CHORUS_MODULE(Wrong, embed, a, head)
  CHORUS_PIPELINE(embed, stash, a, pop, head)
};
struct NeverPopped : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::Stash<"lost"> stash;
  test::Head head;
  CHORUS_MODULE(NeverPopped, embed, head)
  CHORUS_PIPELINE(embed, stash, head)
};
struct Twice : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::Stash<"same"> stash, again;
  nn::Pop<"same"> pop;
  test::Head head;
  CHORUS_MODULE(Twice, embed, head)
  CHORUS_PIPELINE(embed, stash, again, pop, head)
};
struct OtherType : nn::Module {
  nn::Stash<"x"> stash;
  nn::Linear<Cpu, double> embed{5, 6};
  nn::Pop<"x"> pop;
  test::Head head;
  struct AsRows : nn::Module {
    auto operator()(const auto& x) const { return reshape(x, Shape<3>{x.size(0), 1, x.size(1)}); }
  } rows;
  struct Back : nn::Module {
    auto operator()(const auto& x) const { return reshape(x, Shape<2>{x.size(0), x.size(2)}); }
  } back;
  CHORUS_MODULE(OtherType, embed, head)
  CHORUS_PIPELINE(stash, embed, rows, pop, back, head)
};

template <class Model>
std::string refused() {
  SingleDevice<Model> single{make<Model>(), 3};
  const std::string alone = message_of<UsageError>([&] { single(numbers(4, 5, 1), labels(4, 3, 1)); });
  const auto texts = Ranks(2, [](const World& world) -> std::string {
                       Piped<Model> rank(world, {.micro_batches = 2});
                       rank.net(numbers(4, 5, 1), labels(4, 3, 1));
                       return "";
                     }).texts();
  CHECK((texts[0] + texts[1]).find(alone) != std::string::npos);
  return alone;
}
TEST_CASE("pipeline stash: what is not popped, or not stashed, is refused, on one device too") {
  CHECK_THAT((refused<Wrong<"in", "out">>()), Contains("nn::Pop<\"out\">: nothing was stashed under that name"));
  CHECK_THAT(refused<NeverPopped>(), Contains("nn::Stash<\"lost\">: no layer pops it"));
  CHECK_THAT(refused<Twice>(), Contains("nn::Stash<\"same\">: the previous value of that name"));
  CHECK_THAT(refused<OtherType>(), Contains("nn::Pop<\"x\">: expected F64 with 3 axes, got F64 with 2"));
  const nn::Stash<"alone"> stash;
  const nn::Pop<"alone"> pop;
  const auto x = numbers(2, 2, 1);
  CHECK_THAT(message_of<UsageError>([&] { stash(x); }), Contains("nn::Stash: expected a layer of a model with "
                                                                 "CHORUS_PIPELINE"));
  CHECK_THAT(message_of<UsageError>([&] { pop(x); }), Contains("nn::Pop: expected a layer"));
}

}  // namespace pipeline_stash_test
