/// A variational autoencoder (Kingma, Welling 2014) of points on a curve in 8 dimensions. Its noise is drawn in the
/// forward pass, by samples: the same on any number of devices.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <tuple>

namespace ch = chorus;

namespace {

/// x: [samples, 8] -> what it becomes by way of two numbers, and their means and log variances: [samples, 2].
template <class Device>
struct Vae : ch::nn::Module {
  ch::nn::Linear<Device> encoder{8, 24}, mean{24, 2}, log_variance{24, 2}, hidden{2, 24}, decoder{24, 8};
  CHORUS_MODULE(Vae, encoder, mean, log_variance, hidden, decoder)

  auto forward(const auto& x) const {
    const auto code = ch::relu(encoder(x));
    const auto mu = mean(code), log_var = log_variance(code);
    const auto z = mu + ch::exp(0.5 * log_var) * ch::randn_like(mu);
    return std::tuple{decoder(ch::relu(hidden(z))), mu, log_var};
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Vae<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto turns = ch::linspace(0, 3, 90).view(ch::Shape<2>{90, 1});
    const ch::data::TensorDataset curve{ch::sin(turns * ch::arange<float>(1, 9))};
    Net net{Model{}, run};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
    ch::data::DataLoader loader{curve, net.sampler(curve), {.batch = 15}};
    for (int epoch = 0; epoch < 8; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x] : loader) {
        optimizer.zero_grad();
        const auto [y, mu, log_var] = net(x);
        const auto error = ch::mean(ch::sum(ch::square(y - x), 1));
        const auto divergence = -0.5 * ch::mean(ch::sum(1 + log_var - ch::square(mu) - ch::exp(log_var), 1));
        const auto cost = error + 0.05 * divergence;
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), x.size(0));
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
