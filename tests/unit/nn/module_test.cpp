#include <chorus/nn/activations.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/summary.hpp>

#include <catch.hpp>

#include "../message_of.hpp"

namespace module_test {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu;

struct Block : nn::Module {
  nn::Linear<Cpu> fc{4, 4};
  nn::BatchNorm1d<Cpu> norm{4};
  CHORUS_MODULE(Block, fc, norm)

  auto forward(const auto& x) const { return ch::relu(norm(fc(x))); }
};

struct Net : nn::Module {
  nn::Conv2d<Cpu> conv1{1, 2, {.kernel = 3, .bias = false}};
  nn::ModuleList<Block> blocks;
  nn::Dropout dropout{0.5};
  nn::Sequential<nn::Linear<Cpu>, nn::ReLU, nn::Linear<Cpu>> head{nn::Linear<Cpu>{4, 3}, nn::ReLU{},
                                                                  nn::Linear<Cpu>{3, 2}};
  ch::Parameter<float, 1> scale{ch::Tensor<float, 1>::ones({1})};
  CHORUS_MODULE(Net, conv1, blocks, dropout, head, scale)

  explicit Net(int depth) {
    for (int i = 0; i < depth; ++i) blocks.push_back(Block{});
  }
  auto forward(const auto& images) const {
    auto x = ch::flatten(conv1(images));
    for (const auto& block : blocks) x = block(x);
    return ch::pointwise(ch::functors::Mul{}, head(dropout(x)), scale);
  }
};

struct Tied : nn::Module {
  nn::Linear<Cpu> a{3, 3}, b{3, 3};
  CHORUS_MODULE(Tied, a, b)

  auto forward(const auto& x) const { return b(a(x)); }
};

struct Shared : nn::Module {
  Block block;
  nn::Linear<Cpu> again{4, 4};
  nn::Dropout dropout{0.5};
  double factor = 1;
  CHORUS_MODULE(Shared, block, again, dropout)

  auto forward(const auto& x) const { return dropout(again(block(x))); }
};

struct Small : nn::Module {
  nn::Conv2d<Cpu> conv{3, 6, {.kernel = 5, .stride = 2, .padding = 1}};
  nn::Linear<Cpu> fc{10, 2, {.bias = false}};
  CHORUS_MODULE(Small, conv, fc)

  auto forward(const auto& x) const { return fc(ch::flatten(conv(x))); }
};

std::vector<std::string> names(const auto& list) {
  std::vector<std::string> out;
  for (const auto& named : list) out.push_back(named.name);
  return out;
}

TEST_CASE("parameters and buffers have PyTorch's names, in the order of the members") {
  Net net{2};
  CHECK(names(nn::named_parameters<Cpu>(net)) ==
        std::vector<std::string>{"conv1.weight", "blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.0.norm.weight",
                                 "blocks.0.norm.bias", "blocks.1.fc.weight", "blocks.1.fc.bias", "blocks.1.norm.weight",
                                 "blocks.1.norm.bias", "head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias",
                                 "scale"});
  CHECK(names(nn::named_buffers<Cpu>(net)) ==
        std::vector<std::string>{"blocks.0.norm.running_mean", "blocks.0.norm.running_var",
                                 "blocks.0.norm.num_batches_tracked", "blocks.1.norm.running_mean",
                                 "blocks.1.norm.running_var", "blocks.1.norm.num_batches_tracked"});
}

TEST_CASE("a model runs, and its gradients reach every parameter") {
  Net net{1};
  net.eval();
  const auto y = net(ch::Tensor<float, 4>::ones({3, 1, 3, 4}));
  CHECK(y.shape() == ch::Shape<2>{3, 2});
  y.backward(ch::Tensor<float, 2>::ones({3, 2}));
  for (const auto& named : nn::named_parameters<Cpu>(net)) {
    CAPTURE(named.name);
    CHECK(named.parameter->grad_arrived());
  }
}

TEST_CASE("train and eval reach everything below") {
  Net net{2};
  net.eval();
  CHECK_FALSE(net.training());
  CHECK_FALSE(net.blocks[1].norm.training());
  CHECK_FALSE(net.head.get<1>().training());
  CHECK_FALSE(net.dropout.training());
  net.train();
  CHECK(net.blocks[1].norm.training());
  net.set_own_training(false);
  CHECK(net.blocks[1].training());
}

TEST_CASE("a shared parameter is listed once") {
  Tied tied;
  tied.b.weight = tied.a.weight;
  CHECK(names(nn::named_parameters<Cpu>(tied)) == std::vector<std::string>{"a.weight", "a.bias", "b.bias"});
}

TEST_CASE("a module may have more members than clang takes in a fold") {
  struct Many : nn::Module {
    std::vector<nn::ReLU> layers = std::vector<nn::ReLU>(300);
    void visit(nn::Visitor& visitor) override {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        nn::detail::visit_members(visitor, "first, second", layers[I]...);
      }(std::make_index_sequence<300>{});
    }
  } many;
  many.eval();
  CHECK(std::none_of(many.layers.begin(), many.layers.end(), [](const auto& layer) { return layer.training(); }));
}

