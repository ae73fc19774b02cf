/// Cross-validation: a net for each of the 4 folds learns from the other folds, and is judged on its own.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <vector>

namespace ch = chorus;

namespace {

/// [samples, 3] -> [samples, 1]
template <class Device>
struct Regression : ch::nn::Module {
  ch::nn::Linear<Device> fc1{3, 16}, fc2{16, 1};
  CHORUS_MODULE(Regression, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::tanh(fc1(x))); }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Regression<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto x = ch::randn<float, 2>({90, 3});
    const ch::data::TensorDataset all{x, ch::sin(ch::sum(x, 1, ch::keep_axis))};
    for (int fold = 0; fold < 4; ++fold) {
      std::vector<ch::Index> inside, outside;
      for (ch::Index i = 0; i < all.size(); ++i) (i % 4 == fold ? inside : outside).push_back(i);
      const ch::data::Subset learned{all, outside}, judged{all, inside};
      Net net{Model{}, run};
      ch::optim::Adam optimizer{net.parameters(), {.lr = 0.05}};
      ch::data::DataLoader loader{learned, net.sampler(learned), {.batch = 32}};
      for (int epoch = 0; epoch < 25; ++epoch) {
        loader.set_epoch(epoch);
        for (auto& [in, target] : loader) {
          optimizer.zero_grad();
          const auto cost = ch::mse_loss(net(in), target);
          cost.backward();
          optimizer.step();
        }
      }
      net.eval();
      const ch::NoGrad none;
      double sums[2] = {};  // of squared errors, and of samples
      ch::data::DataLoader of_fold{judged, net.sampler(judged, {.shuffle = false}), {.batch = 32}};
      for (auto& [in, target] : of_fold) {
        sums[0] += static_cast<double>(ch::sum(ch::square(net(in).value() - target)).item());
        sums[1] += static_cast<double>(in.size(0));
      }
      net.sum(sums);
      if (run.is_main()) std::printf("samples %.0f\nerror %.7f\n", sums[1], sums[0] / sums[1]);
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
