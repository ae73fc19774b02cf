#include <catch.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/linear.hpp>

#include "../message_of.hpp"

namespace layers_test {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu;

struct Range {
  float low = INFINITY, high = -INFINITY;
};
Range range_of(const auto& x) {
  Range out;
  for (const float value : x.to_vector()) out = {std::min(out.low, value), std::max(out.high, value)};
  return out;
}

TEST_CASE("parameters start uniform within 1 / sqrt(fan_in)") {
  const nn::Linear<Cpu> linear{100, 300};
  const nn::Conv2d<Cpu> conv{8, 50, {.kernel = {3, 5}, .groups = 2}};
  const auto check_bound = [](const auto& parameter, double fan_in) {
    const double bound = 1 / std::sqrt(fan_in);
    const auto [low, high] = range_of(parameter.value());
    CHECK(low >= -bound);
    CHECK(high < bound);
    CHECK(low < -0.8 * bound);
    CHECK(high > 0.8 * bound);
  };
  check_bound(linear.weight, 100);
  check_bound(linear.bias, 100);
  check_bound(conv.weight, 4 * 15);
  check_bound(conv.bias, 4 * 15);
  CHECK(conv.weight.shape() == ch::Shape<4>{50, 4, 3, 5});
}

TEST_CASE("the seed decides what parameters start with") {
  ch::manual_seed(3);
  const nn::Linear<Cpu> a{5, 5}, b{5, 5};
  ch::manual_seed(3);
  const nn::Linear<Cpu> again{5, 5};
  CHECK(again.weight.value().to_vector() == a.weight.value().to_vector());
  CHECK(b.weight.value().to_vector() != a.weight.value().to_vector());
  ch::manual_seed(4);
  CHECK(nn::Linear<Cpu>{5, 5}.weight.value().to_vector() != a.weight.value().to_vector());
}

TEST_CASE("a layer without bias has none") {
  const nn::Linear<Cpu> linear{2, 3, {.bias = false}};
  CHECK_FALSE(static_cast<bool>(linear.bias));
  linear.weight.assign(ch::Tensor<float, 2>::ones({3, 2}));
  CHECK(linear(ch::Tensor<float, 2>::ones({1, 2})).value().to_vector() == std::vector<float>{2, 2, 2});
}

TEST_CASE("batch norm counts batches and switches to running statistics") {
  nn::BatchNorm1d<Cpu> norm{1};
  const auto x = ch::Tensor<float, 2>::from({1, 3}, {2, 1});
  norm(x);
  norm(x);
  CHECK(norm.num_batches_tracked.value().item() == 2);
  CHECK(norm.running_mean.value().item() == Approx(0.2 + 0.9 * 0.2));
  norm.eval();
  norm(x);
  CHECK(norm.num_batches_tracked.value().item() == 2);
  norm.train();
  norm(ch::Tensor<float, 2>::empty({0, 1}));
  CHECK(norm.num_batches_tracked.value().item() == 2);
}

TEST_CASE("batch norm without momentum keeps the means over all batches, which weigh the same") {
  nn::BatchNorm1d<Cpu> norm{1, {.momentum = {}}};
  const auto take = [&](const std::vector<float>& x) { norm(ch::Tensor<float, 2>::from(x, {2, 1})); };
  take({1, 3});  // mean 2, unbiased variance 2
  CHECK(norm.running_mean.value().item() == 2);
  CHECK(norm.running_var.value().item() == Approx(2));
  take({4, 10});  // 7 and 18
  CHECK(norm.running_mean.value().item() == Approx(4.5));
  CHECK(norm.running_var.value().item() == Approx(10));
  norm(ch::Tensor<float, 2>::empty({0, 1}));
  norm.eval();
  take({100, 200});
  norm.train();
  take({0, 0});
  CHECK(norm.running_mean.value().item() == Approx(3));
  CHECK(norm.running_var.value().item() == Approx(20.0 / 3));
  CHECK(norm.num_batches_tracked.value().item() == 3);
}

TEST_CASE("batch norm without weight and bias, or without running statistics") {
  nn::BatchNorm1d<Cpu> plain{1, {.eps = 0, .affine = false}}, untracked{1, {.eps = 0, .track_running_stats = false}};
  CHECK(plain.describe() == "BatchNorm(1)");
  CHECK(nn::named_parameters<Cpu>(plain).empty());
  CHECK(nn::named_buffers<Cpu>(plain).size() == 3);
  CHECK(nn::named_parameters<Cpu>(untracked).size() == 2);
  CHECK(nn::named_buffers<Cpu>(untracked).empty());
  untracked.weight.assign(ch::Tensor<float, 1>::full({1}, 2));
  const ch::Variable<float, 2> x(ch::Tensor<float, 2>::from({1, 3, 1, 3}, {4, 1}), true);
  for (const bool training : {true, false}) {
    untracked.train(training);
    CHECK(untracked(x).value().to_vector() == std::vector<float>{-2, 2, -2, 2});
  }
  const auto y = plain(x);
  CHECK(y.value().to_vector() == std::vector<float>{-1, 1, -1, 1});
  ch::sum(y * ch::Tensor<float, 2>::from({1, 0, 0, 0}, {4, 1})).backward();
  // dy - mean(dy) - y mean(dy y), with dy = (1, 0, 0, 0) and a standard deviation of 1.
  CHECK(x.grad().to_vector() == std::vector<float>{0.5, 0, -0.5, 0});
  plain.eval();
  CHECK(plain(ch::Tensor<float, 2>::from({0.2f}, {1, 1})).item() == Approx(0).margin(1e-6));
  nn::BatchNormReLU2d<Cpu> fused{1, {.eps = 0, .affine = false, .track_running_stats = false}};
  fused.eval();
  const auto images = ch::reshape(x.value(), std::array<ch::Index, 4>{2, 1, 2, 1});
  CHECK(fused(images).value().to_vector() == std::vector<float>{0, 1, 0, 1});
  CHECK(fused(images, images).value().to_vector() == std::vector<float>{0, 4, 0, 4});
  CHECK(plain(ch::to<ch::half>(x)).shape() == ch::Shape<2>{4, 1});
}

TEST_CASE("batch normalisation with a ReLU is the two layers, under the same names") {
  nn::BatchNorm2d<Cpu> plain{2};
  nn::BatchNormReLU2d<Cpu> fused{2};
  auto x = ch::Tensor<float, 4>::empty({3, 2, 4, 5}), r = ch::Tensor<float, 4>::empty({3, 2, 4, 5});
  ch::kernels::fill_normal(Cpu{}, 1, 1, 0, x.numel(), x.data(), 0.0f, 1.0f);
  ch::kernels::fill_normal(Cpu{}, 2, 1, 0, r.numel(), r.data(), 0.0f, 1.0f);
  for (const bool training : {true, false}) {
    plain.train(training);
    fused.train(training);
    const auto expected = ch::contiguous(ch::relu(plain(x)).value()).to_vector();
    const auto got = ch::contiguous(fused(x).value()).to_vector();
    const auto expected_sum = ch::contiguous(ch::relu(plain(x) + r).value()).to_vector();
    const auto got_sum = ch::contiguous(fused(x, r).value()).to_vector();
    for (std::size_t i = 0; i < got.size(); ++i) {
      CHECK(got[i] == Approx(expected[i]).margin(1e-6));
      CHECK(got_sum[i] == Approx(expected_sum[i]).margin(1e-6));
    }
  }
  CHECK(fused.num_batches_tracked.value().item() == 2);
  CHECK(fused.running_var.value().to_vector() == plain.running_var.value().to_vector());
  const auto names = [](nn::Module& layer) {
    std::vector<std::string> all;
    for (const auto& parameter : nn::named_parameters<Cpu>(layer)) all.push_back(parameter.name);
    return all;
  };
  CHECK(names(fused) == names(plain));
  CHECK(fused.describe() == "BatchNormReLU(2)");
  CHECK(nn::convert_sync_batch_norm(fused).synchronised());
}

TEST_CASE("an embedding's rows, and layer normalisation's first values") {
  const nn::Embedding<Cpu> table{5, 3};
  const auto rows = table(ch::Tensor<std::int64_t, 2>::from({4, 0}, {1, 2}));
  CHECK(rows.shape() == ch::Shape<3>{1, 2, 3});
  CHECK(rows.value().select(1, 0).select(0, 0).to_vector() == table.weight.value()[4].to_vector());
  const nn::LayerNorm<Cpu> norm{2};
  const auto y = norm(ch::Tensor<float, 2>::from({1, 3}, {1, 2})).value();
  CHECK(y(0, 0) == Approx(-1).epsilon(1e-4));
  CHECK(y(0, 1) == Approx(1).epsilon(1e-4));
}

TEST_CASE("function layers do what their functions do") {
  const auto x = ch::Tensor<float, 4>::from({-1, 2, -3, 4}, {1, 1, 2, 2});
  CHECK(nn::ReLU{}(x).to_vector() == ch::relu(x).to_vector());
  CHECK(nn::GELU{}(x).to_vector() == ch::gelu(x).to_vector());
  CHECK(nn::LeakyReLU{0.5}(x).to_vector() == std::vector<float>{-0.5, 2, -1.5, 4});
  CHECK(nn::ELU{2}(x).to_vector() == ch::elu(x, 2).to_vector());
  CHECK(nn::Softmax{-1}(x).to_vector() == ch::softmax(x, 3).to_vector());
  CHECK(nn::Flatten{}(x).shape() == ch::Shape<2>{1, 4});
  CHECK(nn::MaxPool2d{2}(x).item() == 4);
  CHECK(nn::AvgPool2d{2}(x).item() == 0.5);
  nn::Dropout dropout{0.9};
  dropout.eval();
  CHECK(dropout(x).to_vector() == x.to_vector());
}

TEST_CASE("layers say what they are") {
  CHECK(nn::SiLU{}.describe() == "SiLU");
  CHECK(nn::LeakyReLU{0.2}.describe() == "LeakyReLU(0.2)");
  CHECK(nn::MaxPool2d{3}.describe() == "MaxPool2d(3)");
  CHECK(nn::Dropout{0.25}.describe() == "Dropout(0.25)");
  CHECK(nn::BatchNorm2d<Cpu>{7}.describe() == "BatchNorm(7)");
  CHECK(nn::Conv2d<Cpu>{4, 2, {.kernel = {3, 1}, .groups = 2}}.describe() == "Conv2d(4, 2, kernel=3x1, groups=2)");
}

TEST_CASE("layers refuse sizes that make no sense") {
  CHECK(message_of<ch::ShapeError>([] { nn::Linear<Cpu>(0, 3); }) ==
        "Linear: 0 inputs and 3 outputs: both must be positive");
  CHECK(message_of<ch::ShapeError>([] { nn::BatchNorm1d<Cpu>(0); }) == "BatchNorm: 0 channels: must be positive");
  CHECK(message_of<ch::ShapeError>([] { nn::Conv2d<Cpu>(3, 4, {.kernel = 3, .groups = 2}); }) ==
        "Conv2d: 3 -> 4 channels, kernel 3x3, 2 groups: all must be positive, and groups divide the channels");
  CHECK(message_of<ch::ShapeError>([] { nn::Embedding<Cpu>(0, 3); }) ==
        "Embedding: 0 entries of 3 features: both must be positive");
  CHECK(message_of<ch::ShapeError>([] { nn::LayerNorm<Cpu>(0); }) == "LayerNorm: 0 features: must be positive");
  CHECK(message_of<ch::UsageError>([] { nn::Dropout(1.5); }) == "Dropout: expected a probability in [0, 1), got 1.5");
}

}  // namespace layers_test
