/// The trainings of lab 7: generated digits in batches of 8 on one device, and of 128 on 4 ranks, at several rates.
/// SPOILERS: read this when your lab is right.

#include <algorithm>
#include <array>
#include <chorus/chorus.hpp>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "large_batch.hpp"

namespace large_batch_lab {
namespace {


constexpr ch::Index side = 12, pixels = side * side, classes = 10, train_images = 4096, test_images = 1024;
constexpr int epochs = 20, seeds = 5;
constexpr ch::Index small_batch = 8, large_batch = 128;
constexpr int ranks_of_large_batch = 4;

Plan plan_for(ch::Index batch) {
  return {0.1, small_batch, batch, static_cast<int>(train_images / batch), epochs};
}

using Rate = std::function<double(const Plan&, int)>;

/// A model without normalisation.
template <class D>
struct Net : ch::nn::Module {
  ch::nn::Linear<D> fc1{pixels, 48}, fc2{48, 48}, fc3{48, classes};
  CHORUS_MODULE(Net, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(ch::relu(fc2(ch::relu(fc1(x))))); }
};
using Model = Net<ch::Cpu>;

/// A model with the weights of that seed, from N(0, 2 / inputs) (He et al. 2015), and biases of 0.
Model start(int seed) {
  Model model;
  std::uint64_t stream = 0;
  for (auto* layer : {&model.fc1, &model.fc2, &model.fc3}) {
    const auto shape = layer->weight.shape();
    auto weight = ch::Tensor<float, 2>::empty(shape);
    const auto deviation = static_cast<float>(std::sqrt(2.0 / static_cast<double>(shape[1])));
    ch::kernels::fill_normal(ch::Cpu{}, static_cast<std::uint64_t>(seed), stream++, 0, weight.numel(), weight.data(),
                             0.0f, deviation);
    layer->weight = ch::Parameter(weight);
    layer->bias = ch::Parameter(ch::Tensor<float, 1>::zeros({shape[0]}));
  }
  return model;
}

/// Images, [count, pixels], and target outputs: 1 for the right class, 0 for the others.
struct Samples {
  ch::Tensor<float, 2> images, answers;
};
Samples digits(ch::Index count, ch::data::Split split) {
  const ch::data::SyntheticImages source(count, 0, split, {1, side, side});
  Samples out{ch::Tensor<float, 2>::empty({count, pixels}), ch::Tensor<float, 2>::zeros({count, classes})};
  for (ch::Index i = 0; i < count; ++i) {
    const std::span<float> image(out.images.data() + i * pixels, static_cast<std::size_t>(pixels));
    out.answers(i, source.get(i, image)) = 1;
    for (float& pixel : image) pixel = (pixel - 0.3f) / 0.2f;
  }
  return out;
}
const Samples& training_set() {
  static const Samples set = digits(train_images, ch::data::Split::train);
  return set;
}
const Samples& test_set() {
  static const Samples set = digits(test_images, ch::data::Split::test);
  return set;
}
Samples take(const Samples& from, std::span<const ch::Index> which) {
  const auto count = static_cast<ch::Index>(which.size());
  Samples out{ch::Tensor<float, 2>::empty({count, pixels}), ch::Tensor<float, 2>::empty({count, classes})};
  for (ch::Index i = 0; i < count; ++i) {
    const ch::Index at = which[static_cast<std::size_t>(i)];
    std::copy_n(from.images.data() + at * pixels, pixels, out.images.data() + i * pixels);
    std::copy_n(from.answers.data() + at * classes, classes, out.answers.data() + i * classes);
  }
  return out;
}

/// The percentage of test images that a model classifies correctly; 0 if its outputs are not finite.
double accuracy(const Model& model) {
  const ch::NoGrad no_grad;
  const auto output = model.forward(test_set().images).value();
  int right = 0;
  for (ch::Index i = 0; i < test_images; ++i) {
    const float* const row = output.data() + i * classes;
    const float* const answers = test_set().answers.data() + i * classes;
    const auto label = std::find(answers, answers + classes, 1.0f) - answers;
    bool largest = true;
    for (ch::Index c = 0; c < classes; ++c) largest = largest && (c == label || row[c] < row[label]);
    right += largest;
  }
  return 100.0 * right / test_images;
}

/// Trains this rank's share of all steps. `rate(plan, step)`: the rate of a step, counted from 0.
template <class Policy>
void train(Policy& net, const Plan& plan, int seed, int rank, int ranks, const Rate& rate) {
  ch::data::Sampler sampler(train_images,
                            {.rank = rank, .world_size = ranks, .seed = static_cast<std::uint64_t>(seed)});
  ch::optim::Sgd optimizer{net.parameters(), {.lr = plan.base_rate}};
  for (int step = 0; step < plan.steps(); ++step) {
    const int in_epoch = step % plan.steps_an_epoch;
    if (in_epoch == 0) sampler.set_epoch(step / plan.steps_an_epoch);
    const auto samples = take(training_set(), sampler.share(in_epoch, plan.batch));
    optimizer.set_lr(rate(plan, step));
    optimizer.zero_grad();
    ch::mse_loss(net(samples.images), samples.answers).backward();
    optimizer.step();
  }
}

/// The mean over seeds of the accuracy after training in batches of 8, on one device.
double train_small(const Rate& rate) {
  double sum = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    ch::SingleDevice<Model> net{start(seed)};
    train(net, plan_for(small_batch), seed, 0, 1, rate);
    sum += accuracy(net.module());
  }
  return sum / seeds;
}
/// The same in batches of 128, on 4 ranks.
double train_large(const Rate& rate) {
  double sum = 0;
  for (int seed = 0; seed < seeds; ++seed)
    lab::on_ranks(ranks_of_large_batch, [&](ch::comm::AnyCommunicator& ranks) {
      ch::DistributedDataParallel<Model> net{start(seed), ranks};
      train(net, plan_for(large_batch), seed, ranks.rank(), ranks.size(), rate);
      if (ranks.rank() == 0) sum += accuracy(net.module());
    });
  return sum / seeds;
}

/// 2 / the largest curvature of the loss at a model's parameters. At a higher rate gradient descent overshoots the
/// steepest valley, and farther with each step. Uses power iteration; the curvature along a direction is the difference
/// of two gradients.
double stable_rate(ch::SingleDevice<Model>& net) {
  std::vector<ch::Index> first(1024);
  std::iota(first.begin(), first.end(), 0);
  const auto samples = take(training_set(), first);
  std::vector<float> here, direction;
  for (const auto& p : net.parameters()) {
    const auto* const numbers = static_cast<const float*>(p.parameter->value_data());
    here.insert(here.end(), numbers, numbers + p.parameter->count());
  }
  const auto gradient = [&](float along) {
    std::vector<float> out;
    std::size_t at = 0;
    for (const auto& p : net.parameters()) {
      auto* const numbers = static_cast<float*>(p.parameter->value_data());
      for (ch::Index i = 0; i < p.parameter->count(); ++i, ++at)
        numbers[i] = here[at] + (along == 0 ? 0 : along * direction[at]);
      p.parameter->set_grad_arrived(false);
    }
    ch::mse_loss(net(samples.images), samples.answers).backward();
    for (const auto& p : net.parameters()) {
      const auto* const numbers = static_cast<const float*>(p.parameter->grad_data());
      out.insert(out.end(), numbers, numbers + p.parameter->count());
    }
    return out;
  };
  direction = gradient(0);
  constexpr float aside = 0.01f;
  double curvature = 0;
  for (int i = 0; i < 20; ++i) {
    double square = 0;
    for (const float d : direction) square += static_cast<double>(d) * d;
    for (float& d : direction) d /= static_cast<float>(std::sqrt(square));
    const auto ahead = gradient(aside), behind = gradient(-aside);
    curvature = 0;
    for (std::size_t at = 0; at < here.size(); ++at) {
      const float change = (ahead[at] - behind[at]) / (2 * aside);
      curvature += static_cast<double>(change) * direction[at];
      direction[at] = change;
    }
  }
  gradient(0);  // restores the parameters
  return 2 / curvature;
}

/// A rate that grows within five epochs from that of small batches to a multiple, the ratio of batch sizes.
double warm_up(const Plan& plan, int step) {
  const double times = static_cast<double>(plan.batch) / static_cast<double>(plan.base_batch);
  const double done = static_cast<double>(step) / (5 * plan.steps_an_epoch);
  return plan.base_rate * (done < 1 ? 1 + (times - 1) * done : times);
}
/// A constant rate, `times` that of small batches.
Rate at_once(double times) {
  return [times](const Plan& plan, int) { return times * plan.base_rate; };
}

/// Measurements that don't depend on the student's code.
struct Measured {
  double small = train_small(at_once(1)), as_it_was = train_large(at_once(1)), four_times = train_large(at_once(4)),
         sixteen_times = train_large(at_once(16)), warmed_up = train_large(warm_up);
  std::array<double, seeds> stable_at_start{}, stable_after_epoch{};
  Measured() {
    auto first_epoch = plan_for(small_batch);
    first_epoch.epochs = 1;
    for (int seed = 0; seed < seeds; ++seed) {
      const auto at = static_cast<std::size_t>(seed);
      ch::SingleDevice<Model> net{start(seed)};
      stable_at_start[at] = stable_rate(net);
      train(net, first_epoch, seed, 0, 1, at_once(1));
      stable_after_epoch[at] = stable_rate(net);
    }
  }
};
const Measured& measured() {
  static const Measured once;
  return once;
}
std::string line(const char* what, double percent) {
  char text[100];
  std::snprintf(text, sizeof text, "  %-46s accuracy %5.1f %%", what, percent);
  return text;
}

/// "As good" allows a loss of this many points.
constexpr double points = 5;
bool as_good(double accuracy) { return accuracy >= measured().small - points; }

/// What is remarkable about these rates.
std::string described(const Plan& plan, const Code& code) {
  const auto times = [&](int step) { return code.rate(plan, step) / plan.base_rate; };
  const double first = times(0), last = times(plan.steps() - 1);
  char text[160];
  std::snprintf(text, sizeof text, "they begin at %.3g times the rate of batch 8, and %s %.3g times", first,
                last > times(plan.steps() - 1 - plan.steps_an_epoch) ? "still grow in the last epoch, to" : "end at", last);
  return text;
}
void judge(lab::Lab& lab, const Code& code) {
  const auto plan = plan_for(large_batch);
  double mine = 0;
  const bool ran = lab.run("rate", [&] {
    for (const int epoch : {0, 1, 2, 5, 10}) {
      char text[100];
      std::snprintf(text, sizeof text, "  your rate after %2d epochs: %.4g", epoch,
                    code.rate(plan, epoch * plan.steps_an_epoch));
      lab.say(text);
    }
    mine = train_large(code.rate);
  });
  if (!ran) return;
  lab.say(line("batch 128, your rates", mine));
  lab.require("your rates are as good as batch 8", as_good(mine),
              ch::cat("training ends more than ", points, " points below it; ", described(plan, code)));
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  judge(lab, code);
  const auto plan = plan_for(large_batch);
  const Measured& by_lab = measured();
  lab.compare("steps of 20 epochs, batch 8", plan_for(small_batch).steps(), 0, "How many batches are 4,096 images?");
  lab.compare("steps of 20 epochs, batch 128", plan.steps(), 0, "How many batches are 4,096 images?");

  lab.say(line("batch 8", by_lab.small));
  lab.compare("the rate as it was: accuracy in %", by_lab.as_it_was, 0.25 * by_lab.as_it_was,
              "After how many epochs has batch 8 made the same number of steps?");
  if (lab.compare("as good: 4 x the rate", as_good(by_lab.four_times), "How far do 640 steps get at that rate?"))
    lab.say(line("batch 128, 4 x the rate", by_lab.four_times));
  if (lab.compare("as good: 16 x the rate from the first step", as_good(by_lab.sixteen_times),
                  "Compare the rate with the largest stable rate at the start."))
    lab.say(line("batch 128, 16 x the rate from the first step", by_lab.sixteen_times));
  lab.compare("as good: 16 x the rate after a warm-up", as_good(by_lab.warmed_up),
              "Compare the rate with the largest stable rate after an epoch.");

  bool steepest_at_start = true;
  for (std::size_t i = 0; i < seeds; ++i)
    steepest_at_start = steepest_at_start && by_lab.stable_at_start[i] < by_lab.stable_after_epoch[i];
  if (lab.compare("the limit is lower at the start than an epoch later", steepest_at_start,
                  "Where is the loss curved most?"))
    for (std::size_t i = 0; i < seeds; ++i) {
      char text[100];
      std::snprintf(text, sizeof text, "  start %zu: stable to a rate of %.2f, after an epoch to %.2f", i + 1,
                    by_lab.stable_at_start[i], by_lab.stable_after_epoch[i]);
      lab.say(text);
    }
}

}  // namespace large_batch_lab
