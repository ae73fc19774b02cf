// QuantizationAware between layers: sums, concatenation and dropout, whose ranges are the global batch's.
#include <array>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/nn/activations.hpp>
#include <cstdio>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "models.hpp"

namespace quantized_joints_test {

using namespace test::names;
using qat::Quantized, qat::ranges_of, qat::images;
namespace nn = chorus::nn;
using Range = nn::quantization::Range;

/// The same numbers as in layers_by_pytorch.py.
template <int Rank>
Tensor<float, Rank> formula(const Shape<Rank>& shape, Index key, float factor = 1) {
  auto out = Tensor<float, Rank>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i)
    out.data()[i] = factor * static_cast<float>(static_cast<double>((i * 7919 + key * 104729) % 2001) / 1000 - 1);
  return out;
}
template <class Layer>
void fill(Layer& layer, Index key) {
  layer.weight.assign(formula<2>({layer.weight.shape()[0], layer.weight.shape()[1]}, key, 0.2f));
  layer.bias.assign(formula<1>({layer.bias.shape()[0]}, key + 1, 0.2f));
}

struct Joined : nn::Module {
  nn::Linear<Cpu> fc1{48, 12}, fc2{12, 12}, fc3{24, 3};
  nn::Dropout dropout;
  CHORUS_MODULE(Joined, fc1, fc2, fc3, dropout)
  explicit Joined(double p = 0) : dropout(p) {
    fill(fc1, 10);
    fill(fc2, 20);
    fill(fc3, 30);
  }
  auto forward(const auto& x) const {
    const auto h = relu(fc1(x));
    const auto s = relu(fc2(h) + h);
    return fc3(dropout(concat(1, s, h)));
  }
};
/// Takes its input again after two layers, and a list of values.
struct Skips : nn::Module {
  nn::Linear<Cpu> a{48, 48}, b{48, 48}, c{48 * 3, 3};
  CHORUS_MODULE(Skips, a, b, c)
  auto forward(const auto& x) const {
    const auto y = a(x) + x, z = y + relu(b(y));
    const auto w = z + z;
    const std::vector list{y, z, w};
    return c(concat(1, std::span<const typename decltype(list)::value_type>(list)));
  }
};
/// Sums that are not between layers.
struct Offsets : nn::Module {
  nn::Linear<Cpu> fc{48, 4};
  Parameter<float, 1, Cpu> offset{Tensor<float, 1>::full({4}, 0.3f)};
  CHORUS_MODULE(Offsets, fc, offset)
  auto forward(const auto& x) const {
    const auto y = tanh(fc(x) + offset) + 1;
    return y + y;
  }
};
struct Dropped : nn::Module {
  nn::Linear<Cpu> fc1{48, 12}, fc2{12, 3};
  nn::Dropout dropout;
  CHORUS_MODULE(Dropped, fc1, fc2, dropout)
  explicit Dropped(double p = 0.5) : dropout(p) {}
  auto forward(const auto& x) const { return fc2(dropout(relu(fc1(x)))); }
};
/// Joins layers' results within a checkpoint.
struct Again : nn::Module {
  nn::Linear<Cpu> fc{48, 3};
  CHORUS_MODULE(Again, fc)
  auto forward(const auto& x) const {
    return checkpoint([](const auto& y) { return y + y; }, fc(x));
  }
};

template <class Net, class Share, class Mean>
std::string run(Net& net, double rate, const Share& share, const Mean& mean) {
  optim::Sgd optimizer{net.parameters(), {.lr = rate}};
  std::string text;
  for (std::uint32_t step = 0; step < 6; ++step) {
    const Index size = std::array<Index, 3>{7, 2, 6}[step % 3];
    optimizer.zero_grad();
    const auto mine = share(test::labels(size, 3, step));
    const auto loss = cross_entropy(net(share(images(size, step))), mine);
    loss.backward();
    optimizer.step();
    text += rate == 0 ? ranges_of(net.module()) + "\n" : cat(mean(static_cast<double>(loss.item()), mine.numel()), " ");
  }
  return text;
}
std::string alone(double rate) {
  SingleDevice<Quantized<Joined>> net{Quantized<Joined>{Joined{0.2}}, 3};
  return run(net, rate, [](const auto& x) { return x; }, [](double value, Index) { return value; });
}
std::string on_ranks(int ranks, double rate) {
  return common_text(ranks, [=](const World& world) {
    Distributed<Quantized<Joined>> rank(world, {}, Quantized<Joined>{Joined{0.2}});
    return run(
        rank.net, rate, [&](const auto& x) { return test::share(x, world); },
        [&](double value, Index samples) { return rank.net.mean(value, samples); });
  });
}

