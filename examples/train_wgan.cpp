/// Trains a Wasserstein GAN with gradient penalty (Gulrajani et al. 2017) on points of the plane: gradients of
/// gradients, and two models under one policy.

#include <chorus/ops/higher_order.hpp>
#include <cmath>
#include <random>

#include "training.hpp"

namespace ch = chorus;
using Points = ch::Tensor<float, 2>;

namespace {

/// noise: [samples, features] -> points: [samples, 2].
template <class Device>
struct Generator : ch::nn::Module {
  ch::nn::Linear<Device> fc1, fc2, fc3;
  CHORUS_MODULE(Generator, fc1, fc2, fc3)

  Generator(ch::Index noise, ch::Index width) : fc1{noise, width}, fc2{width, width}, fc3{width, 2} {}
  auto forward(const auto& noise) const { return fc3(ch::relu(fc2(ch::relu(fc1(noise))))); }
};

/// Scores points: higher for those that look real. Its slope as a function of the points should be 1.
template <class Device>
struct Critic : ch::nn::Module {
  ch::nn::Linear<Device> fc1, fc2, fc3;
  double penalty;
  CHORUS_MODULE(Critic, fc1, fc2, fc3)

  Critic(ch::Index width, double weight_of_penalty)
      : fc1{2, width}, fc2{width, width}, fc3{width, 1}, penalty{weight_of_penalty} {}

  auto score(const auto& points) const { return fc3(ch::leaky_relu(fc2(ch::leaky_relu(fc1(points), 0.2)), 0.2)); }
  /// real, fake: [samples, 2], mix: [samples, 1] -> the loss of each pair: [samples]. It is computed in the model, so
  /// that it works under every policy.
  auto forward(const auto& real, const auto& fake, const auto& mix) const {
    const ch::GraphVariable between(real * mix + fake * (1 - mix), true);
    const auto slope = ch::grad(ch::sum(score(between)), between, {.create_graph = true});
    const auto length = ch::sqrt(ch::sum(ch::square(slope), 1) + 1e-12);
    const auto scores = ch::reshape(score(fake) - score(real), ch::Shape<1>{-1});
    return (scores + penalty * ch::square(length - 1)).as_variable();
  }
};

/// Draws whole batches, the same on all ranks, and returns this rank's rows.
class Source {
 public:
  template <class Net>
  Source(const Net& net, ch::Index batch, std::uint64_t seed) : random_(seed), batch_(batch) {
    struct Count {
      ch::Index count;
      ch::Index size() const { return count; }
    };
    const auto sampler = net.sampler(Count{batch}, {.shuffle = false});
    begin_ = sampler.share_begin(0, batch);
    end_ = begin_ + static_cast<ch::Index>(sampler.share(0, batch).size());
  }
  /// [share, columns], from N(0, 1), or from [0, 1) if `uniform`.
  Points noise(ch::Index columns, bool uniform = false) {
    auto all = Points::empty({batch_, columns});
    for (ch::Index i = 0; i < all.numel(); ++i) all.data()[i] = uniform ? even_(random_) : normal_(random_);
    return ch::contiguous(all.slice(0, begin_, end_));
  }
  /// Points near eight places on a circle.
  Points real() {
    auto all = Points::empty({batch_, 2});
    for (ch::Index i = 0; i < batch_; ++i) {
      const double angle = static_cast<double>(random_() % 8) * 0.78539816;
      all.data()[2 * i] = static_cast<float>(2 * std::cos(angle)) + 0.05f * normal_(random_);
      all.data()[2 * i + 1] = static_cast<float>(2 * std::sin(angle)) + 0.05f * normal_(random_);
    }
    return ch::contiguous(all.slice(0, begin_, end_));
  }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  std::uniform_real_distribution<float> even_;
  ch::Index batch_, begin_ = 0, end_ = 0;
};

/// How close points are to the eight places: the mean distance to the nearest, and how many of the eight are nearest to
/// at least 1/40 of the points.
std::pair<double, int> judge(const Points& points) {
  double distance = 0;
  std::array<int, 8> near{};
  for (ch::Index i = 0; i < points.size(0); ++i) {
    const double x = static_cast<double>(points(i, 0)), y = static_cast<double>(points(i, 1));
    const auto place = static_cast<std::size_t>(std::lround(std::atan2(y, x) / 0.78539816) + 8) % 8;
    const double angle = static_cast<double>(place) * 0.78539816;
    distance += std::hypot(x - 2 * std::cos(angle), y - 2 * std::sin(angle));
    ++near[place];
  }
  const auto found = std::count_if(near.begin(), near.end(), [&](int n) { return 40 * n >= points.size(0); });
  return {distance / static_cast<double>(points.size(0)), static_cast<int>(found)};
}

constexpr const char* description =
    R"(Trains a Wasserstein GAN with gradient penalty on points near eight places of a circle, under any policy.

