// Training on a GPU: as on the CPU, with two copies on one GPU, in bf16, and as a captured graph.
#include <catch.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/single_device.hpp>

#include "gpu.hpp"
#include "training_step.hpp"

namespace policies_test {

using namespace chorus;

template <class D>
struct Net : nn::Module {
  nn::Conv2d<D> conv{3, 8, {.kernel = 3}};
  nn::BatchNorm2d<D> norm{8};
  nn::Dropout drop{0.25};
  nn::Linear<D> fc{8 * 49, 4};
  CHORUS_MODULE(Net, conv, norm, drop, fc)
  auto forward(const auto& images) const { return fc(drop(flatten(max_pool2d(relu(norm(conv(images))), 2)))); }
};

struct Batch {
  Tensor<float, 4> images;
  Tensor<std::int64_t, 1> labels;
};
/// Images whose mean tells the class.
Batch batch(Index size, std::uint32_t key) {
  Batch out{Tensor<float, 4>::empty({size, 3, 16, 16}), Tensor<std::int64_t, 1>::empty({size})};
  const Index pixels = 3 * 16 * 16;
  for (Index i = 0; i < size; ++i) {
    out.labels(i) = static_cast<Index>(philox(7, {static_cast<std::uint32_t>(i), key, 0, 0})[0] % 4);
    for (Index j = 0; j < pixels; ++j)
      out.images.data()[i * pixels + j] =
          unit_float(philox(8, {static_cast<std::uint32_t>(i * pixels + j), key, 0, 0})[0]) +
          0.3f * static_cast<float>(out.labels(i));
  }
  return out;
}

template <class Model>
Model make() {
  manual_seed(3);
  return Model{};
}

// Losses of steps on batches of 12, with Adam, whose learning rate changes.
template <class Policy>
std::vector<double> train(Policy& net, int steps) {
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) {
    const auto [images, labels] = batch(12, static_cast<std::uint32_t>(i));
    optimizer.set_lr(i < 6 ? 0.01 : 0.002);
    optimizer.zero_grad();
    const auto loss = cross_entropy(net(images), labels);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item());
  }
  return losses;
}

void check_close(const std::vector<double>& got, const std::vector<double>& expected, double tolerance) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("step " << i);
    CHECK(got[i] == Approx(expected[i]).margin(tolerance));
  }
}

TEST_CASE("a GPU trains as the CPU does", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<Net<Cpu>> cpu{make<Net<Cpu>>(), 9};
  const auto expected = train(cpu, 12);
  CHECK(expected.back() < expected.front());
  SingleDevice<Net<Cuda>> gpu{make<Net<Cuda>>(), 9};
  check_close(train(gpu, 12), expected, 5e-3);
}

TEST_CASE("two copies on one GPU train as two on the CPU do", "[cuda]") {
  CHORUS_NEEDS_GPU;
  DataParallel<Net<Cpu>> cpu{make<Net<Cpu>>(), {.device_ids = {0, 1}}, 9};
  DataParallel<Net<Cuda>> gpu{make<Net<Cuda>>(), {.device_ids = {0, 0}}, 9};
  check_close(train(gpu, 12), train(cpu, 12), 5e-3);
}

TEST_CASE("bf16 on a GPU learns", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<Net<Cuda>> exact{make<Net<Cuda>>(), 9};
  SingleDevice<nn::MixedPrecision<Net<Cuda>>> mixed{make<nn::MixedPrecision<Net<Cuda>>>(), 9};
  check_close(train(mixed, 12), train(exact, 12), 0.15);
}

TEST_CASE("a replayed step is the eager one", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<Net<Cuda>> eager{make<Net<Cuda>>(), 9};
  const auto expected = train(eager, 12);

  SingleDevice<Net<Cuda>> net{make<Net<Cuda>>(), 9};
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  Graphed step(net, test::training_step(net, optimizer));
  for (int i = 0; i < 12; ++i) {
    const auto [images, labels] = batch(12, static_cast<std::uint32_t>(i));
    optimizer.set_lr(i < 6 ? 0.01 : 0.002);
    step(images, labels);
  }
  CHECK(step.replays() == 9);
  check_close(step.losses(), expected, 1e-4);
  CHECK(net.forward_passes() == eager.forward_passes());
  for (const auto& state : optimizer.state())
    if (state.dtype == DType::i64) CHECK(*static_cast<std::int64_t*>(state.data) == 12);

  // Another shape runs eagerly, and the graph goes on behind it.
  const auto small = batch(5, 99), whole = batch(12, 100);
  step(small.images, small.labels);
  step(whole.images, whole.labels);
  CHECK(step.replays() == 10);
  CHECK(step.losses().size() == 2);
}

TEST_CASE("a step that waits for the GPU cannot be captured, and says so", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<Net<Cuda>> net{make<Net<Cuda>>(), 9};
  Graphed step(net, [&](const auto& images, const auto& labels) {
    auto loss = cross_entropy(net(images), labels);
    static_cast<void>(loss.item());
    return loss;
  });
  const auto [images, labels] = batch(4, 1);
  for (int i = 0; i < 3; ++i) step(images, labels);
  CHECK_THROWS_AS(step(images, labels), UsageError);
  train(net, 2);  // nothing of the capture is left
}

}  // namespace policies_test
