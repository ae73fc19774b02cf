// A model's summary for an input: shapes, multiply-adds and memory, against hand-computed values.

#include "../../../examples/models.hpp"

#include <catch.hpp>
#include <chorus/nn/convolutions.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/nn/summary.hpp>
#include <chorus/nn/transformer.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <unit/message_of.hpp>

namespace summary_test {

namespace ch = chorus;
namespace nn = chorus::nn;
using Cpu = ch::Cpu;
using ch::Index;

/// The text without column padding: one blank between words.
std::string squeezed(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    const bool blank = letter == ' ' || letter == '\n';
    if (!blank || out.empty() || (out.back() != ' ' && out.back() != '\n')) out += letter;
    if (letter == '\n' && out.back() == ' ') out.back() = '\n';
  }
  return out;
}
std::string without_memory(const std::string& text) { return text.substr(0, text.rfind(" multiply-adds, ")); }

bool has(const std::string& text, const std::string& part) {
  INFO(text);
  return text.find(part) != std::string::npos;
}

/// The bytes that the tape holds after one forward pass of the model itself.
template <class Model, class... Inputs>
std::size_t held_by(const Model& model, const Inputs&... inputs) {
  const auto held = [] { return ch::trace::memory(0, ch::trace::Memory::activations); };
  const auto before = held();
  const auto output = model(inputs...);
  return held() - before;
}
std::string held_text(std::size_t bytes) { return ch::cat(" multiply-adds, ", bytes, " bytes of activations held"); }

struct TwoLayers : nn::Module {
  nn::Linear<Cpu> fc1{4, 8}, fc2{8, 3, {.bias = false}};
  nn::ReLU act;
  CHORUS_MODULE(TwoLayers, fc2, fc1, act)  // listed in another order than called
  auto forward(const auto& x) const { return fc2(act(fc1(x))); }
};

TEST_CASE("an MLP's summary has its layers in the order of the calls") {
  TwoLayers model;
  const auto x = ch::Tensor<float, 2>::zeros({5, 4});
  const auto text = nn::summary(model, x);
  CHECK(without_memory(text) ==
        "module  layer                     output  parameters  multiply-adds\n"
        "        TwoLayers                 [5, 3]  -           -\n"
        "fc1     Linear(4, 8)              [5, 8]  40          160\n"
        "act     ReLU                      [5, 8]  -           -\n"
        "fc2     Linear(8, 3, bias=false)  [5, 3]  24          120\n"
        "64 parameters, 64 trainable, 0 KiB\n"
        "input [5, 4]: 280");
  CHECK(has(text, held_text(held_by(model, x))));
  CHECK(held_by(model, x) > 0);
  CHECK(nn::summary(model, {5, 4}) == text);
  CHECK(nn::summary(model, ch::Shape<2>{5, 4}) == text);
  {
    const ch::NoGrad no_grad;
    CHECK(nn::summary(model, x) == text);
  }
  CHECK(nn::summary(model).find("output") == std::string::npos);
}

TEST_CASE("LeNet's multiply-adds") {
  ToyModel<Cpu> model(ImageFacts{1, 28, 28, 10});
  const auto text = nn::summary(model, {1, 1, 28, 28}), table = squeezed(text);
  CHECK(has(table, "conv1 Conv2d(1, 6, kernel=5x5, padding=2) [1, 6, 28, 28] 156 117600\n"));
  CHECK(has(table, "conv2 Conv2d(6, 16, kernel=5x5) [1, 16, 10, 10] 2416 240000\n"));
  CHECK(has(table, "fc1 Linear(400, 120) [1, 120] 48120 48000\n"));
  CHECK(has(table, "fc2 Linear(120, 84) [1, 84] 10164 10080\n"));
  CHECK(has(table, "fc3 Linear(84, 10) [1, 10] 850 840\n"));
  CHECK(has(text, "input [1, 1, 28, 28]: 416520"));
  CHECK(has(text, held_text(held_by(model, ch::Tensor<float, 4>::zeros({1, 1, 28, 28})))));
}

TEST_CASE("ResNet-18 has torchvision's multiply-adds, and one more image as many again") {
  nn::ResNet18<Cpu> model;
  model.eval();
  const auto text = nn::summary(model, {1, 3, 224, 224});
  CHECK(has(text, "11689512 parameters, 11689512 trainable"));
  CHECK(has(text, "input [1, 3, 224, 224]: 1814073344 multiply-adds"));
  CHECK(has(squeezed(text), "conv1 Conv2d(3, 64, kernel=7x7, stride=2, padding=3) [1, 64, 112, 112] 9408 118013952\n"));
  nn::ResNet18<Cpu> small({.classes = 10, .small_images = true});
  const auto adds = [&](Index images) {
    const auto all = nn::summary(small, {images, 3, 32, 32});
    return std::stoll(all.substr(all.find("]: ") + 3));
  };
  CHECK(adds(2) == 2 * adds(1));
}

