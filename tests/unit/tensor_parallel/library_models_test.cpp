/// The library's models under TensorParallel: GPT, its LoRA alone, and BERT. In float, so within rounding.

#include <catch.hpp>
#include <chorus/models.hpp>
#include <utility>

#include "ranks.hpp"

namespace {

namespace ch = chorus;
namespace nn = ch::nn;
using namespace test::names;
using test::numbers_in, test::text_of;

constexpr nn::GPTOptions gpt{.vocab_size = 7, .n_positions = 6, .n_embd = 10, .n_layer = 2, .n_head = 5, .n_inner = 9};

struct Gpt : nn::GPT<Cpu> {
  Gpt() : nn::GPT<Cpu>(gpt) {}
};
struct Adapted : nn::GPT<Cpu> {
  static nn::GPTOptions options() {
    auto own = gpt;
    own.lora_rank = 2;
    return own;
  }
  Adapted() : nn::GPT<Cpu>(options()) { nn::train_only_lora(*this); }
};
struct Bert : nn::BERTForMaskedLM<Cpu> {
  Bert()
      : nn::BERTForMaskedLM<Cpu>({.vocab_size = 7,
                                  .hidden_size = 10,
                                  .num_hidden_layers = 2,
                                  .num_attention_heads = 5,
                                  .intermediate_size = 9,
                                  .max_position_embeddings = 6}) {}
};

/// The model with the same numbers in every process.
template <class Model>
Model filled() {
  Model model;
  std::uint32_t number = 0;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    auto* const to = static_cast<float*>(named.parameter->memory());
    const auto values = numbers(named.parameter->count(), 1, ++number);
    for (Index i = 0; i < named.parameter->count(); ++i) to[i] = static_cast<float>(0.3 * values.data()[i]);
  }
  return model;
}

/// The losses of four steps, dropout included, then all parameters.
template <class Net>
std::vector<double> trained(Net& net, const auto& whole) {
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.2}};
  std::vector<double> out;
  for (std::uint32_t i = 0; i < 4; ++i) {
    optimizer.zero_grad();
    const auto scores = net(labels(12, 7, i).view(ch::Shape<2>{3, 4}));
    const auto loss = ch::cross_entropy(ch::reshape(scores, ch::Shape<2>{12, 7}), labels(12, 7, i + 50));
    loss.backward();
    optimizer.step();
    out.push_back(static_cast<double>(loss.item()));
  }
  whole([&](auto& model) {
    for (const auto& named : nn::named_parameters<Cpu>(model)) {
      const auto* const numbers = static_cast<const float*>(named.parameter->memory());
      out.insert(out.end(), numbers, numbers + named.parameter->count());
    }
  });
  return out;
}

template <class Model>
void check(int ranks) {
  ch::SingleDevice<Model> one{filled<Model>(), 3};
  const auto expected = trained(one, [&](const auto& f) { f(one.module()); });
  CHECK(expected.front() != expected[3]);
  const auto texts = Ranks(ranks, [](const World& world) {
                       test::Shared<Model> rank(world, {.check_every = 1}, filled<Model>());
                       return text_of(trained(rank.net, [&](const auto& f) { rank.net.gathered(f); }));
                     }).texts();
  for (const auto& text : texts) CHECK(text == texts[0]);
  CHECK(distance(numbers_in(texts[0]), expected) < 1e-5);
}

TEST_CASE("TensorParallel: the library's models are trained as on one device", "[tensor_parallel]") {
  check<Gpt>(2);
  check<Adapted>(3);
  check<Bert>(2);
}

}  // namespace
