// The library's models: names and sizes of Hugging Face's, PyTorch's numbers, and what their options change.
#include <catch.hpp>
#include <chorus/chorus.hpp>
#include <chorus/models.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/parallel/generate.hpp>
#include <cmath>
#include <string>
#include <unit/message_of.hpp>
#include <utility>
#include <vector>

namespace models_test {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu;
using ch::Index;

template <class Model>
std::vector<std::string> names_of(Model& model) {
  std::vector<std::string> names;
  for (const auto& named : nn::named_parameters<Cpu>(model))
    names.push_back(ch::cat(named.name, " ", named.parameter->extents()));
  return names;
}
template <class Model>
Index parameters_of(Model& model) {
  Index count = 0;
  for (const auto& named : nn::named_parameters<Cpu>(model)) count += named.parameter->count();
  return count;
}
ch::Tensor<std::int64_t, 2> tokens(Index batch, Index length, Index words) {
  auto out = ch::Tensor<std::int64_t, 2>::empty({batch, length});
  for (Index i = 0; i < out.numel(); ++i) out.data()[i] = (i * 7 + 3) % words;
  return out;
}
template <int Rank>
double distance(const ch::Tensor<float, Rank>& a, const ch::Tensor<float, Rank>& b) {
  return static_cast<double>(ch::amax(ch::abs(ch::contiguous(a) - ch::contiguous(b))).item());
}

constexpr nn::GPTOptions small_gpt{.vocab_size = 11, .n_positions = 8, .n_embd = 12, .n_layer = 2, .n_head = 3};

TEST_CASE("GPT-2 has Hugging Face's names and its 124 M parameters") {
  nn::GPT<Cpu> model({.n_layer = 1});  // a layer has 7,087,872
  CHECK(parameters_of(model) + 11 * 7'087'872 == 124'439'808);
  CHECK(names_of(model) ==
        std::vector<std::string>{
            "wte.weight [50257, 768]", "wpe.weight [1024, 768]", "h.0.ln_1.weight [768]", "h.0.ln_1.bias [768]",
            "h.0.attn.c_attn.weight [2304, 768]", "h.0.attn.c_attn.bias [2304]", "h.0.attn.c_proj.weight [768, 768]",
            "h.0.attn.c_proj.bias [768]", "h.0.ln_2.weight [768]", "h.0.ln_2.bias [768]",
            "h.0.mlp.c_fc.weight [3072, 768]", "h.0.mlp.c_fc.bias [3072]", "h.0.mlp.c_proj.weight [768, 3072]",
            "h.0.mlp.c_proj.bias [768]", "ln_f.weight [768]", "ln_f.bias [768]"});
}

TEST_CASE("a GPT sees no later token, and drops only in training") {
  nn::GPT<Cpu> model(small_gpt);
  auto text = tokens(2, 8, 11);
  model.eval();
  const auto before = ch::value_of(model(text));
  CHECK(before.shape() == ch::Shape<3>{2, 8, 11});
  text.data()[5] = (text.data()[5] + 1) % 11;  // of the first sequence
  const auto after = ch::value_of(model(text));
  CHECK(distance(ch::slice(before, 1, 0, 5), ch::slice(after, 1, 0, 5)) == 0);
  CHECK(distance(ch::slice(before, 1, 5, 8), ch::slice(after, 1, 5, 8)) > 1e-4);
  model.train();
  CHECK(distance(ch::value_of(model(text)), after) > 1e-4);
  CHECK(message_of<ch::ShapeError>([&] { model(tokens(1, 9, 11)); }) ==
        "GPT: expected at most 8 tokens (n_positions), got 9");
  CHECK(message_of<ch::ShapeError>([] { nn::GPT<Cpu>({.n_embd = 10, .n_head = 3}); }) ==
        "GPT: 3 heads do not divide 10 features");
}

TEST_CASE("a GPT's checkpointed blocks give the same gradients, and tied weights have one") {
  auto options = small_gpt;
  options.dropout = 0;
  nn::GPT<Cpu> model(options);
  options.checkpoint = true;
  nn::GPT<Cpu> again(options);
  nn::copy_into(model, again);
  for (auto* each : {&model, &again}) ch::sum(ch::square((*each)(tokens(2, 8, 11)))).backward();
  const auto gradient = model.wte.weight.grad();
  CHECK(distance(gradient, again.wte.weight.grad()) == 0);
  CHECK(model.lm_head.weight.shared() == model.wte.weight.shared());
  options.tie_word_embeddings = false;
  nn::GPT<Cpu> untied(options);
  CHECK(names_of(untied).back() == "lm_head.weight [11, 12]");
}

TEST_CASE("a GPT with a cache gives the scores of the whole text, and generates by it") {
  nn::GPT<Cpu> model(small_gpt);
  model.eval();
  static_assert(ch::detail::takes_cache<nn::GPT<Cpu>>());
  const auto text = tokens(2, 8, 11);
  const auto whole = ch::value_of(model(text));
  const ch::NoGrad no_grad;
  const nn::KvCache cache(8);
  for (const auto& [begin, end] : {std::pair<Index, Index>{0, 3}, {3, 4}, {4, 7}, {7, 8}}) {
    const auto scores = ch::value_of(model(ch::contiguous(text.slice(1, begin, end)), cache));
    cache.advance();
    CHECK(distance(scores, ch::slice(whole, 1, begin, end)) < 1e-6);
  }
  auto written = ch::contiguous(text.slice(1, 0, 2));
  const auto result = ch::generate(model, written, {.max_new_tokens = 6});
  for (Index length = 2; length < 8; ++length) {
    const auto next = ch::argmax(ch::value_of(model(written)).select(1, length - 1), 1);
    written = ch::concat(1, written, next.view(ch::Shape<2>{2, 1}));
  }
  CHECK(result.to_vector() == written.to_vector());
}

TEST_CASE("a GPT in 16 bits is near the one in float, and trains") {
  auto options = small_gpt;
  options.dropout = 0;
  options.lora_rank = 2;
  nn::GPT<Cpu> model(options);
  const auto text = tokens(2, 8, 11);
  const auto whole = ch::value_of(model(text));
  const nn::MixedPrecision<nn::GPT<Cpu>, ch::bf16> narrow{model};
  const auto scores = narrow(text);
  CHECK(distance(ch::value_of(scores), whole) < 0.02);
  ch::sum(ch::square(scores)).backward();
  CHECK(static_cast<double>(ch::sum(ch::abs(model.h[1].attn.c_attn.lora->lora_B.grad())).item()) > 0);
}

TEST_CASE("LoRA changes nothing at first, and trains only its own matrices") {
  auto options = small_gpt;
  options.dropout = 0;
  nn::GPT<Cpu> plain(options);
  options.lora_rank = 2;
  nn::GPT<Cpu> model(options);
  std::vector<std::string> own;
  for (auto& named : nn::named_parameters<Cpu>(model))
    if (named.name.find("lora_") != std::string::npos) own.push_back(named.name);
  CHECK(own == std::vector<std::string>{"h.0.attn.c_attn.lora_A.weight", "h.0.attn.c_attn.lora_B.weight",
                                        "h.1.attn.c_attn.lora_A.weight", "h.1.attn.c_attn.lora_B.weight"});
  nn::train_only_lora(model);
  for (auto& named : nn::named_parameters<Cpu>(model))
    CHECK(named.parameter->wants_grad() == (named.name.find("lora_") != std::string::npos));
  auto& lora = *model.h[0].attn.c_attn.lora;
  model.eval();
  const auto before = ch::value_of(model(tokens(1, 6, 11)));
  ch::sum(ch::square(model(tokens(1, 6, 11)))).backward();
  CHECK(static_cast<double>(ch::sum(ch::abs(lora.lora_B.grad())).item()) > 0);
  CHECK(static_cast<double>(ch::sum(ch::abs(lora.lora_A.grad())).item()) == 0);  // B is 0
  // The change is that of c_attn's weight by 16 / 2 B A.
  lora.lora_B.assign(nn::init::normal<float, Cpu, 2>({36, 2}, 0, 0.5));
  const auto changed = ch::value_of(model(tokens(1, 6, 11)));
  CHECK(distance(before, changed) > 1e-4);
  auto& weight = model.h[0].attn.c_attn.weight;
  weight.assign(ch::value_of(weight) + ch::matmul(ch::value_of(lora.lora_B), ch::value_of(lora.lora_A)) * 8.0);
  lora.lora_B.assign(ch::Tensor<float, 2>::zeros({36, 2}));
  CHECK(distance(ch::value_of(model(tokens(1, 6, 11))), changed) < 1e-5);
}

TEST_CASE("BERT base has Hugging Face's names and its 110 M parameters") {
  nn::BERT<Cpu> model({.num_hidden_layers = 1});  // a layer has 7,087,872
  CHECK(parameters_of(model) + 11 * 7'087'872 == 109'482'240);
  const auto names = names_of(model);
  CHECK(names.front() == "embeddings.word_embeddings.weight [30522, 768]");
  CHECK(names[3] == "embeddings.LayerNorm.weight [768]");
  CHECK(names[5] == "encoder.layer.0.attention.self.query.weight [768, 768]");
  CHECK(names[11] == "encoder.layer.0.attention.output.dense.weight [768, 768]");
  CHECK(names[19] == "encoder.layer.0.output.LayerNorm.weight [768]");
  CHECK(names.back() == "pooler.dense.bias [768]");
  nn::BERTForMaskedLM<Cpu> guesses(
      {.vocab_size = 20, .hidden_size = 8, .num_hidden_layers = 1, .num_attention_heads = 2, .intermediate_size = 16});
  CHECK(names_of(guesses).back() == "cls.predictions.bias [20]");
  CHECK(guesses.decoder.weight.shared() == guesses.bert.embeddings.words.weight.shared());
  CHECK(ch::value_of(guesses(tokens(2, 5, 20))).shape() == ch::Shape<3>{2, 5, 20});
}

TEST_CASE("a BERT does not read padding, and reads types") {
  nn::BERT<Cpu> model({.vocab_size = 20,
                       .hidden_size = 8,
                       .num_hidden_layers = 2,
                       .num_attention_heads = 2,
                       .intermediate_size = 16,
                       .max_position_embeddings = 6});
  model.eval();
  auto text = tokens(2, 6, 20);
  auto types = ch::Tensor<std::int64_t, 2>::zeros({2, 6});
  auto mask = ch::Tensor<bool, 2>::full({2, 6}, true);
  const auto plain = ch::value_of(model(text));
  CHECK(distance(plain, ch::value_of(model(text, types, mask))) < 1e-6);
  mask.data()[5] = false;
  const auto before = ch::value_of(model(text, types, mask));
  text.data()[5] = 1;
  const auto after = ch::value_of(model(text, types, mask));
  CHECK(distance(ch::slice(before, 1, 0, 5), ch::slice(after, 1, 0, 5)) == 0);
  CHECK(distance(before, plain) > 1e-4);
  types.data()[0] = 1;
  CHECK(distance(ch::value_of(model(text, types, mask)), after) > 1e-4);
  CHECK(model.pooled(model(text)).shape() == ch::Shape<2>{2, 8});
  CHECK(message_of<ch::ShapeError>([&] { model(tokens(1, 7, 20)); }) ==
        "BERT: expected at most 6 tokens (max_position_embeddings), got 7");
}

}  // namespace models_test
