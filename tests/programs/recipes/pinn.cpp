/// A physics-informed net (Raissi, Perdikaris, Karniadakis 2019): heat in a rod, u_t = a u_xx with u = sin(pi x) at
/// t = 0 and u = 0 at both ends. The loss is the equation's residual; the known solution only judges the result.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cmath>
#include <cstdio>
#include <numbers>

namespace ch = chorus;

namespace {

constexpr double pi = std::numbers::pi, diffusivity = 0.1;

template <class Device>
struct Rod : ch::nn::Module {
  ch::nn::Linear<Device> first{2, 24}, second{24, 24}, last{24, 1};
  CHORUS_MODULE(Rod, first, second, last)

  /// points: [samples, 2], x and t in [0, 1] -> u: [samples, 1]. The factors make it right at the ends and at t = 0.
  auto u(const auto& points) const {
    const auto x = ch::slice(points, 1, 0, 1), t = ch::slice(points, 1, 1, 2);
    return ch::sin(pi * x) + t * x * (1 - x) * last(ch::tanh(second(ch::tanh(first(points)))));
  }
  /// The residual u_t - a u_xx at each point: [samples, 1].
  auto forward(const auto& points) const {
    const ch::GraphVariable at(points, true);
    const auto du = ch::grad(ch::sum(u(at)), at, {.create_graph = true});
    const auto u_x = ch::slice(du, 1, 0, 1), u_t = ch::slice(du, 1, 1, 2);
    const auto u_xx = ch::slice(ch::grad(ch::sum(u_x), at, {.create_graph = true}), 1, 0, 1);
    return (u_t - diffusivity * u_xx).as_variable();
  }
};

/// The largest error of u over the points.
template <class Model>
double worst(const Model& model, const ch::Tensor<float, 2>& points) {
  const ch::NoGrad none;
  const auto u = ch::value_of(model.u(points));
  double error = 0;
  for (ch::Index i = 0; i < points.size(0); ++i) {
    const double x = static_cast<double>(points(i, 0)), t = static_cast<double>(points(i, 1));
    const double solution = std::exp(-diffusivity * pi * pi * t) * std::sin(pi * x);
    error = std::fmax(error, std::abs(static_cast<double>(u(i, 0)) - solution));
  }
  return error;
}

}  // namespace

int main(int argc, char** argv) {
  using Model = Rod<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto points = ch::rand<float, 2>({128, 2});
    const ch::data::TensorDataset data{points};
    Net net{Model{}, run};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 5e-3}};
    ch::data::DataLoader loader{data, net.sampler(data), {.batch = 30}};
    for (int epoch = 0; epoch < run.option("epochs", 60); ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::mean(ch::square(net(x)));
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), x.size(0));
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
    if (run.is_main()) std::printf("error %.7f\n", worst(net.module(), points));
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
