/// A cut of buckets of one's own: a bucket for each layer, so that a layer's gradients leave as soon as it is done.

#include <chorus/chorus.hpp>
#include <cstdio>
#include <memory>
#include <string>

namespace ch = chorus;

template <class Device>
struct LayeredNet : ch::nn::Module {
  ch::nn::Linear<Device> fc1{8, 32}, fc2{32, 32}, fc3{32, 4};
  CHORUS_MODULE(LayeredNet, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(ch::relu(fc2(ch::relu(fc1(x))))); }
};

/// `fc1.weight` and `fc1.bias` are of the layer `fc1`. All ranks ask about the same gradients, in the same order.
auto by_layer() {
  return [last = std::make_shared<std::string>()](const ch::NextGradient& next) {
    const std::string layer{next.name.substr(0, next.name.rfind('.'))};
    return std::exchange(*last, layer) != layer && next.bucket_bytes > 0;
  };
}

int main(int argc, char** argv) {
  using Net = ch::DistributedDataParallel<LayeredNet<ch::Cpu>>;
  return ch::launch<Net>(argc, argv, [](ch::Run& run) {
    Net net{{}, run, {.buckets = by_layer()}};
    if (run.is_main())
      for (const std::size_t bytes : net.bucket_bytes()) std::printf("bucket %zu\n", bytes);
    for (int step = 0; step < 3; ++step)
      ch::mean(net(ch::Tensor<float, 2>::full({4, 8}, static_cast<float>(run.rank() + step)))).backward();
  });
}
