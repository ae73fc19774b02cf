// Pipelines over several ranks, compared with one device: the same losses and parameters under any schedule.
#include <catch.hpp>

#include "../comm/nccl_carrier.hpp"

#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif

#include "models.hpp"

namespace pipeline_test {

using namespace test::names;
using test::Piped;
template <int Blocks>
using Chain = test::Chain<Blocks>;

constexpr double near = 1e-10;  // 20 steps in double, with other orders of additions

/// On a rank: the distance of a run's losses from one device's.
template <class Order, class Model>
double off(const World& world, comm::AnyCommunicator& all, int micro_batches, bool model_gives_loss,
           const std::vector<double>& alone) {
  Pipeline<Model, Order> net{make<Model>(), all, world, {.micro_batches = micro_batches}, 3};
  return distance(test::chain_losses(net, model_gives_loss), alone);
}

template <class Model, class... Orders>
void check_orders(int ranks) {
  const auto alone = test::chain_losses_alone<Model>();
  const auto texts =
      Ranks(
          ranks,
          [&](const World& world) -> std::string {
            auto all = comm::connect(world);
            std::string text;
            const auto check = [&](const char* name, int m, bool gives_loss, double distance) {
              if (!(distance < near)) text += cat(name, " m ", m, gives_loss ? " loss " : " output ", distance, "; ");
            };
            for (const int m : {1, 2, 3, 7})
              for (const bool gives_loss : {true, false})
                (check(Orders::name, m, gives_loss, off<Orders, Model>(world, all, m, gives_loss, alone)), ...);
            return text + "done";
          },
          30s)
          .texts();
  for (const auto& text : texts) CHECK(text == "done");
}

TEST_CASE("pipeline: 20 steps with dropout are one device's, 2 ranks") {
  check_orders<Chain<6>, GPipe, OneForwardOneBackward, Interleaved<2>, ZeroBubbleH1>(2);
}
TEST_CASE("pipeline: 20 steps with dropout are one device's, 3 ranks") {
  check_orders<Chain<6>, GPipe, OneForwardOneBackward, Interleaved<2>, ZeroBubbleH1>(3);
}
TEST_CASE("pipeline: 20 steps with dropout are one device's, 4 ranks") {
  check_orders<Chain<6>, GPipe, OneForwardOneBackward, Interleaved<2>, ZeroBubbleH1>(4);
}
TEST_CASE("pipeline: one rank alone has all stages") {
  const auto alone = test::chain_losses_alone<Chain<2>>();
  comm::AnyCommunicator communicator;
  Pipeline<Chain<2>> net{make<Chain<2>>(), communicator, {}, {.micro_batches = 3}, 3};
  CHECK(distance(test::chain_losses(net, true), alone) < near);
}

TEST_CASE("pipeline: stages talk over what their job talks over") {
  test::NcclCarrier::register_it(/*host_computes=*/true);  // a stand-in
  std::vector<comm::Backend> backends = {comm::Backend::tcp, comm::Backend::nccl};
#if CHORUS_USE_GLOO
  backends.push_back(comm::Backend::gloo);
#endif
  using Model = Chain<6>;
  const auto alone = test::chain_losses_alone<Model>();
  for (const auto backend : backends) {
    INFO(comm::name(backend));
    const auto text = test::common_text(
        3,
        [&](World world) -> std::string {
          world.backend = backend;
          auto all = comm::connect(world);
          const auto group = comm::connect(comm::split(all, world, 0));
          if (all.backend() != comm::name(backend) || group.backend() != all.backend())
            return cat(all.backend(), " and ", group.backend());
          const auto far = off<OneForwardOneBackward, Model>(world, all, 3, true, alone);
          return far < near ? "done" : cat(far);
        },
        30s);
    CHECK(text == "done");
  }
}

TEST_CASE("pipeline: losses have the same bits on all ranks, and parameters are one device's") {
  using Model = Chain<2>;
  Ranks ranks(3, [](const World& world) -> std::string {
    Piped<Model> rank(world, {.micro_batches = 4, .cut = At{1, 3}});
    const auto losses = test::chain_losses(rank.net, true);
    std::string names;
    for (const auto& named : rank.net.parameters())
      if (named.parameter->is_here()) names += named.name + " ";
    return test::text_of(losses) + "|" + names + "|" + test::own_values(rank.net);
  });
  const auto texts = ranks.texts();
  SingleDevice<Model> single{make<Model>(), 3};
  test::chain_losses(single, true);
  std::vector<std::string> parts[3];
  for (std::size_t rank = 0; rank < 3; ++rank) {
    INFO(texts[rank]);
    REQUIRE(std::count(texts[rank].begin(), texts[rank].end(), '|') == 2);
    std::string rest = texts[rank];
    for (int i = 0; i < 2; ++i) {
      parts[rank].push_back(rest.substr(0, rest.find('|')));
      rest.erase(0, rest.find('|') + 1);
    }
    parts[rank].push_back(rest);
    CHECK(parts[rank][0] == parts[0][0]);
  }
  CHECK(parts[0][1] == "embed.bias embed.weight ");
  CHECK(parts[1][1] == "blocks.1.fc.bias blocks.1.fc.weight blocks.0.fc.bias blocks.0.fc.weight ");
  CHECK(parts[2][1] == "head.fc.bias head.fc.weight ");
  std::string all;
  for (const std::size_t rank : {2u, 1u, 0u}) all += parts[rank][2];
  std::vector<double> expected;
  for (const auto& named : single.parameters()) {
    const auto* const data = static_cast<const double*>(named.parameter->value_data());
    expected.insert(expected.end(), data, data + named.parameter->count());
  }
  CHECK(distance(test::numbers_in(all), expected) < near);
}

TEST_CASE("pipeline: backward multiplies by its seed, adds up, and is dropped where it never comes") {
  using Model = Chain<1>;
  const auto gradients_of = [](auto& net) {
    const auto x = numbers(5, 5, 1);
    const auto y = labels(5, 3, 1);
    net(x, y);  // without backward
    (net(x, y) * 0.5).backward();
    {
      const NoGrad no_grad;
      net(x, y);
    }
    const auto twice = net(x, y);
    twice.backward(true);
    twice.backward();
    const auto first = net(x, y), second = cross_entropy(net(x), y);
    (first + second * 2.0).backward();
    net.eval();
    net(x, y).backward();
    std::vector<std::pair<std::string, std::vector<double>>> out;
    for (const auto& named : net.parameters()) {
      const auto* const data = static_cast<const double*>(named.parameter->grad_data());
      out.emplace_back(named.name, std::vector<double>(data, data + named.parameter->count()));
    }
    return out;
  };
  SingleDevice<Model> single{make<Model>(), 3};
  const auto alone = gradients_of(single);
  Ranks ranks(2, [&](const World& world) -> std::string {
    Piped<Model> rank(world, {.micro_batches = 2});
    std::string text;
    for (const auto& [name, gradient] : gradients_of(rank.net)) {
      const auto same =
          std::find_if(alone.begin(), alone.end(), [&name = name](const auto& one) { return one.first == name; });
      if (!gradient.empty() && !(distance(gradient, same->second) < test::rounding)) text += name + " ";
    }
    return text + "done";
  });
  for (const auto& text : ranks.texts()) CHECK(text == "done");
}

TEST_CASE("pipeline: a second backward needs the graph") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<Chain<1>> rank(world);
    const auto x = numbers(4, 5, 1);
    const auto y = labels(4, 3, 1);
    const auto loss = rank.net(x, y);
    loss.backward();
    std::string text = message_of<UsageError>([&] { loss.backward(); });
    const auto output = cross_entropy(rank.net(x), y);
    return text + message_of<UsageError>([&] { output.backward(true); });
  });
  for (const auto& text : ranks.texts()) {
    CHECK_THAT(text, Contains("was freed by an earlier backward"));
    CHECK_THAT(text, Contains("retain_graph needs a model that returns its loss"));
  }
}

