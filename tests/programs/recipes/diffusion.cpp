/// A diffusion model (Ho, Jain, Abbeel 2020) of points on a circle: a net learns the noise, its average draws points by
/// DDIM (Song, Meng, Ermon 2021).

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <numbers>

namespace ch = chorus;

namespace {

template <class Device>
struct Denoiser : ch::nn::Module {
  static constexpr std::int64_t times = 10;
  ch::nn::Embedding<Device> time{times, 32};
  ch::nn::Linear<Device> in{2, 32}, hidden{32, 32}, out{32, 2};
  CHORUS_MODULE(Denoiser, time, in, hidden, out)

  /// At time t a point is cos(angle) x + sin(angle) noise: [samples, 1], the cosine schedule of Nichol, Dhariwal 2021.
  static auto angle(const auto& t) {
    return (ch::to<float>(t) + 1).view(ch::Shape<2>{-1, 1}) * (std::numbers::pi / 2 / (times + 1));
  }
  /// The noise in x: [samples, 2].
  auto noise(const auto& x, const auto& t) const { return out(ch::silu(hidden(ch::silu(in(x) + time(t))))); }

  /// x: [samples, 2] -> the squared error of each sample's noise. Times and noise are drawn by samples.
  auto forward(const auto& x) const {
    const auto t = ch::randint<std::int64_t, 1>(0, times, {x.size(0)});
    const auto drawn = ch::randn_like(x);
    return ch::sum(ch::square(noise(ch::cos(angle(t)) * x + ch::sin(angle(t)) * drawn, t) - drawn), 1);
  }
  /// `count` new points: [count, 2].
  auto draw(ch::Index count) const {
    const ch::NoGrad none;
    auto x = ch::randn<float, 2>({count, 2}, ch::Cpu{}, {.same_on_all = true});
    for (std::int64_t now = times - 1; now >= 0; --now) {
      const auto t = ch::Tensor<std::int64_t, 1>::full({count}, now);
      const auto part = ch::value_of(noise(x, t));
      const auto clean = ch::clamp((x - ch::sin(angle(t)) * part) / ch::cos(angle(t)), -1.5, 1.5);
      x = ch::cos(angle(t - 1)) * clean + ch::sin(angle(t - 1)) * part;
    }
    return x;
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Denoiser<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto turns = ch::linspace(0, 2 * std::numbers::pi, 128).view(ch::Shape<2>{128, 1});
    const ch::data::TensorDataset circle{ch::concat(1, ch::cos(turns), ch::sin(turns))};
    Net net{Model{}, run};
    ch::data::DataLoader loader{circle, net.sampler(circle), {.batch = 64}};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
    ch::optim::ParameterAverage average{net.parameters(), ch::optim::exponential(0.95)};
    for (int epoch = 0; epoch < 150; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::mean(net(x));
        cost.backward();
        optimizer.step();
        average.update();
        const double loss = net.mean(static_cast<double>(cost.item()), x.size(0));
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
    const ch::optim::AveragedScope use{average};
    const auto off = ch::abs(ch::norm(net.module().draw(100), 2.0, 1) - 1);
    if (run.is_main()) std::printf("off %.7f\n", static_cast<double>(ch::mean(off).item()));
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
