/// Prices from a table: --data FILE, a CSV file with the columns area, rooms, age, price.

#include <chorus/chorus.hpp>
#include <chorus/data/csv.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// [samples, 3] -> [samples]
template <class Device>
struct Prices : ch::nn::Module {
  ch::nn::Linear<Device> fc1{3, 16}, fc2{16, 1};
  CHORUS_MODULE(Prices, fc1, fc2)
  auto forward(const auto& x) const { return ch::squeeze(fc2(ch::relu(fc1(x))), 1); }
};

auto standardized(const auto& x) { return (x - ch::mean(x, 0)) / ch::std(x, 0); }

}  // namespace

int main(int argc, char** argv) {
  using Model = Prices<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto table = ch::data::read_csv(run.option("data"));
    const ch::data::TensorDataset all{standardized(table.numbers({"area", "rooms", "age"})),
                                      standardized(table.column("price"))};
    const auto parts = ch::data::random_split(all, {0.8, 0.2}, run.seed());
    Net net{Model{}, run};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
    ch::data::DataLoader loader{parts[0], net.sampler(parts[0]), {.batch = 16}};
    for (int epoch = 0; epoch < 8; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x, price] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::mse_loss(net(x), price);
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), price.numel());
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }

    net.eval();
    const ch::NoGrad no_grad;
    ch::data::DataLoader test{parts[1], net.sampler(parts[1], {.shuffle = false}), {.batch = 64}};
    double sums[2] = {};  // squared errors, and those of guessing the mean, which is 0
    for (auto& [x, price] : test) {
      sums[0] += static_cast<double>(ch::sum(ch::square(net(x).value() - price)).item());
      sums[1] += static_cast<double>(ch::sum(ch::square(price)).item());
    }
    net.sum(sums);
    if (run.is_main()) std::printf("unexplained %.7f\n", sums[0] / sums[1]);
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
