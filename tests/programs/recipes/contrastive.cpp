/// CLIP's loss (Radford et al. 2021) between two views of each sample, with the negatives of all ranks.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/ops/collectives.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// [samples, 1, 8, 8] -> [samples, 16], of length 1.
template <class Device>
struct ViewEncoder : ch::nn::Module {
  ch::nn::Conv2d<Device> conv{1, 8, {.kernel = 3, .stride = 2, .padding = 1}};
  ch::nn::Linear<Device> fc1{128, 32}, fc2{32, 16};
  CHORUS_MODULE(ViewEncoder, conv, fc1, fc2)
  auto forward(const auto& x) const {
    const auto z = fc2(ch::tanh(fc1(ch::flatten(ch::tanh(conv(x))))));
    return z / (ch::norm(z, 2.0, 1, ch::keep_axis) + 1e-6);
  }
};

/// a, b: [samples, 16] of this rank: each finds its own view among those of all ranks.
auto contrastive_loss(const auto& net, const auto& a, const auto& b) {
  const auto find = [&](const auto& x, const auto& y, const auto& labels) {
    return ch::cross_entropy(ch::matmul(x, ch::transpose(ch::all_gather(net, y), 0, 1)) / 0.2, labels);
  };
  const ch::Index first = ch::first_row(net, a);
  const auto labels = ch::arange(first, first + a.size(0));
  return (find(a, b, labels) + find(b, a, labels)) / 2;
}

}  // namespace

int main(int argc, char** argv) {
  using Model = ViewEncoder<ch::Cpu>;
  return ch::launch_any<Model>(argc, argv, []<class Net>(ch::Run& run) {
    const ch::data::SyntheticImages images{400, 1, ch::data::Split::train, {1, 8, 8}};
    Net net{Model{}, run};
    ch::data::DataLoader loader{
        images, net.sampler(images), {.batch = 49, .workers = 1, .transforms = {ch::data::RandomCrop{1}}, .views = 2}};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 2e-3}};
    for (int epoch = 0; epoch < 3; ++epoch) {
      loader.set_epoch(epoch);
      double last = 0;
      for (auto& batch : loader) {
        optimizer.zero_grad();
        const auto loss = contrastive_loss(net, net(batch.views[0]), net(batch.views[1]));
        loss.backward();
        optimizer.step();
        last = net.mean(static_cast<double>(loss.item()), batch.views.size(1));
      }
      if (run.is_main()) std::printf("loss %.6f\n", last);
    }
  });
}
