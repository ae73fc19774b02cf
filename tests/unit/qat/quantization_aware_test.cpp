// QuantizationAware on one device: roundings, phases, files, and refusals.
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/nn/models/resnet.hpp>
#include <chorus/same_bits.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "models.hpp"

namespace quantization_aware_test {

using namespace test::names;
using qat::Cnn, qat::Mlp, qat::images, qat::make, qat::Quantized, qat::ranges_of;
namespace nn = chorus::nn;

/// One layer with a ReLU.
struct Layer : nn::Module {
  nn::Linear<Cpu> fc{48, 4};
  CHORUS_MODULE(Layer, fc)
  auto forward(const auto& x) const { return relu(fc(x)); }
};
/// Its norm is listed after one layer and called after another.
struct Crossed : nn::Module {
  nn::Linear<Cpu> a{48, 4}, b{4, 4};
  nn::BatchNorm<Cpu> norm{4};
  CHORUS_MODULE(Crossed, a, norm, b)
  auto forward(const auto& x) const { return norm(b(a(x))); }
};
/// A function between the layer and its norm.
struct Other : nn::Module {
  nn::Linear<Cpu> a{48, 4};
  nn::BatchNorm<Cpu> norm{4};
  CHORUS_MODULE(Other, a, norm)
  auto forward(const auto& x) const { return norm(tanh(a(x))); }
};
/// No weights.
struct None : nn::Module {
  nn::BatchNorm<Cpu> norm{48};
  CHORUS_MODULE(None, norm)
  auto forward(const auto& x) const { return norm(x); }
};
/// A quantised model within the model.
struct Twice : nn::Module {
  Quantized<Mlp> inner;
  CHORUS_MODULE(Twice, inner)
  auto forward(const auto& x) const { return inner(x); }
};
/// Recomputes its layer in backward.
struct Again : nn::Module {
  nn::Linear<Cpu> fc{48, 3};
  CHORUS_MODULE(Again, fc)
  auto forward(const auto& x) const {
    return checkpoint([&](const auto& in) { return fc(in); }, x);
  }
};

template <class Net>
float train_step(Net& net, optim::Optimizer<Cpu>& optimizer, std::uint32_t number, Index batch = 6) {
  optimizer.zero_grad();
  const auto loss = cross_entropy(net(images(batch, number)), test::labels(batch, 3, number));
  loss.backward();
  optimizer.step();
  return loss.item();
}

std::vector<float> values(nn::Module& model) {
  std::vector<float> out;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    const auto* const data = static_cast<const float*>(named.parameter->value_data());
    out.insert(out.end(), data, data + named.parameter->count());
  }
  return out;
}

TEST_CASE("qat: parameters keep their names; ranges and phases are buffers") {
  auto model = make<Cnn>();
  std::vector<std::string> parameters, buffers;
  for (const auto& named : nn::named_parameters<Cpu>(model)) parameters.push_back(named.name);
  for (const auto& named : nn::named_buffers<Cpu>(model)) buffers.push_back(named.name);
  CHECK(parameters == std::vector<std::string>{"conv1.conv.weight", "conv1.bn.weight", "conv1.bn.bias", "conv2.weight",
                                               "bn2.weight", "bn2.bias", "fc.weight", "fc.bias"});
  const auto has = [&](const std::string& name) {
    return std::find(buffers.begin(), buffers.end(), name) != buffers.end();
  };
  for (const char* name : {"bn2.running_mean", "quantization.phases", "quantization.conv1.conv.input",
                           "quantization.conv1.conv.output", "quantization.conv2.sum", "quantization.conv2.weight_min",
                           "quantization.fc.weight_max",
                           "quantization.fc.sum", "quantization.fc.concatenation"})
    CHECK(has(name));
  CHECK(model.describe() == "QuantizationAware(Cnn)");
}

