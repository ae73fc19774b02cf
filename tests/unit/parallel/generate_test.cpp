// generate: the tokens of transformers by its three ways, the same with a cache and without, and under every policy.
#include <catch.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/nn/transformer.hpp>
#include <chorus/nn/vocabulary_embedding.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/generate.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/tensor_parallel.hpp>

#include "ranks.hpp"

namespace generate_test {

using namespace test::names;
using Tokens = Tensor<std::int64_t, 2>;

/// Seven words; five heads, which two ranks divide unevenly. A decoder layer that attends to two constant places.
template <class D>
struct Writer : nn::Module {
  nn::VocabularyParallelEmbedding<D, double> words{7, 10};
  nn::Embedding<D, double> places{16, 10};
  nn::TransformerEncoderLayer<D, double> first{10, {.heads = 5, .feed_forward = 9, .norm_first = true}};
  nn::TransformerDecoderLayer<D, double> second{10, {.heads = 5, .feed_forward = 9}};
  nn::ColumnParallelLinear<D, double> head{10, 7};
  CHORUS_MODULE(Writer, words, places, first, second, head)
  auto forward(const auto& tokens, const nn::KvCache& cache = {}) const {
    const auto x = words(tokens) + places(arange(cache.length(), cache.length() + tokens.size(1)));
    const auto memory = Tensor<double, 3, D>::full({tokens.size(0), 2, 10}, 0.3);
    return head(second(first(x, cache), memory, cache));
  }
};
/// The same model without a cache.
struct Forgetful : Writer<Cpu> {
  auto forward(const auto& tokens) const { return Writer<Cpu>::forward(tokens); }
  auto operator()(const auto& tokens) const { return forward(tokens); }
};
/// A second parameter of any type is not taken for a cache.
struct WithTargets : Writer<Cpu> {
  auto forward(const auto& tokens) const { return Writer<Cpu>::forward(tokens); }
  auto forward(const auto& tokens, const auto& targets) const { return cross_entropy(forward(tokens), targets.no()); }
};
struct InFloat : nn::Module {
  nn::Embedding<Cpu> words{7, 8};
  nn::TransformerEncoderLayer<Cpu> layer{8, {.heads = 2}};
  nn::Linear<Cpu> head{8, 7};
  CHORUS_MODULE(InFloat, words, layer, head)
  auto forward(const auto& tokens, const nn::KvCache& cache = {}) const { return head(layer(words(tokens), cache)); }
};
static_assert(detail::takes_cache<Writer<Cpu>>() && !detail::takes_cache<Forgetful>());
static_assert(!detail::takes_cache<WithTargets>());
static_assert(detail::takes_cache<nn::MixedPrecision<InFloat>>());

struct Chain : nn::Module {
  nn::Embedding<Cpu, double> words{7, 6};
  nn::Linear<Cpu, double> fc{6, 6}, head{6, 7};
  CHORUS_MODULE(Chain, words, fc, head)
  CHORUS_PIPELINE(words, fc, head)
};

Tokens prompt() { return Tokens::from({1, 2, 3, 0, 6, 6}, {2, 3}); }
std::vector<GenerateOptions> ways() {
  return {{.max_new_tokens = 9},
          {.max_new_tokens = 9, .temperature = 0.8, .top_k = 5, .top_p = 0.95, .seed = 4},
          {.max_new_tokens = 9, .beams = 3, .eos = {2}}};
}
template <class Model>
Model evaluated() {
  auto model = make<Model>();
  model.eval();
  return model;
}
/// The tokens of all ways, as text.
template <class Net>
std::string written(Net& net) {
  std::string text;
  for (const auto& options : ways()) {
    for (const auto token : generate(net, prompt(), options).to_vector()) text += cat(token, ' ');
    text += '|';
  }
  return text;
}

struct Case {
  Index beams;
  double penalty;
  std::vector<std::int64_t> eos;
  Index more;
  std::vector<std::int64_t> tokens;
};
/// generate_by_transformers.py
const std::vector<Case> by_transformers{
    {1, 1, {}, 10, {1, 2, 3, 4, 7, 9, 0, 3, 3, 4, 7, 9, 0, 4, 5, 0, 3, 3, 4, 7, 9, 0, 3, 3, 4, 7, 7, 7, 7, 9, 0, 3, 3, 4, 7, 9, 0, 3, 3}},
    {1, 1, {5, 3}, 10, {1, 2, 3, 4, 7, 9, 0, 3, 4, 5, 0, 3, 5, 5, 5, 5, 7, 7, 7, 9, 0, 3, 5, 5}},
    {2, 1, {}, 8, {1, 2, 3, 4, 7, 9, 0, 3, 5, 3, 3, 4, 5, 0, 3, 3, 4, 7, 9, 0, 3, 3, 7, 7, 7, 9, 0, 3, 3, 4, 7, 9, 0}},
    {3, 1, {5}, 12, {1, 2, 3, 4, 7, 9, 0, 3, 3, 4, 7, 9, 0, 3, 3, 4, 5, 0, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 7, 7, 7, 9, 0, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5}},
    {4, 2, {5, 3}, 12, {1, 2, 3, 4, 7, 9, 0, 10, 6, 0, 0, 10, 6, 0, 0, 4, 5, 0, 10, 6, 0, 0, 10, 6, 0, 0, 10, 6, 0, 0, 7, 7, 7, 8, 6, 0, 0, 10, 6, 0, 0, 10, 6, 0, 0}},
    {3, 0, {5, 3}, 12, {1, 2, 3, 3, 5, 5, 4, 5, 0, 3, 5, 5, 7, 7, 7, 9, 0, 3}},
    {2, -1, {8}, 9, {1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8, 8, 4, 5, 0, 3, 3, 4, 7, 9, 0, 3, 3, 4, 7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8, 8}},
    {5, 1, {1}, 6, {1, 2, 3, 4, 7, 9, 0, 3, 3, 4, 5, 0, 3, 3, 4, 7, 9, 0, 7, 7, 7, 9, 0, 3, 5, 3, 3}},
};

TEST_CASE("generate: the most likely tokens and the best beams are those of transformers") {
  auto table = Tensor<double, 3>::empty({2, 12, 12});
  std::int64_t state = 1;
  for (Index i = 0; i < table.numel(); ++i) {
    state = (1103515245 * state + 12345) % (std::int64_t{1} << 31);
    table.data()[i] = static_cast<double>((state >> 8) % 1000) / 150;
  }
  const auto model = [&](const Tokens& tokens) {
    auto logits = Tensor<double, 3>::empty({tokens.size(0), tokens.size(1), 12});
    for (Index row = 0; row < tokens.size(0); ++row)
      for (Index i = 0; i < tokens.size(1); ++i)
        for (Index next = 0; next < 12; ++next) logits(row, i, next) = table(i % 2, tokens(row, i), next);
    return logits;
  };
  const auto start = Tokens::from({1, 2, 3, 4, 5, 0, 7, 7, 7}, {3, 3});
  for (const auto& c : by_transformers) {
    INFO(c.beams << " beams");
    CHECK(generate(model, start,
                   {.max_new_tokens = c.more, .beams = c.beams, .length_penalty = c.penalty, .eos = c.eos})
              .to_vector() == c.tokens);
  }
}

TEST_CASE("generate: temperature, top_k and top_p keep the tokens that transformers keeps") {
  const std::vector<double> scores{1, 3, 2, 3, -1, 0.5, 2, 2.5};
  struct Kept {
    double temperature;
    Index top_k;
    double top_p;
    std::vector<double> p;
  };
  for (const auto& [temperature, top_k, top_p, p] : std::vector<Kept>{
           {0.5, 0, 1, {0.00687539711, 0.375383963, 0.050802695, 0.375383963, 0.000125927291, 0.00252931725, 0.050802695, 0.138096043}},
           {1, 4, 1, {0, 0.299196101, 0.110068095, 0.299196101, 0, 0, 0.110068095, 0.181471609}},
           {1, 5, 1, {0, 0.299196101, 0.110068095, 0.299196101, 0, 0, 0.110068095, 0.181471609}},
           {1, 0, 0.5, {0, 0.5, 0, 0.5, 0, 0, 0, 0}},
           {1, 0, 0.05, {0, 0, 0, 1, 0, 0, 0, 0}},
           {2, 3, 0.6, {0, 0.5, 0, 0.5, 0, 0, 0, 0}},
           {0.7, 6, 0.8, {0, 0.401680364, 0, 0.401680364, 0, 0, 0, 0.196639272}}})
    CHECK(distance(detail::kept_probabilities(scores, {.temperature = temperature, .top_k = top_k, .top_p = top_p}),
                   p) < 1e-8);
  // The draws follow the probabilities, and depend on seed, sequence and position.
  const std::vector<double> p{0.5, 0, 0.25, 0.25};
  std::vector<double> counts(4);
  for (Index i = 0; i < 4000; ++i) counts[static_cast<std::size_t>(detail::drawn_token(p, 7, i % 8, i / 8))] += 1 / 4000.0;
  CHECK(distance(counts, p) < 0.03);
  CHECK(counts[1] == 0);
}

TEST_CASE("generate: a cache changes nothing, at any cut of the tokens") {
  const auto model = evaluated<Writer<Cpu>>();
  const NoGrad none;
  const auto tokens = Tokens::from({1, 2, 3, 0, 6, 6, 5, 4, 3, 3, 1, 0}, {2, 6});
  const auto whole = value_of(gather_columns(model(tokens))).to_vector();
  for (const auto& cut : std::vector<std::vector<Index>>{{6}, {1, 1, 1, 1, 1, 1}, {2, 3, 1}, {1, 4, 1}}) {
    const nn::KvCache cache(6);
    std::vector<Tensor<double, 3>> parts;
    for (const Index count : cut) {
      const Index at = cache.length();
      parts.push_back(value_of(gather_columns(model(contiguous(tokens.slice(1, at, at + count)), cache))));
      cache.advance();
    }
    CHECK(distance(concat(1, std::span<const Tensor<double, 3>>(parts)).to_vector(), whole) < rounding);
  }
  const auto alone = evaluated<Forgetful>();
  CHECK(written(model) == written(alone));
  manual_seed(5);
  nn::MixedPrecision<InFloat> narrow;
  narrow.eval();
  const auto recomputed = [&](const Tokens& all) { return narrow(all); };
  CHECK(generate(narrow, prompt(), ways()[0]).to_vector() == generate(recomputed, prompt(), ways()[0]).to_vector());
}

TEST_CASE("generate: one device's tokens under every policy") {
  const auto alone = evaluated<Writer<Cpu>>();
  const auto expected = written(alone);
  SingleDevice<Writer<Cpu>> single{evaluated<Writer<Cpu>>(), 3};
  CHECK(written(single) == expected);
  DataParallel<Writer<Cpu>> several{evaluated<Writer<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK(written(several) == expected);
  const auto ranks = [](const auto& make_net) {
    return common_text(2, [&](const World& world) {
      auto communicator = comm::connect(world);
      auto net = make_net(communicator, world);
      net->eval();
      return written(*net);
    });
  };
  CHECK(ranks([](auto& communicator, const World&) {
          return std::make_unique<DistributedDataParallel<Writer<Cpu>>>(make<Writer<Cpu>>(), communicator);
        }) == expected);
  CHECK(ranks([](auto& communicator, const World&) {
          return std::make_unique<FullyShardedDataParallel<Writer<Cpu>>>(make<Writer<Cpu>>(), communicator,
                                                                         communicator);
        }) == expected);
  CHECK(ranks([](auto& communicator, const World&) {
          return std::make_unique<TensorParallel<Writer<Cpu>>>(make<Writer<Cpu>>(), communicator);
        }) == expected);
  const auto chain = evaluated<Chain>();
  CHECK(ranks([](auto& communicator, const World& world) {
          return std::make_unique<Pipeline<Chain>>(make<Chain>(), communicator, world);
        }) == written(chain));
}

TEST_CASE("generate: what is not possible is refused by name") {
  const auto model = evaluated<Writer<Cpu>>();
  const auto text = [&](const GenerateOptions& options) {
    return message_of<Error>([&] { generate(model, prompt(), options); });
  };
  CHECK(text({.temperature = 0.0}) == "generate: expected a temperature above 0, or none for the most likely token, got 0");
  CHECK_THAT(text({.top_p = 0}), Contains("expected top_p in (0, 1], got 0"));
  CHECK_THAT(text({.top_k = 3, .beams = 2}), Contains("expected beams without temperature, top_k and top_p"));
  CHECK_THAT(text({.beams = 2, .eos = {0, 1, 2, 3, 4, 5, 6}}), Contains("expected a vocabulary of at least 8, got 7"));
  CHECK_THAT(message_of<Error>([&] { generate(model, Tokens::zeros({2, 0})); }), Contains("got shape [2, 0]"));
  CHECK_THAT(message_of<Error>([] { generate(make<Writer<Cpu>>(), prompt()); }), Contains("call eval() first"));
  const auto nan = [](const Tokens& tokens) {
    return Tensor<float, 3>::full({tokens.size(0), tokens.size(1), 3}, NAN);
  };
  CHECK_THAT(message_of<NonFiniteError>([&] { generate(nan, prompt()); }), Contains("position 2, got NaN"));
  const auto wrong = [](const Tokens&) { return Tensor<float, 3>::zeros({2, 1, 3}); };
  CHECK_THAT(message_of<ShapeError>([&] { generate(wrong, prompt()); }), Contains("got shape [2, 1, 3]"));
  CHECK_THAT(common_text(2,
                         [](const World& world) {
                           auto communicator = comm::connect(world);
                           TensorParallel<Writer<Cpu>> net{evaluated<Writer<Cpu>>(), communicator};
                           const auto own = Tokens::full({1, 2}, world.rank);
                           return message_of<Error>([&] { generate(net, own); });
                         }),
             Contains("expected one prompt and the same options on all ranks"));
}

TEST_CASE("a KvCache refuses passes that would give other numbers") {
  const auto model = evaluated<Writer<Cpu>>();
  const auto one = Tokens::zeros({1, 1});
  const nn::KvCache cache(2);
  CHECK_THAT(message_of<UsageError>([&] { model(one, cache); }), Contains("expected ch::NoGrad around the pass"));
  const NoGrad none;
  const nn::KvCache second(2);
  CHECK_THAT(message_of<UsageError>([&] { second.advance(); }), Contains("in which attention layers took the cache"));
  model(one, second);
  CHECK_THAT(message_of<UsageError>([&] { model(one, second); }), Contains("cache.advance() after each pass"));
  second.advance();
  CHECK(second.length() == 1);
  CHECK_THAT(message_of<UsageError>([&] { make<Writer<Cpu>>()(one, second); }), Contains("was copied since"));
  CHECK_THAT(message_of<ShapeError>([&] { model(Tokens::zeros({2, 1}), second); }), Contains("belongs to one batch"));
  CHECK_THAT(message_of<UsageError>([&] { model(Tokens::zeros({1, 2}), second); }),
             Contains("expected at most 2 positions, got 3"));
  CHECK_THAT(message_of<UsageError>([] { nn::KvCache(0); }), Contains("expected a capacity of at least 1"));
  const nn::MultiheadAttention<Cpu, double> cross{4, 2};
  const auto x = Tensor<double, 3>::zeros({1, 2, 4}), y = Tensor<double, 3>::zeros({1, 3, 4});
  CHECK_THAT(message_of<ShapeError>([&] { cross(x, y, y, nn::KvCache(4)); }), Contains("is for self-attention"));
}

}  // namespace generate_test