TEST_CASE("qat: sums and concatenations have one device's ranges, to the bit, and losses on any number of ranks") {
  const auto ranges = alone(0), losses = alone(0.05);
  for (const int ranks : {1, 2, 3}) {
    CHECK(on_ranks(ranks, 0) == ranges);
    CHECK(test::distance(test::numbers_in(on_ranks(ranks, 0.05)), test::numbers_in(losses)) < 1e-5);
  }
}

TEST_CASE("qat: a sum and a concatenation train as PyTorch's do") {
  SingleDevice<Quantized<Joined>> net{Quantized<Joined>{Joined{}}, 1};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.05}};
  const std::vector<float> losses{1.1136199f, 1.0504308f, 1.1032977f, 1.0789747f};
  for (std::size_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto loss = cross_entropy(net(formula<2>({6, 48}, static_cast<Index>(step))),
                                    Tensor<std::int64_t, 1>::from({0, 1, 2, 0, 1, 2}, {6}));
    loss.backward();
    optimizer.step();
    CHECK(loss.item() == Approx(losses[step]).margin(1e-5));
  }
  const auto& layers = net.module().ranges();
  const Range found[] = {layers[0].output.range(), layers[1].output.range(), layers[1].sum.range(),
                         layers[1].concatenation.range(), layers[2].output.range()};
  const float expected[][2] = {
      {0, 3.1855757f}, {-0.9383140f, 1.7477272f}, {0, 4.4357643f}, {0, 4.4357200f}, {-0.3810154f, 0.4309810f}};
  for (std::size_t i = 0; i < std::size(found); ++i) {
    INFO(i);
    CHECK(found[i].min == Approx(expected[i][0]).margin(1e-5));
    CHECK(found[i].max == Approx(expected[i][1]).margin(1e-5));
  }
}

TEST_CASE("qat: a sum belongs to the last layer in it whose sum is free; the model's input is rounded as its layer does") {
  Quantized<Skips> model{Skips{}};
  const auto x = images(5, 1);
  model(x);
  const auto& layers = model.ranges();
  CHECK_FALSE(layers[0].sum.range().empty());            // a(x) + x
  CHECK_FALSE(layers[1].sum.range().empty());            // y + relu(b(y)), and z + z, whose sites are all in use
  CHECK_FALSE(layers[1].concatenation.range().empty());  // as a whole, not by halves
  CHECK(layers[0].concatenation.range().empty());
  CHECK(layers[2].sum.range().empty());
  CHECK(layers[1].input.range().empty());  // y is rounded as a sum
}

TEST_CASE("qat: what is added to no layer's result stays float") {
  Quantized<Offsets> model{Offsets{}};
  model(images(5, 1));
  CHECK(model.ranges()[0].sum.range().empty());
  CHECK(model.ranges()[0].output.range().empty());
}

TEST_CASE("qat: dropout is no place of its own: the range is that of what it gets") {
  Quantized<Dropped> model{Dropped{}}, plain{Dropped{0}};
  for (auto* one : {&model, &plain}) {
    fill(one->model().fc1, 10);
    fill(one->model().fc2, 20);
    (*one)(images(6, 1));
  }
  CHECK(model.ranges()[1].input.range().empty());
  CHECK(model.ranges()[0].output.range().max == plain.ranges()[0].output.range().max);
  model.eval();
  plain.eval();
  const auto hidden = model.ranges()[0].output.levels(model.scheme());
  CHECK(hidden == plain.ranges()[0].output.levels(plain.scheme()));
  CHECK_NOTHROW(model(images(6, 2)));
}

TEST_CASE("qat: ranges of sums and concatenations are saved, frozen and resumed") {
  const std::string path = "qat_joints_test.safetensors";
  SingleDevice<Quantized<Joined>> net{Quantized<Joined>{Joined{}}, 1};
  net(images(6, 1));
  io::save(net, path);
  SingleDevice<Quantized<Joined>> again{Quantized<Joined>{Joined{}}, 1};
  io::load(again.module(), path);
  CHECK(ranges_of(again.module()) == ranges_of(net.module()));
  again.module().observe(false);
  again(images(6, 2));
  CHECK(again.module().ranges()[1].sum.range().max == net.module().ranges()[1].sum.range().max);
  again.eval();
  net.eval();
  CHECK(again(images(6, 3)).value().to_vector() == net(images(6, 3)).value().to_vector());
  std::remove(path.c_str());
}

TEST_CASE("qat: a checkpoint that joins layers' results is refused") {
  Quantized<Again> again;
  CHECK_THAT(message_of<UsageError>([&] { again(Variable<float, 2>(images(4, 1), true)); }),
             Contains("QuantizationAware: a checkpoint computes layers again"));
}

}  // namespace quantized_joints_test
