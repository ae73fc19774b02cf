// QuantizationAware in embeddings and attention, against PyTorch's numbers and on several ranks.
#include <array>
#include <chorus/nn/attention.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/quantization/ops/quantized.hpp>
#include <chorus/quantization/quantized.hpp>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "models.hpp"

namespace quantized_layers_test {

using namespace test::names;
using qat::Quantized, qat::ranges_of;
namespace nn = chorus::nn;
using nn::quantization::ActivationSite;

/// The same numbers as those of layers_by_pytorch.py.
template <int Rank>
Tensor<float, Rank> formula(const Shape<Rank>& shape, Index key, float factor = 1) {
  auto out = Tensor<float, Rank>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i)
    out.data()[i] = factor * static_cast<float>(static_cast<double>((i * 7919 + key * 104729) % 2001) / 1000 - 1);
  return out;
}
template <class W, class B>
void fill(W& weight, B& bias, Index key) {
  weight.assign(formula<2>({weight.shape()[0], weight.shape()[1]}, key, 0.2f));
  bias.assign(formula<1>({bias.shape()[0]}, key + 1, 0.2f));
}

struct Tokens : nn::Module {
  nn::Embedding<Cpu> table{10, 8};
  nn::Linear<Cpu> fc{24, 3};
  CHORUS_MODULE(Tokens, table, fc)
  Tokens() {
    table.weight.assign(formula<2>({10, 8}, 40, 0.2f));
    fill(fc.weight, fc.bias, 50);
  }
  auto forward(const Tensor<std::int64_t, 2>& x) const { return fc(flatten(table(x))); }
};
struct Attends : nn::Module {
  nn::MultiheadAttention<Cpu> attn{8, 2};
  CHORUS_MODULE(Attends, attn)
  Attends() {
    fill(attn.in_proj_weight, attn.in_proj_bias, 60);
    fill(attn.out_proj.weight, attn.out_proj.bias, 70);
  }
  auto forward(const auto& x) const { return mean(attn(x, x, x, true), 1); }
};

Tensor<std::int64_t, 2> tokens(Index batch, Index step) {
  auto out = Tensor<std::int64_t, 2>::empty({batch, 3});
  for (Index i = 0; i < out.numel(); ++i) out.data()[i] = (i * 7 + step) % 10;
  return out;
}
Tensor<float, 3> sequences(Index batch, Index step) { return formula<3>({batch, 5, 8}, step); }

template <class Model, class Input>
Quantized<Model> trained(const Input& input, const std::vector<float>& losses) {
  SingleDevice<Quantized<Model>> net{Quantized<Model>{Model{}}, 1};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.05}};
  for (std::size_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto loss =
        cross_entropy(net(input(static_cast<Index>(step))), Tensor<std::int64_t, 1>::from({0, 1, 2, 0, 1, 2}, {6}));
    loss.backward();
    optimizer.step();
    CHECK(loss.item() == Approx(losses[step]).margin(1e-5));
  }
  return nn::copy_of(net.module());
}
void check_range(const ActivationSite& site, float min, float max) {
  INFO(site.name());
  CHECK(site.range().min == Approx(min).margin(1e-5));
  CHECK(site.range().max == Approx(max).margin(1e-5));
}

TEST_CASE("qat: an embedding trains as PyTorch's does, and its rows are those of integers") {
  auto model = trained<Tokens>([](Index step) { return tokens(6, step); },
                               {1.1191689f, 1.0895854f, 1.0882474f, 1.1148156f});
  const auto& layers = model.ranges();
  check_range(layers[1].input, -0.1983934f, 0.1940072f);
  check_range(layers[1].output, -0.2832004f, 0.0226014f);
  CHECK(layers[0].input.range().empty());
  std::string names;
  for (const auto& named : nn::named_buffers<Cpu>(model)) names += named.name + " ";
  CHECK_THAT(names, Contains("quantization.table.weight_min quantization.table.weight_max quantization.fc.input"));

  model(tokens(6, 9));
  const auto levels = layers[0].weight_levels(model.scheme());
  REQUIRE(levels.size() == 10);
  const auto& weight = value_of(model.model().table.weight);
  QuantizedWeight<2> integers{Tensor<std::int8_t, 2>::empty({10, 8}), Tensor<float, 1>::empty({10})};
  for (Index row = 0; row < 10; ++row) {
    const auto& own = levels[static_cast<std::size_t>(row)];
    integers.scale(row) = own.scale;
    for (Index k = 0; k < 8; ++k) integers.values(row, k) = static_cast<std::int8_t>(own.level(weight(row, k)));
  }
  const auto rounded = embedding(chorus::detail::fake_quantize(weight, levels, 0, "table"), tokens(4, 2));
  CHECK(quantized_embedding(integers, tokens(4, 2)).to_vector() == rounded.to_vector());
}

