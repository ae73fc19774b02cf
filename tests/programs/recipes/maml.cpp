/// Model-agnostic meta-learning (Finn, Abbeel, Levine 2017) of sine waves: weights from which one step on 5 points of a
/// new wave predicts the rest. The loss's gradient goes through that step. A sample is a task.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <tuple>

namespace ch = chorus;

namespace {

template <class Device>
struct Learner : ch::nn::Module {
  static auto drawn(const ch::Shape<3>& shape, double deviation) {
    return ch::Parameter(ch::nn::init::normal<float, Device, 3>(shape, 0, deviation));
  }
  ch::Parameter<float, 3, Device> w1 = drawn({1, 1, 32}, 1), b1 = drawn({1, 1, 32}, 1), w2 = drawn({1, 32, 1}, 0.2);
  CHORUS_MODULE(Learner, w1, b1, w2)

  /// x: [tasks, points, 1] -> y of each task's own weights, of the same shape.
  static auto predict(const auto& x, const auto& weights) {
    const auto& [a, b, c] = weights;
    return ch::matmul(ch::tanh(ch::matmul(x, a) + b), c);
  }
  /// The points that a task knows, x and y, and x of those it is asked for: all [tasks, points, 1].
  auto forward(const auto& x, const auto& y, const auto& asked) const {
    const auto of_tasks = [&](const auto& weight) {
      return ch::expand(ch::GraphVariable(weight), ch::Shape<3>{x.size(0), weight.shape()[1], weight.shape()[2]});
    };
    const std::tuple weights{of_tasks(w1), of_tasks(b1), of_tasks(w2)};
    const auto error = ch::sum(ch::mean(ch::square(predict(x, weights) - y), 1));  // tasks don't mix: each has its own
    const auto [a, b, c] = ch::grad(error, weights, {.create_graph = true});
    const auto& [a0, b0, c0] = weights;
    return predict(asked, std::tuple{a0 - 0.05 * a, b0 - 0.05 * b, c0 - 0.05 * c}).as_variable();
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Learner<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto x = 6 * ch::rand<float, 3>({60, 10, 1}) - 3;
    const auto y = (0.5 + ch::rand<float, 3>({60, 1, 1})) * ch::sin(x + 2 * ch::rand<float, 3>({60, 1, 1}));
    const ch::data::TensorDataset waves{x, y};
    Net net{Model{}, run};
    ch::data::DataLoader loader{waves, net.sampler(waves), {.batch = 20}};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
    for (int epoch = 0; epoch < 30; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [in, out] : loader) {
        optimizer.zero_grad();
        const auto known = [](const auto& points) { return ch::contiguous(points.slice(1, 0, 5)); };
        const auto asked = [](const auto& points) { return ch::contiguous(points.slice(1, 5, 10)); };
        const auto cost = ch::mse_loss(net(known(in), known(out), asked(in)), asked(out));
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
