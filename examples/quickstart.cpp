/// Trains a small CNN on CIFAR-10. To change the policy, change only the line that begins with `using Net`.
///   quickstart --data cifar-10-batches-bin [--devices 2] [--seed 1]
#include <chorus/chorus.hpp>

namespace ch = chorus;

template <class Device>
struct ToyModel : ch::nn::Module {
  ch::nn::Conv2d<Device> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  ch::nn::Linear<Device> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(ToyModel, conv1, conv2, fc1, fc2, fc3)

  auto forward(const auto& images) const {
    auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    x = ch::max_pool2d(ch::relu(conv2(x)), 2);
    return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(x))))));
  }
};

using Model = ToyModel<ch::Cpu>;
using Net = ch::DistributedDataParallel<Model>;  // or SingleDevice, DataParallel

int main(int argc, char** argv) {
  return ch::launch<Net>(argc, argv, [](auto& run) {  // one call per process; under DDP starts or joins the others
    ch::data::Cifar10 train{run.option("data")};
    Net net{Model{}, run};
    ch::data::DataLoader loader{train, net.sampler(train), {.batch = 64, .workers = 2}};
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01, .momentum = 0.9}};
    for (int epoch : ch::progress(run, run.option("epochs", 10))) {
      loader.set_epoch(epoch);
      for (auto& [images, labels] : loader) {
        optimizer.zero_grad();
        auto loss = ch::cross_entropy(net(images), labels);
        loss.backward();
        optimizer.step();
      }
      ch::io::save(net, run.option("save", "model.safetensors"));
    }
  });
}