struct Translator : nn::Module {
  nn::Embedding<Cpu> words{11, 16};
  nn::TransformerEncoderLayer<Cpu> block{16, {.heads = 4, .feed_forward = 32}};
  nn::Linear<Cpu> head{16, 11};
  CHORUS_MODULE(Translator, words, block, head)
  auto forward(const ch::Tensor<std::int64_t, 2>& tokens) const { return head(block(words(tokens))); }
};

TEST_CASE("a transformer's attention counts both products, an embedding nothing") {
  Translator model;
  const auto tokens = ch::Tensor<std::int64_t, 2>::zeros({2, 5});
  const auto text = nn::summary(model, tokens), table = squeezed(text);
  CHECK(has(table, "words Embedding(11, 16) [2, 5, 16] 176 -\n"));
  // The three projections, 2 x 5 x 16 x 48, and 2 x 4 x 5 x 5 x (4 + 4).
  CHECK(has(table, "block.self_attn MultiheadAttention(16, 4 heads) [2, 5, 16] 816 9280\n"));
  CHECK(has(table, "block.self_attn.out_proj Linear(16, 16) [2, 5, 16] 272 2560\n"));
  CHECK(has(table, "block.linear1 Linear(16, 32) [2, 5, 32] 544 5120\n"));
  CHECK(has(table, "block.linear2 Linear(32, 16) [2, 5, 16] 528 5120\n"));
  CHECK(has(table, "block.norm2 LayerNorm(16) [2, 5, 16] 32 -\n"));
  CHECK(has(table, "head Linear(16, 11) [2, 5, 11] 187 1760\n"));
  CHECK(has(table, "input [2, 5]: 23840 multiply-adds"));
  CHECK(has(text, held_text(held_by(model, tokens))));
  // With a mask that has no kernel, the same products are matrix products.
  nn::MultiheadAttention<Cpu> attention(16, 4);
  const auto x = ch::Tensor<float, 3>::zeros({2, 5, 16});
  CHECK(has(nn::summary(attention, x, x, x), ": 11840 multiply-adds"));
}

TEST_CASE("recurrent layers count each step, layer and direction") {
  const auto x = ch::Tensor<float, 3>::zeros({6, 2, 3});  // time, batch, features
  nn::LSTM<Cpu> lstm(3, 4, {.num_layers = 2});
  // 12 x 16 x (3 + 4) and 12 x 16 x (4 + 4)
  CHECK(has(squeezed(nn::summary(lstm, x)), "LSTM(3, 4, num_layers=2) [6, 2, 4], [2, 2, 4], [2, 2, 4] 304 2880\n"));
  nn::GRU<Cpu> gru(3, 4, {.bidirectional = true});
  CHECK(has(squeezed(nn::summary(gru, x)), "[6, 2, 8], [2, 2, 4] 216 2016\n"));  // 2 x 12 x 12 x (3 + 4)
}

TEST_CASE("all convolutions are counted") {
  const auto adds = [](auto&& layer, auto... extents) {
    const auto text = nn::summary(layer, {Index{extents}...});
    return std::stoll(text.substr(text.find("]: ") + 3));
  };
  CHECK(adds(nn::Conv1d<Cpu>(3, 5, {.kernel = 3}), 2, 3, 10) == 2 * 5 * 8 * 3 * 3);
  CHECK(adds(nn::Conv2d<Cpu>(4, 6, {.kernel = 3, .stride = 2, .padding = 1, .groups = 2}), 1, 4, 8, 8) ==
        6 * 4 * 4 * 2 * 9);
  CHECK(adds(nn::Conv3d<Cpu>(2, 3, {.kernel = 2}), 1, 2, 4, 5, 6) == 3 * (3 * 4 * 5) * 2 * 8);
  CHECK(adds(nn::ConvTranspose1d<Cpu>(3, 5, {.kernel = 4, .stride = 2}), 2, 3, 10) == 2 * 3 * 10 * 5 * 4);
  CHECK(adds(nn::ConvTranspose2d<Cpu>(4, 6, {.kernel = 3, .groups = 2}), 1, 4, 8, 8) == 4 * 8 * 8 * 3 * 9);
}

struct Twice : nn::Module {
  nn::Linear<Cpu> fc{4, 4}, spare{4, 2};
  nn::ModuleList<nn::Linear<Cpu>> rest;
  CHORUS_MODULE(Twice, spare, rest, fc)
  Twice() {
    rest.push_back(nn::Linear<Cpu>(4, 4));
    rest[0].weight = fc.weight;  // shares the weight
    rest[0].bias = fc.bias;
  }
  auto forward(const auto& x) const {
    const auto y = rest[0](fc(fc(x)));
    return ch::matmul(y, ch::transpose(y, 0, 1));
  }
};