TEST_CASE("qat: layers take and give what integers stand for") {
  Quantized<Layer> model{qat::filled(Layer{})};
  const auto x = images(5, 1);
  const auto y = model(x);
  const auto& ranges = model.ranges()[0];
  const auto in = ranges.input.levels(model.scheme()), out = ranges.output.levels(model.scheme());
  const auto weights = ranges.weight_levels(model.scheme());
  REQUIRE(weights.size() == 4);
  CHECK(out.zero_point == 0);  // the range is that after the ReLU
  CHECK(ranges.output.range().min >= 0);
  const auto& w = value_of(model.model().fc.weight);
  for (Index i = 0; i < 5; ++i)
    for (Index o = 0; o < 4; ++o) {
      std::int32_t sum = 0;
      for (Index k = 0; k < 48; ++k)
        sum += (in.level(x(i, k)) - in.zero_point) * weights[static_cast<std::size_t>(o)].level(w(o, k));
      const quantized::Requantizer requantize(in.scale, weights[static_cast<std::size_t>(o)].scale,
                                              value_of(model.model().fc.bias)(o), out, true);
      CHECK(out.level(y.value()(i, o)) == requantize(sum));
      CHECK(y.value()(i, o) == out.number(requantize(sum)));
    }
}

TEST_CASE("qat: it trains; without rounding it is the float model") {
  SingleDevice<Quantized<Cnn>> net{make<Cnn>(), 1};
  SingleDevice<Cnn> plain{qat::filled(Cnn{}), 1};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  optim::Sgd plain_optimizer{plain.parameters(), {.lr = 0.1, .momentum = 0.9}};
  net.module().observe(false);
  net.module().fake_quantize(false);
  for (std::uint32_t i = 0; i < 3; ++i) CHECK(train_step(net, optimizer, 1) == train_step(plain, plain_optimizer, 1));
  net.module().observe(true);
  net.module().fake_quantize(true);
  const float first = train_step(net, optimizer, 1);
  for (int i = 0; i < 60; ++i) train_step(net, optimizer, 1);
  CHECK(train_step(net, optimizer, 1) < 0.7f * first);
}

TEST_CASE("qat: frozen norms stay, in the next train() too, until they are freed") {
  SingleDevice<Quantized<Cnn>> net{make<Cnn>(), 1};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.05}};
  train_step(net, optimizer, 1);
  const auto mean = [&] { return value_of(net.module().model().bn2.running_mean).to_vector(); };
  net.module().freeze_norms();
  const auto before = mean();
  net.eval();
  net.train();
  train_step(net, optimizer, 2);
  CHECK(mean() == before);
  net.module().freeze_norms(false);
  train_step(net, optimizer, 3);
  CHECK(mean() != before);
}

TEST_CASE("qat: evaluation, frozen ranges and empty batches change nothing") {
  SingleDevice<Quantized<Mlp>> net{make<Mlp>(), 1};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.05}};
  net(images(0, 1));
  CHECK(net.module().ranges()[0].input.range().empty());
  train_step(net, optimizer, 1);
  const auto known = ranges_of(net.module());
  net(images(0, 1));
  net.eval();
  net(images(6, 2));
  CHECK(ranges_of(net.module()) == known);
  net.train();
  net.module().observe(false);
  const auto off = ranges_of(net.module());
  train_step(net, optimizer, 2);
  CHECK(ranges_of(net.module()) == off);
  net.module().observe(true);
  train_step(net, optimizer, 2);
  CHECK(ranges_of(net.module()) != known);
}

TEST_CASE("qat: a channel whose gamma is 0 has no NaN, and gamma its gradient") {
  auto model = make<Cnn>();
  auto gamma = contiguous(clone(value_of(model.model().bn2.weight)));
  gamma(1) = 0;
  gamma(2) = -0.5f;
  model.model().bn2.weight.assign(gamma);
  SingleDevice<Quantized<Cnn>> net{std::move(model), 1};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  train_step(net, optimizer, 1);
  for (const float number : values(net.module())) CHECK(std::isfinite(number));
  CHECK(value_of(net.module().model().bn2.weight)(1) != 0);
}

TEST_CASE("qat: constant inputs") {
  for (const float constant : {0.0f, 2.5f, -3.0f}) {
    Quantized<Mlp> model{qat::filled(Mlp{})};
    const auto y = model(Tensor<float, 2>::full({3, 48}, constant));
    for (const float number : y.value().to_vector()) CHECK(std::isfinite(number));
    const auto levels = model.ranges()[0].input.levels(model.scheme());
    CHECK(levels.rounded(constant) == Approx(constant).margin(1e-6));
  }
}