  train_wgan --steps 1000
  train_wgan --policy ddp --devices 2)";

}  // namespace

int main(int argc, char** argv) {
  TrainingOptions options{.optimizer = "adam", .batch = 256, .steps = 1000, .lr = 1e-3};
  ch::Index noise = 8, width = 64;
  int critic_steps = 5;
  double penalty = 1;
  CLI::App app{description, "train_wgan"};
  add_options(app, options);
  // The generator's backward begins with gradients that are no batch's mean, which canonical shares require.
  for (const char* none : {"--epochs", "--schedule", "--clip", "--canonical-shares"}) app.remove_option(app.get_option(none));
  app.add_option("--noise", noise, "random numbers that the generator turns into a point")
      ->transform(in_range(1, 4096))
      ->capture_default_str();
  app.add_option("--width", width, "hidden features of both models")
      ->transform(in_range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--critic-steps", critic_steps, "steps of the critic for each step of the generator")
      ->transform(in_range(1, 1000))
      ->capture_default_str();
  app.add_option("--penalty", penalty, "weight of the gradient penalty")->transform(in_range(0.0))->capture_default_str();
  if (const auto status = parse(app, argc, argv, options)) return *status;

  return launch<Generator<ch::Cpu>>(argc, argv, options, [&]<class Net>(ch::Run& run) {
    const auto start = std::chrono::steady_clock::now();
    Net generator{typename Net::model_type{noise, width}, run};
    ch::Rebind<Net, Critic<ch::Cpu>> critic{Critic<ch::Cpu>{width, penalty}, run};
    NamedOptimizer for_generator{generator, options};
    NamedOptimizer for_critic{critic, options};
    Source source{generator, options.batch, options.seed};
    ch::MetricsLog metrics{run.is_main() ? options.metrics : std::string()};
    ch::Progress progress{{.enabled = run.is_main() && !options.quiet}};
    StepLosses losses{critic, metrics, progress};
    const auto made = [&] {
      const ch::NoGrad no_grad;
      return generator.module().forward(source.noise(noise)).value();
    };
    for ([[maybe_unused]] const int epoch : progress)
      for (ch::Index step = 0; step < options.steps; ++step) {
        double loss_value = 0;
        for (int i = 0; i < critic_steps; ++i) {
          for_critic.zero_grad();
          const auto real = source.real();
          const auto loss = ch::mean(critic(real, made(), source.noise(1, /*uniform=*/true)));
          loss.backward();
          for_critic.step();
          loss_value = static_cast<double>(loss.item());
        }
        // The gradient by the generator's points is the critic's slope there. `grad` adds nothing to the critic's own
        // parameters.
        for_generator.zero_grad();
        const auto fake = generator(source.noise(noise));
        const ch::Variable points(fake.value(), true);
        fake.backward(ch::grad(-ch::mean(critic.module().score(points)), points));
        for_generator.step();
        losses.add(loss_value, fake.size(0), step, options.steps);
      }
    losses.flush();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    metrics.done(run_summary(generator, options, losses.samples(), seconds.count()));
    const auto [distance, places] = judge(made());
    if (run.is_main())
      std::printf("the generator's points: %d of 8 places, mean distance %.3f from the nearest\n", places, distance);
  });
}
