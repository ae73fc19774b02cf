// quantized(model, x): the integers are those of the fake-quantised pass; unsupported operations throw.
#include <array>
#include <catch.hpp>
#include <chorus/chorus.hpp>
#include <chorus/nn/models/resnet.hpp>
#include <chorus/quantization/conv_bn_relu.hpp>
#include <chorus/quantization/quantized.hpp>
#include <chorus/quantization/quantized_file.hpp>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../io/files.hpp"
#include "../message_of.hpp"

namespace quantized_test {

namespace ch = chorus;
namespace nn = ch::nn;
using Catch::Matchers::Contains;
using ch::Cpu;
using ch::Index;

ch::Tensor<float, 4> images(const ch::Shape<4>& shape, Index seed = 0) {
  auto out = ch::Tensor<float, 4>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i)
    out.data()[i] = static_cast<float>((i * 7919 + i / 77 + seed * 331) % 1000) / 400 - 1.2f;
  return out;
}

/// A model after some batches, and how its integers differ from those of the float pass.
template <class Model>
struct Compared {
  nn::QuantizationAware<Model> net;
  nn::QuantizedModel integers;
  std::int64_t all = 0, differ = 0;
  int most = 0;

  Compared(Model model, const ch::Tensor<float, 4>& x, Index seed = 0) : net(std::move(model)) {
    ch::optim::Sgd optimizer{nn::named_parameters<Cpu>(net), {.lr = 0.01}};
    const auto labels = ch::Tensor<std::int64_t, 1>::zeros({x.size(0)});
    for (Index step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ch::cross_entropy(net(images(x.shape(), seed + step)), labels).backward();
      optimizer.step();
    }
    const auto pass = nn::detail::recorded_evaluation(net, x);
    const nn::int8::detail::Conversion conversion(pass);
    const auto expected = conversion.rounded_numbers();
    integers = nn::quantized(net, x);
    Index value = 0;
    integers.watch(x, [&](const nn::int8::Seen& seen) {
      const auto found = expected.find(value++);
      if (found == expected.end()) return;  // inside of an operation between two roundings
      const auto* number = static_cast<const float*>(found->second.data);
      const auto& q = seen.images;
      for (Index image = 0; image < q.batch; ++image)
        for (Index c = 0; c < q.channels; ++c)
          for (Index row = 0; row < q.height; ++row)
            for (Index column = 0; column < q.width; ++column) {
              const int level = q.at(image, row, column)[c];
              const int right = seen.levels.level(*number++), difference = std::abs(level - right);
              ++all;
              differ += difference != 0;
              most = std::max(most, difference);
            }
    });
  }
};

/// Named layers with functions in between.
struct Cnn : nn::Module {
  nn::Conv2d<Cpu> conv1{3, 8, {.kernel = 3, .padding = 1}}, conv2{8, 12, {.kernel = 3, .stride = 2}};
  nn::BatchNorm2d<Cpu> bn1{8};
  nn::Linear<Cpu> fc1{12 * 9, 20}, fc2{20, 10};
  CHORUS_MODULE(Cnn, conv1, bn1, conv2, fc1, fc2)
  auto forward(const auto& x) const {
    const auto y = ch::relu(conv2(ch::max_pool2d(ch::relu(bn1(conv1(x))), 2)));
    return fc2(ch::relu(fc1(ch::flatten(y))));
  }
};

TEST_CASE("a CNN in integers has every integer of its fake-quantised pass") {
  const Compared<Cnn> compared({}, images({6, 3, 14, 14}));
  CHECK(compared.all > 10000);
  CHECK(compared.differ == 0);
  REQUIRE(compared.integers.steps().size() == 6);
  CHECK(compared.integers.steps()[0].name == "conv1");
  CHECK(compared.integers.steps()[0].relu);
  CHECK(compared.integers.steps()[0].bias.size() == 8);  // batch norm's
}

struct Mlp : nn::Module {
  nn::Linear<Cpu> fc1{48, 20}, fc2{20, 10};
  CHORUS_MODULE(Mlp, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::relu(fc1(ch::flatten(x)))); }
};

