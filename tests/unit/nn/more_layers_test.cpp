#include <catch.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/convolutions.hpp>
#include <chorus/nn/group_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/mixture_of_experts.hpp>
#include <chorus/nn/module_dict.hpp>
#include <chorus/nn/more_activations.hpp>
#include <chorus/nn/positions.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/nn/recurrent_cells.hpp>
#include <chorus/ops/reduction.hpp>
#include <cmath>
#include <golden/experts.hpp>
#include <numeric>

#include "../message_of.hpp"

namespace more_layers_test {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu;
using ch::Index;
using ch::Shape;

template <class M>
std::vector<std::string> names(M& module) {
  std::vector<std::string> out;
  for (const auto& named : nn::named_parameters<Cpu>(module)) out.push_back(named.name);
  return out;
}
template <int Rank>
ch::Tensor<float, Rank> ramp(const Shape<Rank>& shape) {
  auto out = ch::Tensor<float, Rank>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i) out.data()[i] = std::sin(static_cast<float>(i));
  return out;
}

TEST_CASE("convolution layers have PyTorch's shapes and bounds") {
  nn::Conv1d<Cpu> sequence{4, 6, {.kernel = 3, .padding = 1, .groups = 2}};
  CHECK(sequence.weight.shape() == Shape<3>{6, 2, 3});
  CHECK(sequence(ramp<3>({2, 4, 5})).shape() == Shape<3>{2, 6, 5});
  nn::Conv3d<Cpu> volume{2, 3, {.kernel = {1, 2, 3}, .bias = false}};
  CHECK(volume.weight.shape() == Shape<5>{3, 2, 1, 2, 3});
  CHECK(names(volume) == std::vector<std::string>{"weight"});
  CHECK(volume(ramp<5>({1, 2, 3, 3, 3})).shape() == Shape<5>{1, 3, 3, 2, 1});
  nn::ConvTranspose2d<Cpu> back{4, 6, {.kernel = 2, .stride = 2, .groups = 2}};
  CHECK(back.weight.shape() == Shape<4>{4, 3, 2, 2});
  CHECK(back(ramp<4>({1, 4, 3, 3})).shape() == Shape<4>{1, 6, 6, 6});
  nn::ConvTranspose1d<Cpu> plain{4, 2, {.kernel = 3, .bias = false}};
  CHECK(plain(ramp<3>({1, 4, 5})).shape() == Shape<3>{1, 2, 7});
  float largest = 0;
  for (const float w : back.weight.value().to_vector()) largest = std::max(largest, std::abs(w));
  CHECK(largest <= 1 / std::sqrt(12.0f));
  CHECK(largest > 0.7f / std::sqrt(12.0f));
  CHECK(message_of<ch::ShapeError>([] {
          nn::Conv1d<Cpu>{4, 6, {.kernel = 3, .groups = 4}};
        }) == "Conv1d: 4 -> 6 channels, kernel 3, 4 groups: all must be positive, and groups divide the channels");
}

TEST_CASE("normalisation layers start without effect on normalised numbers") {
  nn::GroupNorm<Cpu> group{2, 4};
  nn::InstanceNorm2d<Cpu> plain{4}, affine{4, {.affine = true}};
  nn::RMSNorm<Cpu> rms{6};
  CHECK(names(group) == std::vector<std::string>{"weight", "bias"});
  CHECK(names(plain).empty());
  CHECK(names(affine).size() == 2);
  const auto x = ramp<4>({2, 4, 3, 6});
  CHECK(plain(x).value().to_vector() == affine(x).value().to_vector());
  CHECK(std::abs(ch::mean(group(x)).item()) < 1e-6f);
  CHECK(ch::mean(rms(x) * rms(x)).item() == Approx(1).epsilon(1e-3));
  CHECK_THROWS_AS((nn::GroupNorm<Cpu>{3, 4}), ch::ShapeError);
  CHECK_THROWS_AS(plain(ramp<4>({2, 3, 3, 3})), ch::ShapeError);
}