TEST_CASE("pipeline: hooks of parameters run once, with the batch's gradient") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<Chain<1>> rank(world, {.micro_batches = 3});
    int runs = 0, own = 0;
    for (const auto& named : rank.net.parameters()) {
      named.parameter->on_grad([&runs] { ++runs; });
      own += named.parameter->is_here() ? 1 : 0;
    }
    rank.net(numbers(6, 5, 1), labels(6, 3, 1)).backward();
    return cat(runs == own);
  });
  for (const auto& text : ranks.texts()) CHECK(text == "true");
}

TEST_CASE("pipeline: parameters of other stages are not here, and who reads them is told") {
  using Model = Chain<1>;
  Ranks ranks(2, [](const World& world) -> std::string {
    auto model = make<Model>();
    const auto embed = model.embed.weight;
    const auto kept = model.embed.weight.value();  // an older tensor
    optim::Sgd of_all{nn::named_parameters<Cpu>(model), {.lr = 0.1}};
    Piped<Model> rank(world, {.cut = At{1}}, std::move(model));
    rank.net(numbers(6, 5, 1), labels(6, 3, 1)).backward();
    if (world.rank == 0) return cat(embed.value()(0, 0) == kept(0, 0), std::isfinite(kept(0, 0)));
    return message_of<UsageError>([&] { embed.value(); }) + "|" + message_of<UsageError>([&] { value_of(embed); }) +
           "|" + message_of<UsageError>([&] { of_all.step(); }) + "|" +
           message_of<UsageError>([&] { io::parameters_sha256(rank.net.module()); }) + "|" +
           cat(std::isnan(kept(0, 0)));
  });
  const auto texts = ranks.texts();
  CHECK(texts[0] == "truetrue");
  const std::string told =
      "Pipeline: 'embed.weight' is in a stage of rank 0, and this is rank 1, which does not store it";
  CHECK_THAT(texts[1], Contains(told + "|" + told + "|nothing|Pipeline: 'embed.") && Contains("|true"));
}

TEST_CASE("pipeline: the memory of other stages is given back") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<Chain<6>> rank(world);
    std::size_t own = 0;
    for (const auto& named : rank.net.parameters()) own += named.parameter->size_bytes();
    return cat(trace::memory(0, trace::Memory::parameters) <= 2 * own,
               trace::memory(0, trace::Memory::gradients) <= 2 * own);
  });
  for (const auto& text : ranks.texts()) CHECK(text == "truetrue");
}

}  // namespace pipeline_test