TEST_CASE("an input may be flattened before it is rounded") {
  const Compared<Mlp> compared({}, images({6, 3, 4, 4}));
  CHECK(compared.all == 6 * (48 + 20 + 10));
  CHECK(compared.differ == 0);
  CHECK(compared.integers.steps().front().kind == nn::int8::Kind::flatten);
}

TEST_CASE("a ResNet in integers has every integer of its fake-quantised pass") {
  const Compared<nn::ResNet18<Cpu>> compared(nn::ResNet18<Cpu>({.classes = 10, .small_images = true}), images({3, 3, 16, 16}));
  CHECK(compared.all > 500000);
  CHECK(compared.differ == 0);
  const auto& steps = compared.integers.steps();
  CHECK(std::count_if(steps.begin(), steps.end(),
                      [](const auto& step) { return step.kind == nn::int8::Kind::add && step.relu; }) == 8);
  // One batch or single samples: the same integers, so the same results.
  const auto x = images({3, 3, 16, 16});
  const auto together = compared.integers(x);
  for (Index i = 0; i < 3; ++i)
    CHECK(compared.integers(x.slice(0, i, i + 1)).to_vector() == ch::contiguous(together.slice(0, i, i + 1)).to_vector());
}

TEST_CASE("a model in integers goes through a file, which is a quarter of the float one's") {
  const chorus_test::TemporaryFolder folder;
  Compared<nn::ResNet18<Cpu>> compared(nn::ResNet18<Cpu>({.classes = 10, .small_images = true}), images({2, 3, 16, 16}));
  ch::io::save(compared.integers, folder / "int8.safetensors");
  ch::io::save(compared.net.model(), folder / "float.safetensors");
  const auto again = ch::io::load_quantized(folder / "int8.safetensors");
  const auto x = images({5, 3, 16, 16}, 9);
  CHECK(again(x).to_vector() == compared.integers(x).to_vector());
  const auto bytes = [&](const char* name) { return static_cast<double>(std::filesystem::file_size(folder / name)); };
  CHECK(bytes("int8.safetensors") < 0.26 * bytes("float.safetensors"));
}

TEST_CASE("the model that becomes integers stays as it was") {
  nn::QuantizationAware<Cnn> net;
  const auto x = images({4, 3, 14, 14});
  net(x);
  net.model().bn1.set_own_training(false);
  const auto before = net.ranges()[0].output.range();
  const auto mean = net.model().bn1.running_stats();
  nn::quantized(net, x);
  CHECK(net.training());
  CHECK_FALSE(net.model().bn1.training());
  CHECK(net.ranges()[0].output.range().max == before.max);
  CHECK(net.model().bn1.running_stats() == mean);
}

TEST_CASE("channels that batch norm multiplies by 0 are its bias in integers") {
  Cnn model;
  model.bn1.weight.assign(ch::Tensor<float, 1>::from({0, 1, 0, 1, 1, 1, 1, 1}, {8}));
  model.bn1.bias.assign(ch::Tensor<float, 1>::from({0.5f, 0, -1, 0, 0, 0, 0, 0}, {8}));
  nn::QuantizationAware<Cnn> net{model};
  const auto x = images({4, 3, 14, 14});
  net(x);
  const auto integers = nn::quantized(net, x);
  integers.watch(x, [&](const nn::int8::Seen& seen) {
    if (seen.name != "conv1") return;
    CHECK(seen.images.at(1, 5, 5)[0] == seen.levels.level(0.5f));
    CHECK(seen.images.at(1, 5, 5)[2] == seen.levels.zero_point);
  });
}

