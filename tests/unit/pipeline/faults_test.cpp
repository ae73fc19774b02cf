// Pipelines with errors, or whose result would differ from one device's: a prompt error on all ranks.
#include <sys/resource.h>

#include <catch.hpp>
#include <chorus/ops/losses.hpp>

#include "models.hpp"

namespace pipeline_faults_test {

using namespace test::names;
using namespace std::chrono_literals;
using test::Piped;

/// A layer that runs a function when it is called.
struct Doing : nn::Module {
  nn::Linear<Cpu, double> fc{6, 6};
  CHORUS_MODULE(Doing, fc)
  static inline std::function<void()> action = [] {};
  auto forward(const auto& x) const {
    action();
    return tanh(fc(x));
  }
};
struct Acting : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  Doing middle;
  test::Head head;
  CHORUS_MODULE(Acting, embed, middle, head)
  CHORUS_PIPELINE(embed, middle, head)
};

/// The errors of three ranks if rank 1 runs `action` in the third step's second micro-batch.
std::vector<test::Outcome> outcomes(const std::function<void()>& action, bool model_gives_loss) {
  Ranks ranks(3, [&](const World& world) -> std::string {
    int calls = 0;
    Doing::action = [&] {
      if (++calls == 2 * 4 + 2) action();
    };
    Piped<Acting> rank(world, {.micro_batches = 4});
    test::chain_losses(rank.net, model_gives_loss, 4);
    return "no error";
  });
  std::vector<test::Outcome> all;
  for (int rank = 0; rank < 3; ++rank) all.push_back(ranks.outcome(rank));
  return all;
}

TEST_CASE("pipeline faults: a stage that throws ends all, by its name") {
  for (const bool model_gives_loss : {true, false}) {
    const auto all = outcomes([] { throw std::runtime_error("the data are odd"); }, model_gives_loss);
    CHECK(all[1].text == "the data are odd");
    for (const std::size_t other : {0u, 2u}) {
      CHECK_THAT(all[other].text, Contains("Pipeline: stage 1, on rank 1, threw: the data are odd"));
      CHECK(all[other].seconds < 5);
    }
  }
}

TEST_CASE("pipeline faults: what a program throws in gathered() stays that, where nothing can be given back after it") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<Acting> rank(world, {.micro_batches = 4});
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    try {
      rank.net.gathered([&](auto&) {
        const rlimit none{0, before.rlim_max};
        setrlimit(RLIMIT_NOFILE, &none);
        throw std::runtime_error("my own");
      });
    } catch (const std::exception& error) {
      setrlimit(RLIMIT_NOFILE, &before);
      return error.what();
    }
    return "no error";
  });
  for (const int rank : {0, 1}) CHECK_THAT(ranks.outcome(rank).text, Contains("my own"));
}

TEST_CASE("pipeline faults: a rank that is killed is noticed by all") {
  const auto all = outcomes([] { raise(SIGKILL); }, true);
  for (const std::size_t other : {0u, 2u}) {
    CHECK_THAT(all[other].text, !Contains("no error") && Contains("rank"));
    CHECK(all[other].seconds < 5);
  }
}

TEST_CASE("pipeline faults: messages larger than a link's room don't let neighbours wait for each other") {
  Ranks ranks(
      3,
      [](const World& world) -> std::string {
        Piped<test::Chain<2>> rank(world, {.micro_batches = 4, .cut = At{1, 3}});
        optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
        const Index rows = 4 * 50'000;  // 2.4 MB each
        for (std::uint32_t i = 0; i < 2; ++i) test::chain_step(rank.net, optimizer, i, rows, true);
        return "done";
      },
      20s);
  for (const auto& text : ranks.texts()) CHECK(text == "done");
}

template <class Model>
std::string refused(int size, const PipelineOptions& options) {
  const auto texts = Ranks(size, [&](const World& world) -> std::string {
                       Piped<Model> rank(world, options);
                       return "accepted";
                     }).texts();
  for (const auto& text : texts) CHECK(text == texts[0]);
  return texts[0];
}
TEST_CASE("pipeline faults: a cut that does not fit is refused") {
  using Model = test::Chain<2>;  // 4 layers
  CHECK_THAT(refused<Model>(2, {.micro_batches = 0}), Contains("expected micro_batches >= 1, got 0"));
  CHECK_THAT(refused<Model>(2, {.cut = At{1, 2}}), Contains("At{[1, 2]} makes 3 stages, expected 2"));
  CHECK_THAT(refused<Model>(2, {.cut = At{4}}), Contains("At{[4]}: expected increasing layer numbers from 1 to 3"));
  CHECK_THAT(refused<Model>(3, {.cut = At{2, 2}}), Contains("expected increasing layer"));
  CHECK_THAT(refused<Model>(2, {.cut = ByTime{{1, 2}}}), Contains("ByTime has 2 times for 4 layers"));
  CHECK_THAT(refused<test::Chain<1>>(4, {}), Contains("4 stages for a model of 3 layers"));
}

/// A layer without parameters in the middle.
struct Bare : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::Tanh tanh;
  test::Head head;
  CHORUS_MODULE(Bare, embed, tanh, head)
  CHORUS_PIPELINE(embed, tanh, head)
};
/// A model with a parameter in no link.
struct Loose : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6}, other{2, 2};
  test::Head head;
  CHORUS_MODULE(Loose, embed, other, head)
  CHORUS_PIPELINE(embed, head)
};
TEST_CASE("pipeline faults: stages without parameters and parameters without a stage are refused") {
  CHECK_THAT(refused<Bare>(3, {}), Contains("rank 1 has no parameters"));
  CHECK_THAT(refused<Loose>(2, {}), Contains("the model's 'other.weight' is in none of the layers"));
}

