// FullyShardedDataParallel: refusals and messages; scopes with whole parameters; clipping.
#include <algorithm>
#include <cmath>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/lbfgs.hpp>
#include <chorus/optim/muon.hpp>
#include <unit/fsdp/fsdp.hpp>

namespace sharded_errors_test {

using namespace test::names;
using test::EachLayer, test::FullySharded;
using Model = test::Smooth<Cpu>;
using Rank = FullySharded<Model, EachLayer>;
const optim::SgdOptions sgd{.lr = 0.3, .momentum = 0.9};

/// The common error of `body(rank)` on two ranks.
template <class Body>
std::string message(const Body& body) {
  const auto texts = Ranks(2, [body](const World& world) {
    Rank rank(world);
    return message_of<UsageError>([&] { body(rank, world); });
  }).texts();
  return texts[0].empty() || texts[1].empty() ? "" : texts[0] + " | " + texts[1];
}
template <class Net>
auto backward(Net& net, const World& world, std::uint32_t number = 1) {
  const auto loss = cross_entropy(net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world));
  loss.backward();
  return loss;
}

TEST_CASE("fsdp: parameters are not read where they are in parts") {
  CHECK_THAT(message([](Rank& rank, const World&) { rank.net.module().fc1.weight.value(); }),
             Contains("'fc1.") && Contains("is read outside the net's forward") && Contains("net.gathered()"));
  CHECK_THAT(message([](Rank& rank, const World&) { io::parameters_sha256(rank.net.module()); }),
             Contains("'fc1.weight': it is sharded") && Contains("net.gathered()"));
  CHECK_THAT(
      message([](Rank& rank, const World&) { rank.net.module().fc2.bias.assign(Tensor<double, 1>::zeros({6})); }),
      Contains("'fc2.bias': it is sharded"));
  CHECK_THAT(message([](Rank& rank, const World&) { rank.net.module()(numbers(2, 5, 1)); }),
             Contains("is read outside the net's forward"));
}

TEST_CASE("fsdp: what has one rank's part alone is no whole") {
  CHECK_THAT(message([](Rank& rank, const World&) { optim::Lbfgs<Cpu> whole{rank.net.parameters()}; }),
             Contains("needs whole parameters"));
  CHECK_THAT(message([](Rank& rank, const World& world) {
               auto parameters = rank.net.parameters();
               parameters.resize(world.rank == 1 ? 2 : 3);
               optim::Lars<Cpu> optimizer{parameters};
               backward(rank.net, world);
               optimizer.step();
             }),
             Contains("Lars: expected the same parameters on all ranks"));
}

TEST_CASE("fsdp: GradScaler leaves a step out on all ranks, whoever's part is infinite") {
  const auto text = common_text(3, [](const World& world) {
    Rank rank(world);
    optim::Sgd optimizer{rank.net.parameters(), sgd};
    optim::GradScaler<Cpu> scaler{rank.net};
    std::string out;
    for (const double factor : {1.0, world.rank == 1 ? HUGE_VAL : 1.0, 1.0}) {
      optimizer.zero_grad();
      scaler.scale(sum(rank.net(numbers(2, 5, 1))) * factor).backward();
      out += cat(scaler.step(optimizer), " ");
    }
    const auto whole = rank.net.gathered();
    return out + test::text_of(test::values(rank.net.module()));
  });
  CHECK_THAT(text, Catch::Matchers::StartsWith("true false true "));
}

TEST_CASE("fsdp: join, ranks that freeze other parameters, and a step after no_sync are refused") {
  CHECK_THAT(message([](Rank& rank, const World&) { rank.net.join([] {}); }),
             Contains("FullyShardedDataParallel::join"));
  CHECK_THAT(message([](Rank& rank, const World& world) {
               if (world.rank == 1) rank.net.module().fc2.weight.set_requires_grad(false);
               backward(rank.net, world);
             }),
             Contains("frozen"));
  CHECK_THAT(message([](Rank& rank, const World& world) {
               optim::Sgd optimizer{rank.net.parameters(), sgd};
               {
                 const auto quiet = rank.net.no_sync();
                 backward(rank.net, world);
               }
               optimizer.step();
             }),
             Contains("accumulated under no_sync and never averaged"));
}