TEST_CASE("functions as layers in a Sequential") {
  nn::Sequential net{nn::Upsample{2, nn::UpsampleMode::bilinear},
                     nn::AdaptiveMaxPool2d{4},
                     nn::AdaptiveAvgPool2d{{2, 3}},
                     nn::SELU{},
                     nn::Hardshrink{0.1},
                     nn::Softplus{},
                     nn::Hardtanh{},
                     nn::Dropout2d{0.5},
                     nn::Identity{},
                     nn::GlobalAvgPool{},
                     nn::LogSoftmax{1}};
  net.eval();
  const auto y = net(ramp<4>({2, 6, 3, 3}));
  CHECK(y.shape() == Shape<2>{2, 6});
  for (const float value : y.to_vector()) CHECK(value < 0);
  nn::PReLU<Cpu> slope{3};
  CHECK(names(slope) == std::vector<std::string>{"weight"});
  CHECK(slope(ch::Tensor<float, 2>::full({1, 3}, -4)).value().to_vector() == std::vector<float>(3, -1));
  CHECK(nn::Upsample{3}(ramp<4>({1, 1, 2, 2})).shape() == Shape<4>{1, 1, 6, 6});
}

TEST_CASE("sinusoidal positions are those of the paper") {
  for (const Index length : {7, 5, 20})  // tables are cached between calls
    for (const Index features : {6, 8}) {
      const auto y = nn::SinusoidalPositions{}(ch::Tensor<double, 3>::zeros({1, length, features}));
      bool right = true;
      for (Index place = 0; place < length; ++place)
        for (Index i = 0; i < features / 2; ++i) {
          const double angle = static_cast<double>(place) /
                               std::pow(10000.0, 2.0 * static_cast<double>(i) / static_cast<double>(features));
          right = right && y(0, place, 2 * i) == Approx(std::sin(angle)) &&
                  y(0, place, 2 * i + 1) == Approx(std::cos(angle));
        }
      CHECK(right);
    }
  CHECK_THROWS_AS(nn::SinusoidalPositions{}(ch::Tensor<double, 3>::zeros({1, 7, 5})), ch::ShapeError);
}

TEST_CASE("learned positions are added, and no more than there are") {
  nn::LearnedPositions<Cpu> positions{5, 2};
  const auto y = positions(ch::Tensor<float, 3>::zeros({2, 3, 2}));
  CHECK(y.value().slice(0, 1, 2).to_vector() == positions.weight.value().slice(0, 0, 3).to_vector());
  CHECK_THROWS_AS(positions(ch::Tensor<float, 3>::zeros({1, 6, 2})), ch::ShapeError);
}

TEST_CASE("products of rotated queries and keys depend on distances alone") {
  const auto q = ch::Tensor<double, 2>::from({0.3, -1, 2, 0.7}, {1, 4}),
             k = ch::Tensor<double, 2>::from({1, 0.2, -0.4, 3}, {1, 4});
  const auto product = [&](Index query, Index key) {
    return ch::sum(nn::rotary_positions(q, query) * nn::rotary_positions(k, key)).item();
  };
  CHECK(product(5, 3) == Approx(product(12, 10)));
  CHECK(product(5, 3) != Approx(product(5, 4)));
  CHECK(product(0, 0) == Approx(ch::sum(q * k).item()));
  const auto both = nn::rotary_positions(ch::concat(0, q, q));
  CHECK(both(0, 1) == q(0, 1));
  CHECK(both(1, 3) == Approx(nn::rotary_positions(q, 1)(0, 3)));
}

TEST_CASE("a ModuleDict has its modules by name, and their parameters' paths") {
  nn::ModuleDict<nn::Linear<Cpu>> heads;
  heads.insert("b", nn::Linear<Cpu>(2, 3));
  heads.insert("a", nn::Linear<Cpu>(2, 1));
  CHECK(names(heads) == std::vector<std::string>{"b.weight", "b.bias", "a.weight", "a.bias"});
  CHECK(heads["a"](ramp<2>({4, 2})).shape() == Shape<2>{4, 1});
  CHECK(heads.contains("b"));
  CHECK(message_of<ch::UsageError>([&] { heads["c"]; }) == "ModuleDict: expected one of 2 names, got 'c'");
  CHECK_THROWS_AS(heads.insert("a", nn::Linear<Cpu>(2, 1)), ch::UsageError);
  CHECK_THROWS_AS(heads.insert("a.b", nn::Linear<Cpu>(2, 1)), ch::UsageError);
}

