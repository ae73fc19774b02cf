/// An optimizer of one's own, Signum (Bernstein et al. 2018): a step of fixed length along the sign of the momentum. It
/// works under every policy, with parameter groups, checkpoints and frozen parameters.

#include <chorus/chorus.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/parallel/launch_any_of.hpp>
#include <cstdio>

namespace ch = chorus;

class Signum : public ch::optim::Optimizer<ch::Cpu> {
 public:
  Signum(std::vector<ch::nn::NamedParameter<ch::Cpu>> parameters, double lr)
      : Optimizer(std::move(parameters), lr) {}

  void step() override {
    for_each_range([&]<class T>(T, const Range& range) {  // many parameters of one dtype at once
      auto* const value = static_cast<T*>(range.value);
      const auto* const grad = static_cast<const T*>(range.grad);
      auto* const momentum = static_cast<T*>(range.state[0]);
      const T rate = static_cast<T>(lr_of(range));
      for (ch::Index i = 0; i < range.count; ++i) {
        momentum[i] = static_cast<T>(0.9) * momentum[i] + static_cast<T>(0.1) * grad[i];
        value[i] -= rate * static_cast<T>((momentum[i] > 0) - (momentum[i] < 0));
      }
    });
  }

 private:
  std::span<const std::string_view> slots() const override {  // its state, by name
    static constexpr std::string_view names[] = {"momentum"};
    return names;
  }
};

template <class Device>
struct SignNet : ch::nn::Module {
  ch::nn::Linear<Device> fc1{3072, 32}, fc2{32, 10};
  CHORUS_MODULE(SignNet, fc1, fc2)
  auto forward(const auto& images) const { return fc2(ch::tanh(fc1(ch::flatten(images)))); }
};

int main(int argc, char** argv) {
  using Model = SignNet<ch::Cpu>;
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, []<class Net>(ch::Run& run) {
        const ch::data::SyntheticImages images{320};
        Net net{Model{}, run};
        ch::data::DataLoader loader{images, net.sampler(images), {.batch = 32}};
        Signum optimizer{net.parameters(), 1e-3};
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
