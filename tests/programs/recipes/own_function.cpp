/// A layer of ones and minus ones, whose gradient is written by hand (Bengio et al. 2013), and a hook that changes a
/// gradient on its way.

#include <chorus/autograd/custom_function.hpp>
#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// 1 or -1, by x's sign. Backward lets the gradient through where |x| <= 1.
auto binary(const auto& x) {
  return ch::custom_function(
      "binary", [](const auto& in) { return ch::where(in < 0, -1.0, ch::where(in < 0, in, 1.0)); },
      [](const auto& dy, const auto&, const auto& in) { return ch::masked_fill(dy, ch::abs(in) > 1, 0); }, x);
}

/// [samples, 2] -> [samples, 2]
template <class Device>
struct Signs : ch::nn::Module {
  ch::nn::Linear<Device> fc1{2, 24}, fc2{24, 2};
  CHORUS_MODULE(Signs, fc1, fc2)
  auto forward(const auto& x) const { return fc2(binary(fc1(x))); }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Signs<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    // Is a point in the circle?
    const auto points = ch::randn<float, 2>({96, 2});
    const ch::data::TensorDataset all{points, ch::to<std::int64_t>(ch::sum(ch::square(points), 1) < 1.2)};
    Net net{Model{}, run};
    // Each rank's hook gets the gradient of its share, before the average: what is linear, as this is, does the same on
    // any number of devices. Clipping is not: it is called after backward, net.clip_grad_norm(max).
    net.module().fc1.weight.register_hook([](const auto& gradient) { return gradient * 2.0; });
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.03, .momentum = 0.9}};
    ch::data::DataLoader loader{all, net.sampler(all), {.batch = 16}};
    for (int epoch = 0; epoch < 10; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x, inside] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::cross_entropy(net(x), inside);
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), inside.numel());
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
