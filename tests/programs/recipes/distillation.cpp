/// Distillation (Hinton et al. 2015): a small net learns from what a large one, which was trained before, says of each
/// class.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/nn/weights.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <chorus/parallel/scores.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// [samples, 2] -> logits: [samples, 3]
template <class Device>
struct Teacher : ch::nn::Module {
  ch::nn::Linear<Device> fc1{2, 48}, fc2{48, 48}, fc3{48, 3};
  CHORUS_MODULE(Teacher, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(ch::relu(fc2(ch::relu(fc1(x))))); }
};
template <class Device>
struct Student : ch::nn::Module {
  ch::nn::Linear<Device> fc1{2, 12}, fc2{12, 3};
  CHORUS_MODULE(Student, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::relu(fc1(x))); }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Student<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto points = ch::randn<float, 2>({120, 2});
    const auto rings = ch::sum(ch::square(points), 1);  // the class is how many of two circles a point lies outside of
    const ch::data::TensorDataset all{points, ch::to<std::int64_t>(rings > 0.8) + ch::to<std::int64_t>(rings > 2.5)};
    ch::Rebind<Net, Teacher<ch::Cpu>> teacher{Teacher<ch::Cpu>{}, run};
    Net student{Model{}, run};

    // Trains a net by what `cost_of` makes of its output, and prints the accuracy.
    const auto fit = [&](auto& net, int epochs, const char* name, const auto& cost_of) {
      ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
      ch::data::DataLoader loader{all, net.sampler(all), {.batch = 30}};
      for (int epoch = 0; epoch < epochs; ++epoch) {
        loader.set_epoch(epoch);
        for (auto& [x, label] : loader) {
          optimizer.zero_grad();
          const auto cost = cost_of(net(x), x, label);
          cost.backward();
          optimizer.step();
          const double loss = net.mean(static_cast<double>(cost.item()), label.numel());
          if (run.is_main()) std::printf("%s %.7f\n", name, loss);
        }
      }
      net.eval();
      const ch::NoGrad no_grad;
      ch::scores::ConfusionMatrix matrix{3};
      for (auto& [x, label] : loader) matrix.add(net(x).value(), label);
      matrix.sum(net);
      if (run.is_main()) std::printf("accuracy %.7f\n", matrix.accuracy());
    };
    fit(teacher, 12, "teacher", [](const auto& logits, const auto&, const auto& label) {
      return ch::cross_entropy(logits, label);
    });
    fit(student, 24, "loss", [&](const auto& logits, const auto& x, const auto& label) {
      constexpr double temperature = 2;
      const auto wanted = [&] {
        const ch::NoGrad no_grad;
        return ch::softmax(teacher(x).value() / temperature, 1);
      }();
      const auto soft = ch::kl_div(ch::log_softmax(logits / temperature, 1), wanted);
      return temperature * temperature * soft + 0.3 * ch::cross_entropy(logits, label);
    });
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