TEST_CASE("qat: NaNs and infinities are named") {
  Quantized<Mlp> model{qat::filled(Mlp{})};
  auto x = images(4, 1);
  x(2, 3) = std::numeric_limits<float>::quiet_NaN();
  CHECK(message_of<NonFiniteError>([&] { model(x); }) ==
        "QuantizationAware: 'fc1.input': got a NaN or an infinity, expected finite numbers");
  CHECK(model.ranges()[0].input.range().empty());
  x(2, 3) = std::numeric_limits<float>::infinity();
  CHECK_THAT(message_of<NonFiniteError>([&] { model(x); }), Contains("'fc1.input': got a NaN or an infinity"));
  model(images(4, 1));
  model.eval();
  x(2, 3) = std::numeric_limits<float>::quiet_NaN();
  CHECK(message_of<NonFiniteError>([&] { model(x); }) == "fc1.input: got a NaN, expected numbers");
  model.train();
  auto weight = contiguous(clone(value_of(model.model().fc2.weight)));
  weight(0, 0) = std::numeric_limits<float>::quiet_NaN();
  model.model().fc2.weight.assign(weight);
  CHECK(message_of<NonFiniteError>([&] { model(images(4, 1)); }) ==
        "QuantizationAware: 'fc2.weight': got a NaN or an infinity, expected finite numbers");
}

TEST_CASE("qat: without ranges there is no evaluation") {
  Quantized<Mlp> model{qat::filled(Mlp{})};
  model.eval();
  CHECK_THAT(message_of<UsageError>([&] { model(images(4, 1)); }), Contains("'fc1.input' has no range yet: expected"));
  model.train();
  model.observe(false);
  CHECK_THAT(message_of<UsageError>([&] { model(images(4, 1)); }), Contains("'fc1.input' has no range yet: expected"));
}

TEST_CASE("qat: a float model's file is loaded by its names; a saved one is resumed to the bit") {
  const std::string path = "qat_test.safetensors";
  SingleDevice<Cnn> plain{qat::filled(Cnn{}), 1};
  io::save(plain, path);
  SingleDevice<Quantized<Cnn>> net{Quantized<Cnn>{}, 1};
  const auto report = io::load(net.module(), path, {.strict = false});
  CHECK(report.unexpected.empty());
  CHECK(report.mismatched.empty());
  for (const auto& name : report.missing) CHECK(name.starts_with("quantization."));
  CHECK(values(net.module()) == values(plain.module()));

  for (const int at : {1, 3, 5}) {
    SingleDevice<Quantized<Cnn>> whole{make<Cnn>(), 1};
    optim::Sgd optimizer{whole.parameters(), {.lr = 0.1}};
    std::vector<float> losses, resumed;
    const auto run = [](auto& n, auto& optim, std::uint32_t step) {
      if (step == 2) n.module().freeze_norms();
      if (step == 4) n.module().observe(false);
      return train_step(n, optim, step);
    };
    for (std::uint32_t step = 0; step < 7; ++step) {
      if (static_cast<int>(step) == at) io::save(whole, path);
      losses.push_back(run(whole, optimizer, step));
    }
    SingleDevice<Quantized<Cnn>> again{Quantized<Cnn>{nn::convert_sync_batch_norm(Cnn{})}, 1};
    io::load(again.module(), path);
    optim::Sgd other{again.parameters(), {.lr = 0.1}};
    for (auto step = static_cast<std::uint32_t>(at); step < 7; ++step) resumed.push_back(run(again, other, step));
    CHECK(std::equal(resumed.begin(), resumed.end(), losses.begin() + at));
    CHECK(ranges_of(again.module()) == ranges_of(whole.module()));
  }
  std::remove(path.c_str());
}

TEST_CASE("qat: a batch norm that is listed elsewhere than it is called is refused") {
  Quantized<Crossed> crossed{Crossed{}};
  CHECK_THAT(message_of<UsageError>([&] { crossed(images(4, 1)); }),
             Contains("'a' is folded with 'norm', which is listed after it, but its output goes to another layer"));
  Quantized<Other> other{Other{}};
  CHECK_THAT(message_of<UsageError>([&] { other(images(4, 1)); }),
             Contains("'norm' is listed after 'a' and folded into it, but has another input: list each batch norm"));
}

