/// A mixture of experts (Shazeer et al. 2017): each sample goes to the two experts that the router prefers. The loss
/// that balances them (Fedus, Zoph, Shazeer 2022) counts the choices of the whole batch.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/sort.hpp>
#include <chorus/ops/truth.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <tuple>

namespace ch = chorus;

namespace {

template <class Device>
using Expert = ch::nn::Sequential<ch::nn::Linear<Device>, ch::nn::Tanh, ch::nn::Linear<Device>>;

/// x: [samples, 2] -> y: [samples, 1], the router's probabilities: [samples, experts], its choices: [samples, 2]
template <class Device>
struct MixtureOfExperts : ch::nn::Module {
  static constexpr ch::Index count = 4;
  ch::nn::Linear<Device> router{2, count};
  ch::nn::ModuleList<Expert<Device>> experts;
  CHORUS_MODULE(MixtureOfExperts, router, experts)
  MixtureOfExperts() {
    for (ch::Index i = 0; i < count; ++i)
      experts.push_back(Expert<Device>{ch::nn::Linear<Device>{2, 16}, ch::nn::Tanh{}, ch::nn::Linear<Device>{16, 1}});
  }

  auto forward(const auto& x) const {
    const auto probabilities = ch::softmax(router(x), 1);
    const auto best = ch::topk(probabilities, 2, 1);
    const auto weights = best.values / ch::sum(best.values, 1, ch::keep_axis);
    auto y = 0.0 * ch::sum(weights, 1, ch::keep_axis);
    for (std::size_t e = 0; e < experts.size(); ++e) {
      const auto chosen = best.indices == static_cast<std::int64_t>(e);
      const auto rows = ch::contiguous(ch::nonzero(chosen).select(1, 0));
      const auto own = ch::unsqueeze(ch::masked_select(weights, chosen), 1);  // in the order of the rows
      y = ch::index_add(y, 0, rows, own * experts[e](ch::index_select(x, 0, rows)));
    }
    return std::tuple{y, probabilities, best.indices};
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = MixtureOfExperts<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto x = ch::randn<float, 2>({120, 2});
    const ch::data::TensorDataset data{x, ch::abs(ch::slice(x, 1, 0, 1)) - ch::abs(ch::slice(x, 1, 1, 2))};
    Net net{Model{}, run};
    ch::data::DataLoader loader{data, net.sampler(data), {.batch = 31}};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
    for (int epoch = 0; epoch < 10; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [in, target] : loader) {
        optimizer.zero_grad();
        const auto [y, probabilities, chosen] = net(in);
        double choices[Model::count] = {};
        for (const auto e : ch::contiguous(chosen).to_vector()) ++choices[e];
        net.sum(choices);
        auto share = ch::Tensor<float, 1>::empty({Model::count});
        const double all = choices[0] + choices[1] + choices[2] + choices[3];
        for (ch::Index e = 0; e < Model::count; ++e) share(e) = static_cast<float>(choices[e] / all);
        const auto cost = ch::mse_loss(y, target) + 0.04 * ch::mean(ch::sum(probabilities * share, 1));
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), in.size(0));
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
