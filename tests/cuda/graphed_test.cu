// Captured steps: what they read and write stays where they know it, whatever the program does between replays.
#include <catch.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/positions.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/random.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/parallel/single_device.hpp>
#include <stdexcept>
#include <thread>

#include "gpu.hpp"
#include "training_step.hpp"
#include "two_layers.hpp"

namespace graphed_test {

using namespace chorus;

struct Sequence : nn::Module {
  nn::Linear<Cuda> queries{4, 4};
  CHORUS_MODULE(Sequence, queries)
  auto forward(const auto& x) const {
    const auto h = nn::rotary_positions(queries(x));
    return scaled_dot_product_attention(h, h, x, true);
  }
};
Tensor<float, 3> sequence(Index length, Index key) {
  auto out = Tensor<float, 3>::empty({2, length, 4});
  for (Index i = 0; i < out.numel(); ++i) out.data()[i] = static_cast<float>((i * 37 + key * 11) % 17) / 8 - 1;
  return out;
}

// Losses, in a thread of its own, which keeps nothing of earlier calls. `others`: sequences of other lengths between.
std::vector<double> losses_on_sequences(bool others) {
  std::vector<double> losses;
  std::thread([&] {
    manual_seed(4);
    SingleDevice<Sequence> net{Sequence{}, 9};
    optim::Sgd<Cuda> optimizer{net.parameters(), {.lr = 0.1}};
    {
      const NoGrad none;  // the tables of this length are made outside of the graph's memory
      net(sequence(16, 0));
    }
    Graphed step(net,
                 [&](const auto& x) {
                   optimizer.zero_grad();
                   const auto y = net(x);
                   auto loss = mean(y * y);
                   loss.backward();
                   optimizer.step();
                   return loss;
                 },
                 {.warm_up = 2});
    for (Index i = 0; i < 8; ++i) {
      step(sequence(16, i));
      if (!others || i != 3) continue;
      const NoGrad none;
      for (const Index length : {13, 20}) net(sequence(length, 1));
      std::vector<Tensor<float, 1, Cuda>> taken;
      for (const float value : {0.f, 1e30f, 0.f, 1e30f}) {
        for (const Index size : {64, 32, 16}) taken.push_back(Tensor<float, 1, Cuda>::full({size}, value));
      }
    }
    CHECK(step.replays() == 6);
    losses = step.losses();
  }).join();
  return losses;
}

TEST_CASE("a replayed step has its masks and positions, though other lengths have come since", "[cuda]") {
  CHORUS_NEEDS_GPU;
  CHECK(losses_on_sequences(true) == losses_on_sequences(false));
}

struct Noisy : nn::Module {
  nn::Linear<Cuda> fc{4, 4};
  CHORUS_MODULE(Noisy, fc)
  auto forward(const auto& x) const {
    const auto h = fc(x);
    return dropout(h + randn_like(h), 0.5, training());
  }
};

// Steps of two passes, one of them eager; another thread's, so that both begin alike.
std::vector<double> losses_with_noise(bool replays, bool training) {
  std::vector<double> losses;
  std::thread([&] {
    manual_seed(4);
    SingleDevice<Noisy> net{Noisy{}, 9};
    net.train(training);
    optim::Sgd<Cuda> optimizer{net.parameters(), {.lr = 0.1}};
    const auto one = [&](const auto& x) {
      optimizer.zero_grad();
      const auto first = net(x), second = net(x);
      auto loss = mean(first * first) + mean(second * second);
      loss.backward();
      optimizer.step();
      return loss;
    };
    const auto batch = [](Index rows) { return Tensor<float, 2>::full({rows, 4}, 0.5f); };
    if (replays) {
      Graphed step(net, one, {.warm_up = 2});
      for (Index i = 0; i < 8; ++i) step(batch(i == 5 ? 3 : 6));
      CHECK(step.replays() == 5);
      losses = step.losses();
    } else {
      for (Index i = 0; i < 8; ++i) losses.push_back(one(to_device(batch(i == 5 ? 3 : 6), Cuda{})).item());
    }
    CHECK(net.forward_passes() == 16);
  }).join();
  return losses;
}

TEST_CASE("replayed steps draw the random numbers of eager ones, several passes a step, in evaluation too", "[cuda]") {
  CHORUS_NEEDS_GPU;
  for (const bool training : {true, false}) {
    const auto replayed = losses_with_noise(true, training), eager = losses_with_noise(false, training);
    REQUIRE(replayed.size() == eager.size());
    for (std::size_t i = 0; i < eager.size(); ++i) CHECK(replayed[i] == Approx(eager[i]).epsilon(1e-5));
  }
}

using test::images, test::labels;
using Net = test::TwoLayers;
std::vector<float> numbers_of(const void* data, std::size_t bytes) {
  std::vector<float> out(bytes / sizeof(float));
  copy_bytes(Cpu{}, out.data(), Cuda{}, data, bytes);
  return out;
}

TEST_CASE("a capture that failed has left nothing behind when it is tried again", "[cuda]") {
  CHORUS_NEEDS_GPU;
  const auto train = [](bool fails) {
    manual_seed(4);
    SingleDevice<Net> net{Net{}, 9};
    optim::Adam<Cuda> optimizer{net.parameters(), {.lr = 0.01}};
    auto one = test::training_step(net, optimizer);
    int calls = 0;
    Graphed step(net,
                 [&](const auto& x, const auto& y) {
                   auto loss = one(x, y);
                   if (++calls == 3 && fails) throw std::runtime_error("not this time");
                   return loss;
                 },
                 {.warm_up = 2});
    for (Index i = 0; i < 7; ++i) {
      if (fails && i == 2) CHECK_THROWS_WITH(step(images(i), labels()), Catch::Matchers::Contains("not this time"));
      step(images(i), labels());
    }
    CHECK(step.replays() == 5);
    CHECK(net.forward_passes() == 7);
    for (const auto& state : optimizer.state())
      if (state.dtype == DType::i64) CHECK(*static_cast<std::int64_t*>(state.data) == 7);
    return step.losses();
  };
  CHECK(train(true) == train(false));
}

/// A training step that `average` follows.
template <class Policy, class Optimizer, class Average>
auto averaged_step(Policy& net, Optimizer& optimizer, Average& average) {
  return [one = test::training_step(net, optimizer), &average](const auto& x, const auto& y) {
    auto loss = one(x, y);
    average.update();
    return loss;
  };
}

TEST_CASE("averages of captured steps are those of eager ones, also where the model has computed with them", "[cuda]") {
  CHORUS_NEEDS_GPU;
  const auto train = [](int warm_up) {
    manual_seed(4);
    SingleDevice<Net> net{Net{}, 9};
    optim::Sgd<Cuda> optimizer{net.parameters(), {.lr = 0.1}};
    optim::ParameterAverage average{net.parameters(), optim::exponential(0.5)};
    Graphed step(net, averaged_step(net, optimizer, average), {.warm_up = warm_up});
    for (Index i = 0; i < 7; ++i) {
      step(images(i), labels());
      if (i == 4) {
        const optim::AveragedScope use{average};
        net(images(i));
      }
    }
    CHECK(average.updates() == 7);
    std::vector<float> all;
    for (const auto& state : average.state()) {
      if (state.on_host) continue;
      const auto numbers = numbers_of(state.data, static_cast<std::size_t>(numel(state.shape)) * sizeof(float));
      all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
  };
  CHECK(train(2) == train(1000));
}

TEST_CASE("a mean of all updates cannot be captured, and says so", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<Net> net{Net{}, 9};
  optim::Sgd<Cuda> optimizer{net.parameters(), {.lr = 0.1}};
  optim::ParameterAverage average{net.parameters(), optim::equal_weights()};
  Graphed step(net, averaged_step(net, optimizer, average), {.warm_up = 1});
  step(images(0), labels());
  CHECK_THROWS_WITH(step(images(1), labels()), Catch::Matchers::Contains("equal_weights"));
}

}  // namespace graphed_test