TEST_CASE("fsdp: gathered: reads the whole, and writes for all") {
  const auto text = common_text(3, [](const World& world) {
    Rank rank(world);
    std::string out;
    {
      const auto whole = rank.net.gathered();
      out += cat(test::values(rank.net.module()) == test::values(*std::make_unique<Model>(make<Model>())), " ");
    }
    {
      const auto whole = rank.net.gathered({.write = true});
      rank.net.module().fc2.bias.assign(Tensor<double, 1>::full({6}, 0.25 + world.rank));  // rank 0's value is used
    }
    {
      const auto whole = rank.net.gathered();
      out += cat(rank.net.module().fc2.bias.value().to_vector()[5], " ");
      rank.net.module().fc2.bias.assign(Tensor<double, 1>::full({6}, 7));
    }
    out += message_of<UsageError>([&] { rank.net(numbers(2, 5, 1)); });
    const NoGrad evaluation;
    return out + cat(" ", sum(rank.net(numbers(2, 5, 1))).value().item() != 0);  // and training continues
  });
  CHECK_THAT(text, Contains("true 0.25 FullyShardedDataParallel: parameters were written within net.gathered()") &&
                       Contains("gathered({.write = true})"));
}

TEST_CASE("fsdp: clip_grad_norm is one device's, and a gradient that is not finite is an error on all ranks") {
  const auto clipped = [](int ranks) {
    return test::numbers_in(common_text(ranks, [](const World& world) {
      Rank rank(world);
      optim::Sgd optimizer{rank.net.parameters(), sgd};
      backward(rank.net, world);
      const double norm = rank.net.clip_grad_norm(0.1);
      optimizer.step();
      const auto whole = rank.net.gathered();
      return cat(norm, " ") + test::text_of(test::values(rank.net.module()));
    }));
  };
  SingleDevice<Model> net{make<Model>(), 3};
  optim::Sgd optimizer{net.parameters(), sgd};
  backward(net, {});
  std::vector<double> alone{optim::clip_grad_norm(net.parameters(), 0.1)};
  optimizer.step();
  const auto after = test::values(net.module());
  alone.insert(alone.end(), after.begin(), after.end());
  for (const int ranks : {2, 3}) CHECK(distance(clipped(ranks), alone) < rounding);

  CHECK_THAT(common_text(2, [](const World& world) {
               Rank rank(world);
               (sum(rank.net(numbers(2, 5, 1))) * (world.rank == 0 ? INFINITY : 1.0)).backward();
               const auto text =
                   message_of<NonFiniteError>([&] { rank.net.clip_grad_norm(1, {.error_if_nonfinite = true}); });
               return text.substr(0, text.find(';'));  // each names its own first one
             }),
             Contains("expected a finite norm"));
  CHECK_THAT(message([](Rank& rank, const World&) { rank.net.clip_grad_norm(-1); }), Contains("must be positive"));
}

TEST_CASE("fsdp: no_decay_on_biases_and_norms knows biases by the whole parameter") {
  const auto texts = Ranks(2, [](const World& world) {
    Rank rank(world);
    optim::AdamW<Cpu> optimizer{rank.net.parameters(), {.lr = 0.1, .weight_decay = 5}};
    optimizer.no_decay_on_biases_and_norms();
    (sum(rank.net(numbers(2, 5, 1))) * 0.0).backward();
    optimizer.step();
    const auto whole = rank.net.gathered();
    auto& module = rank.net.module();
    auto same = make<Model>();
    return cat(module.fc1.bias.value().to_vector() == same.fc1.bias.value().to_vector(),
               module.fc1.weight.value().to_vector() == same.fc1.weight.value().to_vector());
  }).texts();
  CHECK(texts == std::vector<std::string>(2, "truefalse"));
}

TEST_CASE("fsdp: a rank that is killed in a pass, or while Muon's owners wait for pieces, ends the others, who name it") {
  for (const bool in_step : {false, true}) {
    Ranks ranks(3, [in_step](const World& world) {
      Rank rank(world);
      optim::Muon<Cpu> optimizer{rank.net.parameters()};
      for (std::uint32_t step = 0; step < 1000; ++step) {
        const bool dies = world.rank == 1 && step == 5;
        if (dies && !in_step) kill(getpid(), SIGKILL);
        optimizer.zero_grad();
        backward(rank.net, world, step);
        if (dies) kill(getpid(), SIGKILL);
        optimizer.step();
      }
      return std::string("went on");
    });
    for (const int rank : {0, 2}) {
      const auto outcome = ranks.outcome(rank);
      CHECK_THAT(outcome.text, Contains("rank 1"));
      CHECK(outcome.seconds < 5);
    }
  }
}

TEST_CASE("fsdp: a parameter whose net has ended says so") {
  const auto text = common_text(2, [](const World& world) {
    Parameter<double, 1> bias;
    {
      Rank rank(world);
      bias = rank.net.module().fc2.bias;
    }
    return message_of<UsageError>([&] { bias.value(); });
  });
  CHECK_THAT(text, Contains("FullyShardedDataParallel: a parameter of a net that was destroyed"));
}

}  // namespace sharded_errors_test
