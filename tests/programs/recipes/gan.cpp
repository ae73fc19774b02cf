/// A generative adversarial network (Goodfellow et al. 2014) of points around (2, -1): two nets under one policy, each
/// with an optimizer of its own. examples/train_wgan.cpp is one with a gradient penalty.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// -> [samples, 2], as many as `like` has. The noise is drawn in the forward pass: each sample has its own, on any
/// number of devices.
template <class Device>
struct Generator : ch::nn::Module {
  ch::nn::Linear<Device> fc1{4, 24}, fc2{24, 2};
  CHORUS_MODULE(Generator, fc1, fc2)
  auto forward(const auto& like) const {
    return fc2(ch::leaky_relu(fc1(ch::randn<float, 2>({like.size(0), 4})), 0.2));
  }
};

/// [samples, 2] -> how real they look, as logits: [samples, 1]
template <class Device>
struct Discriminator : ch::nn::Module {
  ch::nn::Linear<Device> fc1{2, 24}, fc2{24, 1};
  CHORUS_MODULE(Discriminator, fc1, fc2)
  auto forward(const auto& points) const { return fc2(ch::leaky_relu(fc1(points), 0.2)); }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Generator<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const ch::data::TensorDataset points{0.3 * ch::randn<float, 2>({96, 2}) + ch::Tensor<float, 1>::from({2, -1}, {2})};
    Net generator{Model{}, run};
    ch::Rebind<Net, Discriminator<ch::Cpu>> discriminator{Discriminator<ch::Cpu>{}, run};
    ch::optim::Adam for_generator{generator.parameters(), {.lr = 0.005, .beta1 = 0.5}};
    ch::optim::Adam for_discriminator{discriminator.parameters(), {.lr = 0.02, .beta1 = 0.5}};
    ch::data::DataLoader loader{points, generator.sampler(points), {.batch = 32}};
    for (int epoch = 0; epoch < 20; ++epoch) {
      loader.set_epoch(epoch);
      double sums[3] = {};
      for (auto& [real] : loader) {
        const auto fake = generator(real);
        const auto ones = ch::Tensor<float, 2>::ones({real.size(0), 1});

        for_discriminator.zero_grad();
        const auto cost = ch::bce_with_logits(discriminator(real), ones) +
                          ch::bce_with_logits(discriminator(fake.value()), ch::zeros_like(ones));
        cost.backward();
        for_discriminator.step();

        for_generator.zero_grad();
        const auto fooled = ch::bce_with_logits(discriminator(fake), ones);
        fooled.backward();  // also through the discriminator, whose gradients its next zero_grad drops
        for_generator.step();

        const double losses[] = {generator.mean(static_cast<double>(cost.item()), real.size(0)),
                                 generator.mean(static_cast<double>(fooled.item()), real.size(0))};
        if (run.is_main()) std::printf("loss %.7f\nfooled %.7f\n", losses[0], losses[1]);
        const auto sum = ch::sum(fake.value(), 0);
        sums[0] += static_cast<double>(sum(0));
        sums[1] += static_cast<double>(sum(1));
        sums[2] += static_cast<double>(real.size(0));
      }
      generator.sum(sums);
      if (run.is_main()) std::printf("mean_x %.7f\nmean_y %.7f\n", sums[0] / sums[2], sums[1] / sums[2]);
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