TEST_CASE("cells compute the steps of recurrent layers") {
  const auto x = ramp<3>({2, 5, 3});
  const auto steps = [&](const auto& cell, const auto& hidden_of) {
    auto state = cell(ch::reshape(x.slice(1, 0, 1), {2, 3}));
    for (Index t = 1; t < 5; ++t) state = cell(ch::reshape(x.slice(1, t, t + 1), {2, 3}), state);
    return hidden_of(state);
  };
  nn::LSTMCell<Cpu> lstm_cell(3, 4);
  nn::GRUCell<Cpu> gru_cell(3, 4);
  const auto lstm = ch::lstm(x, lstm_cell.weight_ih, lstm_cell.weight_hh, lstm_cell.bias_ih, lstm_cell.bias_hh);
  const auto gru = ch::gru(x, gru_cell.weight_ih, gru_cell.weight_hh, gru_cell.bias_ih, gru_cell.bias_hh);
  CHECK(steps(lstm_cell, [](const auto& s) { return s.hidden.value().to_vector(); }) ==
        lstm.hidden.value().to_vector());
  CHECK(steps(gru_cell, [](const auto& s) { return s.value().to_vector(); }) ==
        gru.hidden.value().to_vector());
  CHECK(names(gru_cell) == std::vector<std::string>{"weight_ih", "weight_hh", "bias_ih", "bias_hh"});
  nn::LSTMCell<Cpu> without(3, 4, {.bias = false});
  CHECK(names(without) == std::vector<std::string>{"weight_ih", "weight_hh"});
  CHECK(without(ramp<2>({2, 3})).cell.shape() == Shape<2>{2, 4});
  CHECK_THROWS_AS((nn::GRUCell<Cpu>(0, 4)), ch::ShapeError);
  CHECK_THROWS_AS(gru_cell(ramp<2>({2, 5})), ch::ShapeError);
}

/// The results of a padded batch beside those of each sample alone, and the gradients of both.
template <class Layer>
void check_lengths() {
  using namespace chorus;
  Layer layer(3, 4, {.num_layers = 2, .bidirectional = true});
  const std::vector<std::int64_t> lengths{5, 2, 1, 4};
  auto x = Tensor<double, 3>::empty({5, 4, 3});
  for (Index i = 0; i < x.numel(); ++i) x.data()[i] = std::sin(static_cast<double>(3 * i + 1));
  const auto gradients = [&](const auto& loss) {
    loss.backward();
    return layer.cells[1].weight_hh.grad().to_vector();
  };
  const auto all = layer(x, Tensor<std::int64_t, 1>::from(lengths, {4}));
  const auto whole = gradients(sum(square(all.output)) + sum(square(all.hidden)));
  std::vector<double> twice;
  for (Index i = 0; i < 4; ++i) {
    const Index length = lengths[static_cast<std::size_t>(i)];
    const auto one = layer(contiguous(x.slice(1, i, i + 1).slice(0, 0, length)));
    for (Index t = 0; t < 5; ++t)
      for (Index k = 0; k < 8; ++k)
        CHECK(value_of(all.output)(t, i, k) == Approx(t < length ? value_of(one.output)(t, 0, k) : 0).margin(1e-14));
    for (Index n = 0; n < 4; ++n)
      for (Index k = 0; k < 4; ++k) {
        CHECK(value_of(all.hidden)(n, i, k) == Approx(value_of(one.hidden)(n, 0, k)).margin(1e-14));
        if constexpr (requires { all.cell; })
          CHECK(value_of(all.cell)(n, i, k) == Approx(value_of(one.cell)(n, 0, k)).margin(1e-14));
      }
    twice = gradients(sum(square(one.output)) + sum(square(one.hidden)));  // added to the batch's
  }
  for (std::size_t k = 0; k < whole.size(); ++k) CHECK(2 * whole[k] == Approx(twice[k]).margin(1e-12));
  CHECK_THROWS_AS(layer(x, Tensor<std::int64_t, 1>::from({1, 2, 6, 1}, {4})), UsageError);
  CHECK_THROWS_AS(layer(x, Tensor<std::int64_t, 1>::from({1, 2}, {2})), ShapeError);
}
TEST_CASE("LSTM and GRU with lengths give each sample what it gets alone, in both directions") {
  check_lengths<nn::LSTM<Cpu, double>>();
  check_lengths<nn::GRU<Cpu, double>>();
}

