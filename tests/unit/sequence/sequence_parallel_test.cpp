// SequenceParallel beside one device.
#include <chorus/comm/thread_group.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolutions.hpp>
#include <chorus/nn/models/gpt.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/random.hpp>
#include <csignal>
#include <thread>

#include "texts.hpp"

namespace sequence_parallel_test {

using namespace test::names;
using test::Text, test::Texts;

template <class Model>
struct Rank {
  comm::AnyCommunicator communicator;
  SequenceParallel<Model> net;
  explicit Rank(const World& world, Model model = test::make<Model>())
      : communicator(comm::connect(world)), net(std::move(model), communicator, {}, 3) {}
};

TEST_CASE("SequenceParallel: losses, norms and parameters are one device's, with dropout and ignored labels") {
  const auto expected = test::text_alone(2);
  for (const int ranks : {2, 3, 4}) {
    const auto text = common_text(ranks, [](const World& world) {
      Rank<Text> rank(world);
      auto out = test::text_training(rank.net, [](std::uint32_t number) { return Texts(number, 2); });
      const auto last = test::values(rank.net.module());
      out.insert(out.end(), last.begin(), last.end());
      return test::text_of(out);
    });
    CAPTURE(ranks, text);
    CHECK(test::distance(test::numbers_in(text), expected) < 1e-10);
  }
}

TEST_CASE("SequenceParallel: a checkpoint goes on with another number of ranks; passes that add up") {
  const auto path = cat("sequence_", getpid(), ".checkpoint");
  const auto steps = [&](auto& net, std::uint32_t from, bool saves) {
    optim::AdamW<Cpu> optimizer{net.parameters(), {.lr = 0.02}};
    if (from > 0) io::load_checkpoint(net, optimizer, path);
    for (std::uint32_t i = from; i < from + 3; ++i) {
      optimizer.zero_grad();
      {
        [[maybe_unused]] const auto quiet = net.no_sync();
        const Texts first(i + 20, 3);
        net(first.tokens, first.targets).backward();
      }
      const Texts batch(i, 2);
      net(batch.tokens, batch.targets).backward();
      optimizer.step();
    }
    if (saves) io::save_checkpoint(net, optimizer, {.step = 3}, path);
    return test::text_of(test::values(net.module()));
  };
  SingleDevice<Text> single{test::make<Text>(), 3};
  steps(single, 0, true);
  const auto expected = test::numbers_in(steps(single, 3, false));
  for (const int ranks : {2, 3}) {  // saves on 2, goes on on 3
    const auto text = common_text(ranks, [&](const World& world) {
      Rank<Text> rank(world);
      return steps(rank.net, ranks == 2 ? 0 : 3, ranks == 2);
    });
    CAPTURE(ranks, text);
    if (ranks == 3) CHECK(test::distance(test::numbers_in(text), expected) < 1e-9);
  }
  std::remove(path.c_str());
}

TEST_CASE("SequenceParallel: if a rank dies in backward, those that wait for its keys name it") {
  const auto texts = Ranks(3, [](const World& world) {
                       Rank<Text> rank(world);
                       if (world.rank == 1)
                         rank.net.module().head.fc.weight.register_hook([](const auto& gradient) {
                           raise(SIGKILL);
                           return gradient;
                         });
                       const Texts batch(0, 2);
                       try {
                         rank.net(batch.tokens, batch.targets).backward();
                       } catch (const CommError& error) {
                         return std::string(error.what());
                       }
                       return std::string("went on");
                     }).texts();
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) CHECK_THAT(texts[rank], Catch::Contains("rank 1"));
}

struct Writer : nn::Module {
  nn::GPT<Cpu> gpt{
      {.vocab_size = 7, .n_positions = 12, .n_embd = 8, .n_layer = 2, .n_head = 2, .dropout = 0.2, .checkpoint = true}};
  CHORUS_MODULE(Writer, gpt)
  auto forward(const Tensor<std::int64_t, 2>& tokens, const Tensor<std::int64_t, 2>& targets) const {
    return cross_entropy(reshape(gpt(tokens), Shape<2>{tokens.numel(), 7}), targets.view(Shape<1>{targets.numel()}));
  }
};

