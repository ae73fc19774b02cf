/// A hook of one's own: each rank clips its gradients, bucket by bucket, before they are averaged, so that no rank's
/// outlier decides a step.

#include <chorus/chorus.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <cmath>
#include <cstdio>

namespace ch = chorus;

struct ClipBuckets {
  double max_norm = 0.5;

  template <class T, class Communicator>
  ch::comm::Work start(const ch::GradBucket<T, ch::Cpu>& bucket, Communicator& ranks) {
    double squares = 0;
    for (const T g : bucket.gradients) squares += static_cast<double>(g) * static_cast<double>(g);
    const double factor = std::min(1.0, max_norm / (std::sqrt(squares) + 1e-6));
    return ranks.all_reduce_async(bucket.gradients, ch::comm::ReduceOp::sum,
                                  {.scale = bucket.weight * factor,
                                   .traffic = ch::trace::Traffic::gradients,
                                   .bucket = static_cast<int>(bucket.index)});
  }
};

template <class Device>
struct HookedNet : ch::nn::Module {
  ch::nn::Linear<Device> fc1{3072, 32}, fc2{32, 10};
  CHORUS_MODULE(HookedNet, fc1, fc2)
  auto forward(const auto& images) const { return fc2(ch::relu(fc1(ch::flatten(images)))); }
};

int main(int argc, char** argv) {
  using Net = ch::DistributedDataParallel<HookedNet<ch::Cpu>, ClipBuckets>;
  return ch::launch<Net>(argc, argv, [](ch::Run& run) {
    const ch::data::SyntheticImages images{320};
    Net net{{}, run};
    ch::data::DataLoader loader{images, net.sampler(images), {.batch = 32}};
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.2}};
    for (auto& [x, labels] : loader) {
      optimizer.zero_grad();
      const auto cost = ch::cross_entropy(net(x), labels);
      cost.backward();
      optimizer.step();
      const double loss = net.mean(static_cast<double>(cost.item()), labels.numel());
      if (run.is_main()) std::printf("loss %.4f\n", loss);
    }
  });
}