TEST_CASE("the summary lists layers and counts parameters") {
  Small small;
  small.conv.bias.set_requires_grad(false);
  CHECK(nn::summary(small) ==
        "module  layer                                          parameters\n"
        "        Small                                          -\n"
        "conv    Conv2d(3, 6, kernel=5x5, stride=2, padding=1)  456\n"
        "fc      Linear(10, 2, bias=false)                      20\n"
        "476 parameters, 470 trainable, 1 KiB\n");
}

TEST_CASE("module: copy_of gives a model of its own") {
  Shared model;
  model.again.weight = model.block.fc.weight;  // shared
  model.again.bias.set_requires_grad(false);
  model.factor = 3;
  model.dropout.eval();
  ch::sum(model.block.fc(ch::Tensor<float, 2>::full({2, 4}, 1))).backward();
  int fired = 0;
  model.block.fc.weight.register_hook([&] { ++fired; });
  const auto before = model.block.fc.weight.value().to_vector();

  Shared copy = nn::copy_of(model);
  const auto originals = nn::named_parameters<Cpu>(model), copies = nn::named_parameters<Cpu>(copy);
  REQUIRE(names(copies) == names(originals));
  for (std::size_t i = 0; i < copies.size(); ++i) {
    INFO(copies[i].name);
    CHECK(copies[i].parameter != originals[i].parameter);
    CHECK(copies[i].parameter->wants_grad() == originals[i].parameter->wants_grad());
    CHECK(!copies[i].parameter->grad_arrived());
  }
  CHECK(copy.block.fc.weight.value().to_vector() == before);
  CHECK(copy.again.weight.shared() == copy.block.fc.weight.shared());
  CHECK(copy.factor == 3);
  CHECK(!copy.dropout.training());
  CHECK(copy.block.norm.running_var.value().to_vector() == model.block.norm.running_var.value().to_vector());

  copy.block.fc.weight.assign(ch::Tensor<float, 2>::zeros({4, 4}));
  copy.block.norm.running_var.value()(0) = 7;
  ch::sum(copy.block.fc(ch::Tensor<float, 2>::full({2, 4}, 1))).backward();
  CHECK(model.block.fc.weight.value().to_vector() == before);
  CHECK(model.block.norm.running_var.value()(0) == 1);
  CHECK(fired == 0);

  model.block.fc = ch::detail::copy_to(model.block.fc, Cpu{1});  // each on its device
  copy = nn::copy_of(model);
  CHECK(copy.block.fc.weight.device() == Cpu{1});
  CHECK(copy.again.bias.device() == Cpu{0});
  CHECK(nn::copy_of(nn::ReLU{}).describe() == nn::ReLU{}.describe());
}

TEST_CASE("module: copy_of puts a model on another device") {
  Shared model;
  model.again.weight = model.block.fc.weight;  // shared
  Shared copy = nn::copy_of(model, Cpu{2});
  for (const auto& named : nn::named_parameters<Cpu>(copy)) CHECK(named.parameter->where() == Cpu{2});
  for (const auto& named : nn::named_buffers<Cpu>(copy)) CHECK(named.buffer->where() == Cpu{2});
  for (const auto& named : nn::named_parameters<Cpu>(model)) CHECK(named.parameter->where() == Cpu{0});
  CHECK(copy.block.fc.weight.value().to_vector() == model.block.fc.weight.value().to_vector());
  CHECK(copy.again.weight.shared() == copy.block.fc.weight.shared());
  CHECK_THROWS_AS(nn::copy_of(model, Cpu{Cpu::max_devices}), ch::DeviceError);
}

}  // namespace module_test