TEST_CASE("SequenceParallel: GPT with checkpointed blocks is one device's; bytes") {
  const auto train = [](auto& net) {
    optim::Sgd<Cpu> optimizer{net.parameters(), {.lr = 0.2}};
    std::vector<double> losses;
    for (std::uint32_t i = 0; i < 4; ++i) {
      const Texts batch(i, 3);
      optimizer.zero_grad();
      const auto loss = net(batch.tokens, batch.targets);
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item());
    }
    return losses;
  };
  const auto model = [] {
    manual_seed(4);
    return Writer{};
  };
  SingleDevice<Writer> single{model(), 3};
  const auto expected = train(single);
  const auto text = common_text(3, [&](const World& world) {
    Rank<Writer> rank(world, model());
    const auto losses = train(rank.net);
    // In each of two layers keys and values of 3 texts of 9, 10, 11 and 9 words, 2/3 of them in forward, again where it
    // is computed again, and twice in backward, by rank 0, which does not send those of rank 1. Losses: 16 bytes a hop.
    std::uint64_t bytes = 0;
    for (const Index length : {Index{9}, Index{10}, Index{11}, Index{9}}) {
      const auto own = [&](int of) { return sequence::places_in(sequence::stretches(length, 3, of)); };
      bytes += static_cast<std::uint64_t>(2 * 3 * 8 * 2 * 4 * (3 * (length - own(1)) + (length - own(0)))) + 2 * 3 * 8;
    }
    if (world.rank == 0 && trace::bytes_sent(0, trace::Traffic::activations) != bytes)
      return cat("sent ", trace::bytes_sent(0, trace::Traffic::activations), ", expected ", bytes);
    return test::text_of(losses);
  });
  CAPTURE(text);
  CHECK(test::distance(test::numbers_in(text), expected) < 1e-5);
}

/// A model whose `mix` treats tokens in a way that ranks can't share.
template <class Mix>
struct Mixing : nn::Module {
  nn::Linear<Cpu, double> embed{4, 6}, head{6, 1};
  nn::BatchNorm<Cpu, double> norm{6};
  nn::Conv1d<Cpu, double> conv{6, 6, {.kernel = 3, .padding = 1}};
  Parameter<double, 2> table{Tensor<double, 2>::full({16, 6}, 0.1)};
  CHORUS_MODULE(Mixing, embed, head, norm, conv, table)
  auto forward(const Tensor<double, 3>& x, const auto&...) const { return mean(square(head(Mix{}(*this, embed(x))))); }
};

/// The error of two ranks that run it. One may see only that the other has given up.
template <class Mix, class... More>
std::string refused(const Mix&, const More&... more) {
  auto group = comm::thread_group(2);
  std::string messages[2];
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      try {
        SequenceParallel<Mixing<Mix>> net{Mixing<Mix>{}, group[rank], {.find_unused_parameters = true}, 3};
        net(test::numbers(2 * 10, 4, 1).view(Shape<3>{2, 10, 4}), more...).backward();
      } catch (const UsageError& error) {
        messages[rank] = error.what();
      } catch (const CommError&) {
        messages[rank] = "given up";
      }
    });
  for (auto& thread : threads) thread.join();
  const bool second = messages[0] == "given up";
  return messages[0] == messages[1] || messages[second ? 0 : 1] == "given up"
             ? messages[second ? 1 : 0]
             : "ranks differ: " + messages[0] + messages[1];
}

TEST_CASE("SequenceParallel: what mixes places, or takes one rank's for all, is refused by name") {
  using Catch::Contains;
  const auto same = [](const auto&, const auto& x) { return x; };
  CHECK(refused(same).empty());
  CHECK_THAT(refused([](const auto& net, const auto& x) { return transpose(net.conv(transpose(x, 1, 2)), 1, 2); }),
             Contains("'conv2d'") && Contains("mixes the places"));
  CHECK_THAT(refused([](const auto& net, const auto& x) {
               return reshape(net.norm(reshape(x, Shape<2>{10, 6})), x.shape());
             }),
             Contains("'batch_norm") && Contains("mixes the places"));
  CHECK_THAT(refused([](const auto&, const auto& x) {
               return x + reshape(mean(x, 1), Shape<3>{2, 1, 6});
             }),
             Contains("'mean'") && Contains("mixes the places"));
  CHECK_THAT(refused([](const auto&, const auto& x) { return matmul(softmax(matmul(x, transpose(x, 1, 2)), -1), x); }),
             Contains("'matmul'") && Contains("scaled_dot_product_attention"));
  CHECK_THAT(refused([](const auto& net, const auto& x) {
               const auto memory = expand(slice(net.table, 0, 0, x.size(1)), Shape<3>{2, x.size(1), 6});
               return scaled_dot_product_attention(x, memory, memory);
             }),
             Contains("'scaled_dot_product_attention'"));
  CHECK_THAT(refused([](const auto&, const auto& x) { return slice(x, 1, 0, 3); }), Contains("'slice'"));
  CHECK_THAT(refused([](const auto& net, const auto& x) { return x + slice(net.table, 0, 0, x.size(1)); }),
             Contains("this rank's places are others"));
  CHECK_THAT(refused([](const auto&, const auto& x) {
               return dropout(reshape(x, Shape<3>{-1, 2, 6}), 0.5);
             }),
             Contains("dropout: expected [2, 5, ...]"));
  CHECK_THAT(refused([](const auto&, const auto& x) { return x + randn_like(x.value()); }),
             Contains("no random numbers"));
  CHECK_THAT(refused(same, Tensor<double, 2>::zeros({2, 7})), Contains("expected inputs of 10 places"));
}

TEST_CASE("SequenceParallel: join is refused") {
  auto group = comm::thread_group(1);
  SequenceParallel<Text> net{test::make<Text>(), group[0]};
  CHECK_THROWS_WITH(net.join([] {}), Catch::Contains("same number of batches"));
}

}  // namespace sequence_parallel_test