/// sin(0.7 i + key), as in golden/experts.py.
template <int Rank>
ch::Tensor<double, Rank> waves(double key, const Shape<Rank>& shape) {
  auto out = ch::Tensor<double, Rank>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i) out.data()[i] = std::sin(0.7 * static_cast<double>(i) + key);
  return out;
}
TEST_CASE("MixtureOfExperts has PyTorch's numbers and gradients, also where tokens are dropped") {
  for (const auto& expected : golden::experts()) {
    nn::MixtureOfExperts<Cpu, double> layer{3, expected.options};
    const ch::Parameter<double, 2> x{waves<2>(1, {7, 3})};
    layer.router.weight = ch::Parameter<double, 2>{waves<2>(2, {4, 3})};
    layer.up.weight = ch::Parameter<double, 3>{waves<3>(3, {4, 2, 3})};
    layer.up.bias = ch::Parameter<double, 2>{waves<2>(4, {4, 2})};
    layer.down.weight = ch::Parameter<double, 3>{waves<3>(5, {4, 3, 2})};
    layer.down.bias = ch::Parameter<double, 2>{waves<2>(6, {4, 3})};
    const auto out = layer(x);
    CHECK(out.dropped == expected.dropped);
    CHECK(std::accumulate(out.load.begin(), out.load.end(), Index{0}) == 7 * expected.options.top_k);
    const auto loss = ch::mean(out.loss);
    (ch::sum(out.y * waves<2>(7, {7, 3})) + loss).backward();
    std::vector<double> got;
    const auto add = [&](const auto& tensor) {
      const auto numbers = ch::contiguous(tensor).to_vector();
      got.insert(got.end(), numbers.begin(), numbers.end());
    };
    add(ch::value_of(out.y));
    got.push_back(loss.item());
    add(x.grad());
    add(layer.router.weight.grad());
    add(layer.up.weight.grad());
    add(layer.up.bias.grad());
    add(layer.down.weight.grad());
    add(layer.down.bias.grad());
    REQUIRE(got.size() == expected.numbers.size());
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(expected.numbers[i]).margin(1e-13));
  }
}
TEST_CASE("MixtureOfExperts: equal probabilities, all tokens to one expert, no token, evaluation, bf16") {
  nn::MixtureOfExperts<Cpu> layer{2, {.experts = 3, .top_k = 1, .capacity = 1, .balance_loss = 1}};
  layer.router.weight = ch::Parameter<float, 2>{ch::Tensor<float, 2>::zeros({3, 2})};
  auto out = layer(ramp<3>({2, 3, 2}));  // of equal experts the first
  CHECK(out.load == std::vector<Index>{6, 0, 0});
  CHECK(out.dropped == 4);
  CHECK(ch::value_of(out.loss).shape() == Shape<2>{2, 3});
  CHECK(ch::mean(out.loss).item() == Approx(1));
  for (Index t = 2; t < 6; ++t) CHECK(ch::value_of(out.y)(t / 3, t % 3, 0) == 0);
  ch::sum(out.y).backward();
  CHECK(ch::value_of(layer.up.weight.grad())(1, 0, 0) == 0);
  CHECK(layer(ramp<2>({0, 2})).load == std::vector<Index>{0, 0, 0});
  layer.eval();
  CHECK(ch::sum(layer(ramp<2>({4, 2})).loss).item() == 0);
  const auto narrow = ch::to<ch::bf16>(ramp<2>({4, 2}));
  const auto y = ch::to<float>(ch::value_of(layer(narrow).y)), wide = ch::value_of(layer(ch::to<float>(narrow)).y);
  for (Index t = 0; t < 4; ++t) CHECK(y(t, 1) == Approx(wide(t, 1)).epsilon(0.01));
}

}  // namespace more_layers_test