TEST_CASE("qat: what can't be quantised is refused") {
  CHECK(message_of<UsageError>([] { Quantized<None>{}; }) ==
        "QuantizationAware: None has no layer with weights that could be integers: expected Linear or Conv1d to "
        "Conv3d");
  CHECK(message_of<UsageError>([] { Quantized<test::Smooth<Cpu>>{}; }) ==
        "QuantizationAware: 'fc1' has a weight of F64: expected F32");
  nn::MixedPrecision<Quantized<Mlp>> narrow;
  CHECK_THAT(
      message_of<UsageError>([&] { narrow(images(4, 1)); }),
      Contains("'fc1' has an input of another type, or computes gradients of gradients: expected float on the CPU"));
  Quantized<Twice> twice;
  CHECK(message_of<UsageError>([&] { twice(images(4, 1)); }) == "QuantizationAware: nesting is not supported");
  Quantized<Again> again;
  const auto loss = cross_entropy(again(Variable<float, 2>(images(4, 1), true)), test::labels(4, 3, 1));
  CHECK_THAT(message_of<UsageError>([&] { loss.backward(); }), Contains("a checkpoint computes a layer again after"));
  SingleDevice<SameBits<Quantized<Mlp>, 2>> shares{make<Mlp>(), 1};
  CHECK_THAT(message_of<UsageError>([&] { shares(images(4, 1)); }), Contains("ranges need the whole batch at once"));
}

TEST_CASE("qat: a ResNet's convolutions are folded with the batch norms that it lists behind them") {
  nn::ResNet18<Cpu> model({.classes = 10, .small_images = true});
  const auto found = nn::quantization::find_layers(model);
  REQUIRE(found.size() == 21);
  for (const auto& layer : found) {
    auto expected = layer.name;
    if (const auto at = expected.find("conv"); at != std::string::npos) expected.replace(at, 4, "bn");
    if (const auto at = expected.find("downsample.0"); at != std::string::npos) expected.back() = '1';
    CHECK(layer.norm_name == (layer.name == "fc" ? "" : expected));
  }
}

TEST_CASE("qat: schemes") {
  nn::QuantizationAware<Mlp, Int8PerTensor> one{qat::filled(Mlp{})};
  one(images(4, 1));
  CHECK(one.ranges()[0].weight_levels(one.scheme()).size() == 1);
  nn::QuantizationAware<Mlp, Int8Symmetric> symmetric{qat::filled(Mlp{})};
  symmetric(images(4, 1));
  CHECK(symmetric.ranges()[0].input.levels(symmetric.scheme()).zero_point == 128);
  nn::QuantizationAware<Mlp, Int8Weights4> four{qat::filled(Mlp{})};
  four(images(4, 1));
  const auto levels = four.ranges()[0].weight_levels(four.scheme())[0];
  CHECK(levels.integers == quantized::Integers{-7, 7});
  const auto range = value_of(four.ranges()[0].weight_max)(0);
  CHECK(levels.scale >= range / 7.001f);
}

TEST_CASE("fake_quantize: arguments that make no sense, and NaNs") {
  const auto x = images(2, 1);
  const auto message = [&](float scale, int zero, int least, int most) {
    return message_of<UsageError>([&] { fake_quantize(x, scale, zero, least, most); });
  };
  CHECK(message(0, 0, 0, 255) == "fake_quantize: expected a positive scale, got 0");
  CHECK_THAT(message(NAN, 0, 0, 255), Contains("expected a positive scale"));
  CHECK(message(1, 256, 0, 255) == "fake_quantize: expected a zero point in [0, 255], got 256");
  CHECK_THAT(message(1, 0, 5, 5), Contains("the least below the most, got [5, 5]"));
  const auto one = Tensor<float, 1>::full({1}, 1.0f);
  const auto zero = Tensor<std::int64_t, 1>::zeros({1});
  CHECK(message_of<ShapeError>([&] { fake_quantize_per_channel(x, one, zero, 1, 0, 255); }) ==
        "fake_quantize_per_channel: expected 48 scales and zero points for an input of shape [2, 48] along axis 1, got "
        "1 and 1");
  CHECK_THAT(message_of<UsageError>([&] { fake_quantize_per_channel(x, one, zero, 2, 0, 255); }),
             Contains("axis 2 is not in [0, 2)"));
  CHECK(message_of<UsageError>([&] { quantize_per_tensor<std::int8_t>(x, 1, 0, 0, 255); }) ==
        "quantize_per_tensor: integers in [0, 255] don't fit I8");
  auto nan = images(2, 1);
  nan(0, 0) = NAN;
  CHECK_THAT(message_of<NonFiniteError>([&] { fake_quantize(nan, 1, 0, 0, 255); }), Contains("fake_quantize: got a NaN"));
  CHECK_THAT(message_of<NonFiniteError>([&] { quantize_per_tensor<std::uint8_t>(nan, 1, 0, 0, 255); }),
             Contains("quantize_per_tensor: got a NaN"));
}

}  // namespace quantization_aware_test