TEST_CASE("qat: attention's products train with rounded operands, as PyTorch's do") {
  auto model = trained<Attends>([](Index step) { return sequences(6, step); },
                                {2.1174581f, 2.1273491f, 2.0811107f, 2.0739574f});
  const auto& own = model.ranges()[0];
  const float expected[][2] = {{-0.9999009f, 0.9902179f}, {-0.6627831f, 0.9346845f}, {-0.6682155f, 0.9339164f},
                              {-0.2710725f, 1.2566289f}, {0, 1},                    {-0.2458110f, 1.2383575f}};
  check_range(own.input, expected[0][0], expected[0][1]);
  for (std::size_t i = 0; i < 4; ++i) check_range(own.attention[i], expected[i + 1][0], expected[i + 1][1]);
  check_range(model.ranges()[1].input, expected[5][0], expected[5][1]);
  CHECK(own.attention[3].name() == "attn.attention");
  model.eval();
  model(sequences(6, 5));
  CHECK_THAT(message_of<UsageError>([&] { nn::quantized(model, sequences(1, 0)); }),
             Contains("'attn', a MultiheadAttention(8, 2 heads), has no integer form"));
}

/// Ranges after steps with even, uneven and empty shares, or losses.
template <class Model, class Net, class Input, class Share, class Mean>
std::string run(Net& net, double rate, const Input& input, const Share& share, const Mean& mean) {
  optim::Sgd optimizer{net.parameters(), {.lr = rate}};
  std::string text;
  for (Index step = 0; step < 6; ++step) {
    const Index size = std::array<Index, 3>{7, 1, 6}[static_cast<std::size_t>(step % 3)];
    optimizer.zero_grad();
    const auto mine = share(test::labels(size, 3, static_cast<std::uint32_t>(step)));
    const auto loss = cross_entropy(net(share(input(size, step))), mine);
    loss.backward();
    optimizer.step();
    text += rate == 0 ? ranges_of(net.module()) + "\n" : cat(mean(static_cast<double>(loss.item()), mine.numel()), " ");
  }
  return text;
}
template <class Model, class Input>
void check_ranks(const Input& input) {
  const auto alone = [&](double rate) {
    SingleDevice<Quantized<Model>> net{Quantized<Model>{Model{}}, 3};
    return run<Model>(
        net, rate, input, [](const auto& x) { return x; }, [](double value, Index) { return value; });
  };
  const auto on_ranks = [&](int ranks, double rate) {
    return common_text(ranks, [&](const World& world) {
      Distributed<Quantized<Model>> rank(world, {}, Quantized<Model>{Model{}});
      return run<Model>(
          rank.net, rate, input, [&](const auto& x) { return test::share(x, world); },
          [&](double value, Index samples) { return rank.net.mean(value, samples); });
    });
  };
  const auto ranges = alone(0), losses = alone(0.05);
  for (const int ranks : {1, 2, 3}) {
    CHECK(on_ranks(ranks, 0) == ranges);
    CHECK(test::distance(test::numbers_in(on_ranks(ranks, 0.05)), test::numbers_in(losses)) < 1e-5);
  }
}

TEST_CASE("qat: an embedding's and attention's ranges and losses are one device's on any number of ranks") {
  check_ranks<Tokens>(tokens);
  check_ranks<Attends>(sequences);
}

TEST_CASE("qat: a model of tokens has no integer form, and rows that are no entries are refused") {
  Quantized<Tokens> model{Tokens{}};
  CHECK(message_of<UsageError>([&] { nn::quantized(model, tokens(1, 0)); }) ==
        "quantized: Tokens begins with an Embedding, but an integer model needs quantised input: use "
        "quantized_embedding");
  const QuantizedWeight<2> table{Tensor<std::int8_t, 2>::zeros({3, 2}), Tensor<float, 1>::ones({3})};
  CHECK(message_of<UsageError>([&] { quantized_embedding(table, Tensor<std::int64_t, 1>::full({1}, 3)); }) ==
        "quantized_embedding: index 3 is not in [0, 3)");
  const QuantizedWeight<2> few{Tensor<std::int8_t, 2>::zeros({3, 2}), Tensor<float, 1>::ones({2})};
  CHECK(message_of<ShapeError>([&] { quantized_embedding(few, Tensor<std::int64_t, 1>::zeros({1})); }) ==
        "quantized_embedding: expected 3 scales for a weight of shape [3, 2], got 2");
}

}  // namespace quantized_layers_test
