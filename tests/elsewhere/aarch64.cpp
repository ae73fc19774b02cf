// Training on another kind of processor: compiled for it, and run in an emulator, by aarch64_test.py.
#include <chorus/nn/linear.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/random.hpp>
#include <chorus/optim/sgd.hpp>
#include <cstdio>

namespace ch = chorus;

int main() {
  ch::manual_seed(1);
  ch::nn::Linear<ch::Cpu> layer{19, 5};
  ch::optim::Sgd optimizer{ch::nn::named_parameters<ch::Cpu>(layer), {.lr = 0.1, .momentum = 0.9}};
  const auto x = ch::randn<float, 2>({7, 19});
  const auto labels = ch::Tensor<std::int64_t, 1>::from({0, 1, 2, 3, 4, 0, 1}, {7});
  for (int i = 0; i < 5; ++i) {
    optimizer.zero_grad();
    const auto loss = ch::cross_entropy(layer(x), labels);
    loss.backward();
    optimizer.step();
    std::printf("%.6f\n", static_cast<double>(loss.item()));
  }
}
