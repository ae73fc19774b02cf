#include <catch.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/fold_batch_norm.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <cmath>
#include <vector>

#include "../message_of.hpp"

namespace fold_batch_norm_test {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu;
using ch::Index;
using Images = ch::Tensor<float, 4>;

Images fold_images() {
  auto x = Images::empty({2, 3, 5, 5});
  for (Index i = 0; i < x.numel(); ++i) x.data()[i] = std::sin(0.37f * static_cast<float>(i));
  return x;
}

template <class Handle>
void vary(const Handle& handle, float start) {
  auto numbers = ch::clone(value_of(handle));
  for (Index i = 0; i < numbers.numel(); ++i) numbers.data()[i] = start + 0.3f * std::cos(static_cast<float>(i) + start);
  ch::copy_bytes(Cpu{}, value_of(handle).data(), Cpu{}, numbers.data(), numbers.bytes());
}

// Layers called in another order than listed; a residual; a shared layer; a result with two users.
struct FoldNet : nn::Module {
  nn::BatchNormReLU<Cpu> bn1{4}, bn2{4};
  nn::BatchNorm<Cpu> bn3{4, {.affine = false}}, of_shared{4}, of_taken{4};
  nn::Conv2d<Cpu> conv3{4, 4, {.kernel = 1}}, conv2{4, 4, {.kernel = 3, .padding = 1, .bias = false}},
      conv1{3, 4, {.kernel = 3, .padding = 1, .groups = 1}}, shared{4, 4, {.kernel = 1}}, taken{4, 4, {.kernel = 1}};
  bool reads = false;
  CHORUS_MODULE(FoldNet, bn1, bn2, bn3, of_shared, of_taken, conv3, conv2, conv1, shared, taken)
  FoldNet() {
    float at = 0.9f;
    for (auto* norm : std::initializer_list<nn::BatchNorm<Cpu>*>{&bn1, &bn2, &bn3, &of_shared, &of_taken}) {
      if (norm->weight) vary(norm->weight, at), vary(norm->bias, 0.2f);
      vary(norm->running_mean, 0.1f);
      vary(norm->running_var, at += 0.2f);
    }
    eval();
  }
  auto forward(const auto& x) const {
    const auto a = bn1(conv1(x));
    auto y = bn3(conv3(bn2(conv2(a), a)));
    const auto before = taken(y);
    // Reads outside of operations cannot be observed.
    if (reads) return decltype(y)(of_taken(before) + ch::clone(value_of(before)));
    y = of_taken(before) + before;
    return decltype(y)(of_shared(shared(shared(y))));
  }
};

TEST_CASE("a model with folded batch norms gives what the model gives") {
  const FoldNet model;
  const auto x = fold_images();
  const ch::NoGrad no_grad;
  auto folded = nn::fold_batch_norm(model, x);
  CHECK(folded.bn1.folded_away());
  CHECK(folded.bn2.folded_away());
  CHECK(folded.bn3.folded_away());
  CHECK(folded.bn1.describe() == "BatchNormReLU(4, folded)");
  CHECK(folded.bn3.describe() == "BatchNorm(4, folded)");
  CHECK(folded.of_taken.describe() == "BatchNorm(4)");
  CHECK_FALSE(folded.of_shared.folded_away());
  CHECK_FALSE(folded.of_taken.folded_away());
  CHECK_FALSE(model.bn1.folded_away());
  // The parameters of three batch norms are gone; two convolutions have a bias now, of which one had it before.
  std::vector<std::string> names;
  for (const auto& named : nn::named_parameters<Cpu>(folded)) names.push_back(named.name);
  CHECK(names == std::vector<std::string>{"of_shared.weight", "of_shared.bias", "of_taken.weight", "of_taken.bias",
                                          "conv3.weight", "conv3.bias", "conv2.weight", "conv2.bias", "conv1.weight",
                                          "conv1.bias", "shared.weight", "shared.bias", "taken.weight", "taken.bias"});
  const auto expected = model(x).value().to_vector(), got = folded(x).value().to_vector();
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(got[i] - expected[i]) < 2e-5f);
}

TEST_CASE("fold_batch_norm folds linear layers and numbers of type double") {
  nn::Sequential model(nn::Linear<Cpu, double>{3, 4}, nn::BatchNorm<Cpu, double>{4}, nn::BatchNorm<Cpu, double>{4});
  model.get<1>().set_running_stats(std::vector<double>{1, -2, 0.5, 0, 4, 9, 0.25, 1});
  model.eval();
  auto x = ch::Tensor<double, 2>::empty({2, 3});
  for (Index i = 0; i < 6; ++i) x.data()[i] = static_cast<double>(i) - 2.5;
  const ch::NoGrad no_grad;
  auto folded = nn::fold_batch_norm(model, x);
  CHECK(folded.get<1>().folded_away());
  CHECK_FALSE(folded.get<2>().folded_away());
  const auto expected = model(x).value().to_vector(), got = folded(x).value().to_vector();
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(got[i] - expected[i]) < 1e-13);
}

TEST_CASE("fold_batch_norm refuses models in training, and what it can't see") {
  FoldNet model;
  const auto x = fold_images();
  model.bn2.train();
  CHECK(message_of<ch::UsageError>([&] { nn::fold_batch_norm(model, x); }) ==
        "fold_batch_norm: the model is in training mode: call eval() first");
  model.eval();
  auto folded = nn::fold_batch_norm(model, x);
  folded.train();
  const std::string refused = "BatchNorm: it is folded: call eval(), or train the model that fold_batch_norm was given";
  CHECK(message_of<ch::UsageError>([&] { folded(x); }) == refused);
  CHECK(message_of<ch::UsageError>([&] { folded.bn3(x.view(ch::Shape<4>{2, 3, 5, 5})); }) == refused);
  CHECK(message_of<ch::UsageError>([&] { folded.bn2(x, x); }) == refused);
  model.reads = true;
  const auto message = message_of<ch::UsageError>([&] { nn::fold_batch_norm(model, x); });
  CHECK(message.starts_with("fold_batch_norm: the outputs of the folded model differ by "));
  CHECK(message.ends_with(": its forward uses a layer's output outside of the recorded operations"));
}

}  // namespace fold_batch_norm_test