TEST_CASE("pipeline faults: ranks with different options or models are refused") {
  const auto texts = Ranks(2, [](const World& world) -> std::string {
                       Piped<test::Chain<1>> rank(world, {.micro_batches = 2 + world.rank});
                       return "";
                     }).texts();
  for (const auto& text : texts)
    CHECK_THAT(text, Contains("rank 1 has micro_batches 3") && Contains("rank 0 has micro_batches 2"));
}

/// Its norm sees the whole batch, or one micro-batch.
template <class Norm>
struct Normed : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  Norm norm{6};
  test::Head head;
  CHORUS_MODULE(Normed, embed, norm, head)
  CHORUS_PIPELINE(embed, norm, head)
};
template <class Norm>
std::string with_norm() {
  return Ranks(2,
               [](const World& world) -> std::string {
                 Piped<Normed<Norm>> rank(world, {.micro_batches = 2});
                 rank.net(numbers(8, 5, 1), labels(8, 3, 1)).backward();
                 return "done";
               })
      .texts()[0];
}
TEST_CASE("pipeline faults: SyncBatchNorm is refused, BatchNorm sees micro-batches") {
  using Synced = nn::SyncBatchNorm<Cpu, double>;
  CHECK_THAT(
      with_norm<Synced>(),
      Contains("Pipeline: SyncBatchNorm in training and of_global_batch in the model need the whole batch at once"));
  using Plain = nn::BatchNorm<Cpu, double>;
  CHECK(with_norm<Plain>() == "done");
}

struct SumHead : nn::Module {
  nn::Linear<Cpu, double> fc{6, 3};
  CHORUS_MODULE(SumHead, fc)
  auto forward(const auto& x, const auto& y) const {
    return cross_entropy(fc(x), y, {.reduction = Reduction::sum}) * 1.0;
  }
};
struct MixedHead : nn::Module {
  nn::Linear<Cpu, double> fc{6, 3};
  CHORUS_MODULE(MixedHead, fc)
  auto forward(const auto& x, const auto& y) const {
    return cross_entropy(fc(x), y, {.ignore_index = 0}) + mse_loss(fc(x), fc(x).value());
  }
};
struct MeanOverHead : nn::Module {
  nn::Linear<Cpu, double> fc{6, 3};
  CHORUS_MODULE(MeanOverHead, fc)
  auto forward(const auto& x, const auto& y) const { return cross_entropy(fc(x), y, {.mean_over = 7}); }
};
template <class Head>
struct Ending : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  Head head;
  CHORUS_MODULE(Ending, embed, head)
  CHORUS_PIPELINE(embed, head)
};
template <class Head>
std::string with_head() {
  return Ranks(2,
               [](const World& world) -> std::string {
                 Piped<Ending<Head>> rank(world, {.micro_batches = 3});
                 rank.net(numbers(7, 5, 1), labels(7, 3, 1)).backward();
                 return "done";
               })
      .texts()[1];
}
TEST_CASE("pipeline faults: a loss that micro-batches don't add up to is refused") {
  CHECK(with_head<SumHead>() == "done");
  CHECK(with_head<MeanOverHead>() == "done");
  CHECK_THAT(with_head<MixedHead>(),
             Contains("micro-batches divide the means and sums of the model's loss in different ways"));
}

TEST_CASE("pipeline faults: norms that are not positive are refused") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<test::Chain<1>> rank(world);
    rank.net(numbers(4, 5, 1), labels(4, 3, 1)).backward();
    return message_of<UsageError>([&] { rank.net.clip_grad_norm(0); });
  });
  for (const auto& text : ranks.texts()) {
    CHECK_THAT(text, Contains("the largest norm must be positive"));
  }
}

TEST_CASE("pipeline faults: a target that fits no micro-batch is named on all ranks") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<test::Chain<1>> rank(world);
    return message_of<Error>([&] { rank.net(numbers(4, 5, 1), labels(5, 3, 1)); });
  });
  for (const auto& text : ranks.texts())
    CHECK_THAT(text, Contains("cross_entropy: expected 1 labels for scores of shape [1, 3], got 5"));
}

TEST_CASE("pipeline faults: ranks with different batches are refused") {
  for (const Index of_last : {Index{6}, Index{3}}) {
    Ranks ranks(2, [&](const World& world) -> std::string {
      Piped<test::Chain<1>> rank(world, {.micro_batches = 4});
      const Index size = world.rank == 0 ? 6 : of_last;
      rank.net(numbers(size, 5, static_cast<std::uint32_t>(world.rank)), labels(size, 3, 1));
      return "";
    });
    const auto texts = ranks.texts();
    CHECK_THAT(texts[0], Contains("stage 1, on rank 1, threw: Pipeline: expected the same batch as on rank 0"));
    CHECK_THAT(texts[1], Contains("net.sampler(dataset) gives all ranks the same"));
  }
}

TEST_CASE("pipeline faults: grad() does not support a pipeline") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<test::Chain<1>> rank(world);
    const auto loss = rank.net(numbers(4, 5, 1), labels(4, 3, 1));
    const auto own = rank.net.parameters().front().handle;
    return message_of<UsageError>([&] { loss.node()->backward_to_wanted(false); });
  });
  for (const auto& text : ranks.texts()) CHECK_THAT(text, Contains("grad() does not support a pipeline"));
}

}  // namespace pipeline_faults_test
