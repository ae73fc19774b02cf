#include <catch.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/single_device.hpp>

namespace ch = chorus;

namespace {

struct Net : ch::nn::Module {
  ch::nn::Conv2d<ch::Cpu> conv1{3, 32, {.kernel = 3, .padding = 1}}, conv2{32, 40, {.kernel = 3, .padding = 1}};
  ch::nn::BatchNorm2d<ch::Cpu> norm{40};
  ch::nn::Linear<ch::Cpu> head{640, 10};
  CHORUS_MODULE(Net, conv1, conv2, norm, head)
  auto forward(const auto& images) const {
    const auto x = ch::max_pool2d(ch::relu(norm(conv2(ch::relu(conv1(images))))), 2);
    const auto rows = ch::reshape(x, ch::Shape<3>{x.size(0), 40, 16});
    return head(ch::flatten(ch::scaled_dot_product_attention(rows, rows, rows, {.causal = true, .dropout = 0.1})));
  }
};

}  // namespace

TEST_CASE("from the third step on, training asks the system for no device memory") {
  ch::SingleDevice<Net> net{Net{}};
  ch::optim::Sgd<ch::Cpu> optimizer(net.parameters(), {.lr = 0.01, .momentum = 0.9});
  const auto images = ch::Tensor<float, 4>::full({6, 3, 8, 8}, 0.5f);
  const auto labels = ch::Tensor<std::int64_t, 1>::full({6}, 3);
  const auto step = [&] {
    optimizer.zero_grad();
    const auto loss = ch::cross_entropy(net(images), labels);
    loss.backward();
    optimizer.step();
    return loss.item();
  };
  const auto first = step();
  step();  // the momentum, made at the end of the first step, holds memory from here on
  const auto& allocator = ch::CachingAllocator<ch::Cpu>::of(ch::Cpu{});
  const auto before = allocator.system_allocations();
  float last = first;
  for (int i = 0; i < 5; ++i) last = step();
  CHECK(allocator.system_allocations() == before);
  CHECK(last < first);
}