/// Layers of all kinds and sizes with different product kernels: Winograd, grouped, depthwise, sums beyond 2^24.
struct Mixed : nn::Module {
  nn::Conv2d<Cpu> conv1{3, 32, {.kernel = 3, .padding = 1}}, conv2{32, 32, {.kernel = 3, .padding = 1, .bias = false}},
      conv3{32, 64, {.kernel = 3, .stride = 2, .padding = 1, .bias = false}}, groups{64, 64, {.kernel = 3, .groups = 4}},
      own{64, 64, {.kernel = 3, .padding = 2, .dilation = 2, .groups = 64}}, wide{64, 8, {.kernel = {5, 4}}};
  nn::BatchNorm2d<Cpu> bn1{32}, bn_groups{64};
  nn::BatchNormReLU2d<Cpu> bn2{32}, bn3{64};
  nn::Linear<Cpu> fc1{8 * 4 * 5, 300}, fc2{300, 10};
  CHORUS_MODULE(Mixed, conv1, bn1, conv2, bn2, conv3, bn3, groups, bn_groups, own, wide, fc1, fc2)
  auto forward(const auto& x) const {
    const auto a = bn1(conv1(x));
    const auto b = bn3(conv3(ch::max_pool2d(bn2(conv2(a), a), 2)));
    const auto c = ch::avg_pool2d(ch::relu(own(ch::relu(bn_groups(groups(b))))), 3, {.stride = 1, .padding = 1});
    return fc2(ch::relu(fc1(ch::flatten(wide(c)))));
  }
};