TEST_CASE("a layer that is used twice, shared parameters, and layers that are not called are shown as such") {
  Twice model;
  CHECK(without_memory(squeezed(nn::summary(model, {3, 4}))) ==
        "module layer output parameters multiply-adds\n"
        "Twice [3, 3] - 36\n"
        "fc Linear(4, 4), 2 calls [3, 4] 20 96\n"
        "rest ModuleList - - -\n"
        "rest.0 Linear(4, 4) [3, 4] (20) 48\n"
        "spare Linear(4, 2) - 10 -\n"
        "30 parameters, 30 trainable, 0 KiB\n"
        "input [3, 4]: 180");
}

struct Stateful : nn::Module {
  nn::Linear<Cpu> fc{4, 6};
  nn::BatchNorm<Cpu> norm{6};
  nn::Dropout dropout{0.5};
  CHORUS_MODULE(Stateful, fc, norm, dropout)
  auto forward(const auto& x) const { return dropout(norm(fc(x))); }
};

std::vector<float> all_numbers(Stateful& model) {
  std::vector<float> numbers;
  const auto add = [&](const auto& of) {
    for (const auto& value : ch::Tensor<float, 1>(of).to_vector()) numbers.push_back(value);
  };
  add(model.norm.running_mean.value());
  add(model.norm.running_var.value());
  add(model.fc.bias.value());
  return numbers;
}

TEST_CASE("a summary changes nothing: no statistics, random numbers, gradients or peak, even where the model throws") {
  ch::manual_seed(3);
  Stateful model;
  const auto x = ch::rand<float>(ch::Shape<2>{8, 4});
  const auto numbers = all_numbers(model);
  const auto streams = ch::detail::seed_state().next_stream.load();
  const auto held = ch::trace::memory(0).current;
  CHECK(has(nn::summary(model, x), "input [8, 4]: 192 multiply-adds"));
  const auto wrong = [&] { nn::summary(model, {8, 5}); };
  CHECK(message_of<ch::ShapeError>(wrong) ==
        "summary: linear: the input's shape is [8, 5], the weight's [6, 4]: expected 4 features, got 5");
  CHECK(ch::detail::layer_watch == nullptr);
  CHECK(ch::trace::memory(0).current == held);
  CHECK(all_numbers(model) == numbers);
  CHECK(ch::detail::seed_state().next_stream.load() == streams);
  CHECK(model.training());
  CHECK_FALSE(model.fc.weight.on<Cpu>().grad_arrived());
  CHECK(message_of<ch::ShapeError>([&] {
          nn::summary(model, {0, 4});
        }) == "summary: an input of shape [0, 4]: expected sizes of at least 1");
}

TEST_CASE("a summary is of the model's device, and leaves its peak as it was") {
  Stateful model;
  const Cpu device{41};  // used by no other test
  auto far = nn::copy_of(model, device);
  const auto before = ch::trace::memory(41);
  const auto text = nn::summary(far, {4096, 4});
  CHECK(has(text, "input [4096, 4]: 98304 multiply-adds"));
  CHECK_FALSE(has(text, held_text(0)));
  CHECK(ch::trace::memory(41).peak == before.peak);
  CHECK(ch::trace::memory(41).current == before.current);
}

struct Bare : nn::Module {
  ch::Parameter<float, 1, Cpu> none;
  CHORUS_MODULE(Bare, none)
  auto forward(const auto& x) const { return x; }
};

TEST_CASE("a model without parameters has no summary of an input, for nothing says where it is") {
  Bare model;
  CHECK(message_of<ch::UsageError>([&] { nn::summary(model, ch::Tensor<float, 1>::zeros({2})); }) ==
        "summary: the model has no parameters");
}

TEST_CASE("mixed precision and Sequential have summaries, too") {
  nn::MixedPrecision<TwoLayers> narrow;
  CHECK(has(squeezed(nn::summary(narrow, {5, 4})), "fc1 Linear(4, 8) [5, 8] 40 160\n"));
  nn::Sequential model{nn::Linear<Cpu>(4, 8), nn::ReLU(), nn::Linear<Cpu>(8, 3)};
  CHECK(has(squeezed(nn::summary(model, {5, 4})), "2 Linear(8, 3) [5, 3] 27 120\n"));
  nn::Linear<Cpu, double> wide(4, 2);
  CHECK(has(nn::summary<double>(wide, {5, 4}), "input [5, 4]: 40 multiply-adds"));
}

}  // namespace summary_test
