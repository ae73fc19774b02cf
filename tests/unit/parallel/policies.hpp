#pragma once
/// Shared by the tests of policies: small smooth models in double, batches of generated numbers, and training steps.

#include <algorithm>
#include <catch.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/single_device.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../message_of.hpp"

namespace test {

namespace ch = chorus;
using ch::Index;

/// Numbers in [-1, 1) that depend on the key; row i is the same in every batch that has one.
inline ch::Tensor<double, 2> numbers(Index rows, Index columns, std::uint32_t key) {
  auto out = ch::Tensor<double, 2>::empty({rows, columns});
  for (Index i = 0; i < out.numel(); ++i)
    out.data()[i] =
        2.0 * static_cast<double>(ch::unit_float(ch::philox(99, {static_cast<std::uint32_t>(i), key, 0, 0})[0])) - 1;
  return out;
}
inline ch::Tensor<std::int64_t, 1> labels(Index count, Index classes, std::uint32_t key) {
  auto out = ch::Tensor<std::int64_t, 1>::empty({count});
  for (Index i = 0; i < count; ++i)
    out.data()[i] = static_cast<std::int64_t>(ch::philox(98, {static_cast<std::uint32_t>(i), key, 0, 0})[0] % classes);
  return out;
}

/// Its matrices are large enough to be compressed.
template <class D>
struct Wide : ch::nn::Module {
  ch::nn::Linear<D, double> fc1{20, 24}, fc2{24, 16};
  CHORUS_MODULE(Wide, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::tanh(fc1(x))); }
};

/// Three linear layers; smooth, so that rounding errors stay small.
template <class D>
struct Smooth : ch::nn::Module {
  ch::nn::Linear<D, double> fc1{5, 7}, fc2{7, 6}, fc3{6, 3};
  CHORUS_MODULE(Smooth, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(ch::tanh(fc2(ch::tanh(fc1(x))))); }
};

/// The same with dropout.
template <class D>
struct Dropping : ch::nn::Module {
  ch::nn::Linear<D, double> fc1{5, 7}, fc2{7, 6}, fc3{6, 3};
  ch::nn::Dropout first{0.3}, second{0.5};
  CHORUS_MODULE(Dropping, fc1, fc2, fc3, first, second)
  auto forward(const auto& x) const { return fc3(second(ch::tanh(fc2(first(ch::tanh(fc1(x))))))); }
};

/// Batch norm over 3 channels of 4 numbers, so that a share of one sample also has statistics.
template <class D, class Norm>
struct NormedBy : ch::nn::Module {
  ch::nn::Linear<D, double> fc1{5, 12}, fc2{12, 3};
  Norm norm{3};
  CHORUS_MODULE(NormedBy, fc1, norm, fc2)
  auto forward(const auto& x) const {
    const auto h = norm(ch::reshape(fc1(x), std::array<Index, 3>{-1, 3, 4}));
    return fc2(ch::tanh(ch::flatten(h)));
  }
};
template <class D>
using Normed = NormedBy<D, ch::nn::BatchNorm<D, double>>;
template <class D>
using Synced = NormedBy<D, ch::nn::SyncBatchNorm<D, double>>;

/// A model whose parameters depend only on the key.
template <class Model>
Model make(std::uint32_t key = 1) {
  Model model;
  std::uint32_t next = key * 100;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model)) {
    const auto values = numbers(1, named.parameter->count(), next++);
    for (Index i = 0; i < values.numel(); ++i)
      static_cast<double*>(named.parameter->value_data())[i] = 0.7 * values.data()[i];
  }
  return model;
}

/// All parameters of a model, in the order of its members.
inline std::vector<double> values(ch::nn::Module& model) {
  std::vector<double> out;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model)) {
    const auto* data = static_cast<const double*>(named.parameter->value_data());
    out.insert(out.end(), data, data + named.parameter->count());
  }
  return out;
}
/// All gradients, or 0 for a parameter without one.
inline std::vector<double> gradients(ch::nn::Module& model) {
  std::vector<double> out;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model)) {
    const auto* data = static_cast<const double*>(named.parameter->grad_data());
    for (Index i = 0; i < named.parameter->count(); ++i) out.push_back(named.parameter->grad_arrived() ? data[i] : 0);
  }
  return out;
}

/// The largest `distance` between sums that one device and several add up in different orders: a few thousand rounding
/// errors of a double.
inline constexpr double rounding = 1e-12;

/// The largest difference, divided by the largest of |b| if that exceeds 1; infinite if the sizes differ or a number is
/// NaN.
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0, largest = 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(a[i] - b[i]);
    worst = d >= 0 ? std::max(worst, d) : INFINITY;
    largest = std::max(largest, std::abs(b[i]));
  }
  return worst / largest;
}

/// The square root of the sum of the squares.
inline double length(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

/// Global batches of an epoch: full ones, then one that doesn't divide, and some smaller than the number of devices.
inline const std::vector<Index> sizes{12, 12, 7, 12, 3, 12, 2, 1, 12};

/// The losses of a run: `step(number, size)` for each of `sizes`.
template <class Step>
std::vector<double> each_step(const Step& step) {
  std::vector<double> losses;
  for (std::size_t i = 0; i < sizes.size(); ++i) losses.push_back(step(static_cast<std::uint32_t>(i), sizes[i]));
  return losses;
}

/// One step on the whole of batch `number`, for policies of one process.
template <class Net>
double step(Net& net, ch::optim::Optimizer<ch::Cpu>& optimizer, std::uint32_t number, Index size) {
  optimizer.zero_grad();
  const auto loss = ch::cross_entropy(net(numbers(size, 5, number)), labels(size, 3, number));
  loss.backward();
  optimizer.step();
  return loss.item();
}

struct Run {
  std::vector<double> losses, parameters;
};

template <class Net>
Run train(Net& net) {
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01}};
  auto losses = each_step([&](std::uint32_t number, Index size) { return step(net, optimizer, number, size); });
  return {std::move(losses), values(net.module())};
}

/// The run on one device, which is the reference for the other policies.
template <class Model>
Run train_single() {
  ch::SingleDevice<Model> net{make<Model>(), 3};
  return train(net);
}

/// Compares the gradients of `loss` with difference quotients, for every `every`-th number of each parameter.
template <class Net, class Loss>
void check_slopes(Net& net, const Loss& loss, Index every = 1) {
  loss().backward();
  for (const auto& named : net.parameters()) {
    const auto* gradient = static_cast<const double*>(named.parameter->grad_data());
    auto* values = static_cast<double*>(named.parameter->value_data());
    const bool arrived = named.parameter->grad_arrived();
    for (Index i = 0; i < named.parameter->count(); i += every) {
      constexpr double h = 1e-5;
      const double before = values[i];
      const auto loss_at = [&](double value) {
        values[i] = value;
        named.parameter->touch();
        return loss().item();
      };
      const double slope = (loss_at(before + h) - loss_at(before - h)) / (2 * h);
      loss_at(before);
      INFO(named.name << " " << i);
      CHECK((arrived ? gradient[i] : 0) == Approx(slope).margin(1e-6).epsilon(1e-5));
    }
  }
}

/// Names that tests of policies use.
namespace names {
using namespace chorus;
using ::message_of;
using Catch::Matchers::Contains;
using test::distance, test::labels, test::make, test::numbers, test::rounding;
}  // namespace names

}  // namespace test