TEST_CASE("layers of all kinds have every integer of their fake-quantised pass, which has the integers' numbers") {
  for (Index seed = 0; seed < 2; ++seed) {
    const auto x = images({2, 3, 38, 38}, 100 * seed);
    Compared<Mixed> compared({}, x, seed);
    CHECK(compared.all > 250'000);
    CHECK(compared.differ == 0);
    compared.net.eval();
    const auto other = images({3, 3, 38, 38}, 100 * seed + 50);
    CHECK(compared.net(other).value().to_vector() == compared.integers(other).to_vector());
    const ch::NoGrad no_grad;
    CHECK(compared.net(other).value().to_vector() == compared.integers(other).to_vector());
  }
}

/// Sums 4608 products of the largest integers: more than 2^24, also in parts.
struct Long : nn::Module {
  nn::Linear<Cpu> fc{4608, 4};
  CHORUS_MODULE(Long, fc)
  auto forward(const auto& x) const { return fc(ch::flatten(x)); }
};

TEST_CASE("sums of integers beyond 2^24 are exact in evaluation, too") {
  Long model;
  auto w = ch::Tensor<float, 2>::full({4, 4608}, 1);
  for (Index i = 0; i < 4608; ++i) w(1, i) = i % 3 == 0 ? 0.5f : -1, w(2, i) = static_cast<float>(i % 127) / 127;
  model.fc.weight.assign(w);
  Compared<Long> compared(std::move(model), images({5, 2, 48, 48}));
  compared.net.eval();
  auto x = ch::Tensor<float, 4>::full({1, 2, 48, 48}, 2);
  CHECK(compared.net(x).value().to_vector() == compared.integers(x).to_vector());
  CHECK(compared.differ == 0);
}

TEST_CASE("means of more numbers than floats add up exactly are refused") {
  nn::int8::Step step;
  step.kind = nn::int8::Kind::global_avg_pool;
  step.name = "pool";
  step.inputs = {0};
  const nn::QuantizedModel pool({0.1f, 128, {}}, {step});
  CHECK(pool(ch::Tensor<float, 4>::full({1, 1, 128, 128}, 2)).to_vector() == std::vector<float>{2});
  CHECK_THAT(message_of<ch::ShapeError>([&] { pool(ch::Tensor<float, 4>::zeros({1, 1, 128, 129})); }),
             Contains("global_avg_pool 'pool' averages 16512 numbers, expected at most 16384"));
}

/// Sums, concatenations and dropout between layers, for images and vectors.
struct Joined : nn::Module {
  nn::Conv2d<Cpu> conv1{3, 4, {.kernel = 3, .padding = 1}}, conv2{4, 4, {.kernel = 3, .padding = 1}},
      conv3{8, 4, {.kernel = 1}};
  nn::BatchNorm2d<Cpu> bn2{4};
  nn::Linear<Cpu> fc1{4 * 49, 20}, fc2{20, 20}, fc3{80, 10};
  nn::Dropout dropout{0.3};
  CHORUS_MODULE(Joined, conv1, conv2, bn2, conv3, fc1, fc2, fc3, dropout)
  auto forward(const auto& x) const {
    const auto a = ch::relu(conv1(x));
    const auto b = ch::relu(a + bn2(conv2(a)));
    const auto c = ch::max_pool2d(ch::relu(ch::concat(1, conv3(ch::concat(1, a, b)), b)), 2);
    const auto h = dropout(ch::relu(fc1(ch::flatten(conv3(c)))));
    const auto y = fc2(h), s = y + h;
    return fc3(ch::concat(1, std::span<const std::decay_t<decltype(s)>>(std::array{h, y, s, s})));
  }
};

TEST_CASE("sums, concatenations and dropout between layers have every integer of their fake-quantised pass") {
  const chorus_test::TemporaryFolder folder;
  const auto x = images({4, 3, 14, 14});
  Compared<Joined> compared({}, x);
  CHECK(compared.all > 10'000);
  CHECK(compared.differ == 0);
  std::string kinds;
  for (const auto& step : compared.integers.steps()) kinds += ch::cat(step.kind, step.relu ? "+relu " : " ");
  CHECK(kinds ==
        "conv2d+relu conv2d add+relu concat conv2d concat+relu max_pool2d conv2d flatten linear+relu linear add concat "
        "linear ");
  compared.net.eval();
  const auto other = images({3, 3, 14, 14}, 50);
  CHECK(compared.net(other).value().to_vector() == compared.integers(other).to_vector());
  ch::io::save(compared.integers, folder / "int8.safetensors");
  CHECK(ch::io::load_quantized(folder / "int8.safetensors")(other).to_vector() == compared.integers(other).to_vector());
}

/// Adds its input to a layer's output.
struct Skip : nn::Module {
  nn::Conv2d<Cpu> conv{3, 3, {.kernel = 1}};
  nn::Linear<Cpu> fc{192, 2};
  CHORUS_MODULE(Skip, conv, fc)
  auto forward(const auto& x) const { return fc(ch::flatten(ch::relu(x + conv(x)))); }
};
TEST_CASE("the model's input may be added") {
  Compared<Skip> compared({}, images({2, 3, 8, 8}));
  CHECK(compared.all == 2 * (3 * 192 + 2));
  CHECK(compared.differ == 0);
}

TEST_CASE("what is concatenated has the same pixels") {
  auto both = [](std::vector<Index> inputs) {
    nn::int8::Step pool;
    pool.kind = nn::int8::Kind::max_pool2d;
    pool.name = "pool";
    pool.inputs = {0};
    pool.window = pool.stride = {2, 2};
    nn::int8::Step joint;
    joint.kind = nn::int8::Kind::concat;
    joint.name = "joint";
    joint.inputs = std::move(inputs);
    joint.levels = {0.1f, 128, {}};
    return nn::QuantizedModel({0.1f, 128, {}}, {pool, joint});
  };
  CHECK_THAT(message_of<ch::ShapeError>([&] { both({0, 1})(ch::Tensor<float, 4>::zeros({1, 1, 4, 4})); }),
             Contains("'joint' concatenates [1, 4, 4] and [1, 2, 2]"));
  CHECK_THAT(message_of<ch::UsageError>([&] { both({}); }), Contains("concat 'joint' expected 1 to 1024 inputs, got 0"));
}

template <class Model>
std::string refusal(const ch::Tensor<float, 4>& x = images({2, 3, 8, 8})) {
  nn::QuantizationAware<Model> net;
  net(x);
  return message_of<ch::UsageError>([&] { nn::quantized(net, x); });
}

struct WithSigmoid : nn::Module {
  nn::Conv2d<Cpu> conv{3, 4, {.kernel = 3}};
  nn::Sigmoid gate;
  nn::Linear<Cpu> fc{144, 2};
  CHORUS_MODULE(WithSigmoid, conv, gate, fc)
  auto forward(const auto& x) const { return fc(ch::flatten(gate(conv(x)))); }
};
struct WithSum : nn::Module {
  nn::Conv2d<Cpu> conv{3, 3, {.kernel = 1}};
  nn::Linear<Cpu> fc{192, 2};
  CHORUS_MODULE(WithSum, conv, fc)
  auto forward(const auto& x) const { return fc(ch::flatten(ch::relu(conv(x)) * 2)); }
};
struct WithLooseNorm : nn::Module {
  nn::Conv2d<Cpu> conv{3, 3, {.kernel = 1}};
  nn::Linear<Cpu> fc{192, 2};
  nn::BatchNorm2d<Cpu> norm{3};
  CHORUS_MODULE(WithLooseNorm, norm, conv, fc)
  auto forward(const auto& x) const { return fc(ch::flatten(conv(norm(x)))); }
};

struct WithFunction : nn::Module {
  nn::Conv2d<Cpu> conv{3, 3, {.kernel = 1}};
  nn::Linear<Cpu> fc{192, 2};
  CHORUS_MODULE(WithFunction, conv, fc)
  auto forward(const auto& x) const { return ch::linear(ch::flatten(conv(x)), fc.weight, fc.bias); }
};
struct WithMean : nn::Module {
  nn::Conv2d<Cpu> conv{3, 3, {.kernel = 1}};
  nn::Linear<Cpu> fc{64, 2};
  CHORUS_MODULE(WithMean, conv, fc)
  auto forward(const auto& x) const { return fc(ch::mean(ch::flatten<2>(conv(x)), 1)); }
};
struct WithRows : nn::Module {
  nn::Conv2d<Cpu> conv{3, 3, {.kernel = 1}};
  nn::Linear<Cpu> fc{384, 2};
  CHORUS_MODULE(WithRows, conv, fc)
  auto forward(const auto& x) const {
    const auto y = conv(x);
    return fc(ch::flatten(ch::concat(2, y, y)));
  }
};
struct WithNoise : nn::Module {
  nn::Linear<Cpu> fc1{192, 4}, fc2{4, 2};
  CHORUS_MODULE(WithNoise, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::dropout(fc1(ch::flatten(x)), 0.5)); }
};
struct WithTokens : nn::Module {
  nn::Linear<Cpu> fc{64, 2};
  CHORUS_MODULE(WithTokens, fc)
  auto forward(const auto& x) const { return fc(ch::flatten<2>(x)); }
};
struct WithoutInput : nn::Module {
  nn::Linear<Cpu> fc{192, 2};
  CHORUS_MODULE(WithoutInput, fc)
  auto forward(const auto& x) const {
    fc(ch::flatten(x));
    return fc(ch::Tensor<float, 2>::ones({1, 192}));
  }
};

TEST_CASE("what has no integer form is refused by its name") {
  CHECK_THAT(refusal<WithFunction>(), Contains("'linear' needs integers, and its input is not rounded: 'conv'"));
  CHECK_THAT(refusal<WithMean>(), Contains("'mean' reduces other axes than those of an image: it has no integer form"));
  CHECK_THAT(refusal<WithTokens>(),
             Contains("in 'fc', a Linear(64, 2) has an input of more axes than [batch, features]"));
  CHECK_THAT(refusal<WithoutInput>(), Contains("the model's output does not depend on its input"));
  CHECK_THAT(refusal<WithRows>(), Contains("'concat' is along axis 2 of 4: it has an integer form along axis 1 of 2"));
  CHECK_THAT(refusal<WithNoise>(), Contains("'dropout' drops numbers also in evaluation: it has no integer form"));
  CHECK_THAT(refusal<WithSigmoid>(), Contains("'sigmoid' in 'gate', a Sigmoid has no integer form"));
  CHECK_THAT(refusal<WithSum>(), Contains("'mul' has no integer form"));
  CHECK_THAT(refusal<WithLooseNorm>(), Contains("'batch_norm' in 'norm', a BatchNorm(3) follows no convolution"));
}

TEST_CASE("ranges that nobody has seen, and a model that does not round, are refused") {
  nn::QuantizationAware<Cnn> net;
  const auto x = images({2, 3, 14, 14});
  CHECK_THAT(message_of<ch::UsageError>([&] { nn::quantized(net, x); }), Contains("'conv1.input' has no range yet"));
  net(x);
  net.fake_quantize(false);
  CHECK_THAT(message_of<ch::UsageError>([&] { nn::quantized(net, x); }), Contains("call fake_quantize(true)"));
}

}  // namespace quantized_test
