#pragma once
/// The cases of the step benchmarks: reference models with their batches and optimizers, and one training step of each.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models.hpp"

namespace bench {

/// N(0, 1) numbers.
template <int Rank>
ch::Tensor<float, Rank> normal(const ch::Shape<Rank>& shape) {
  auto out = ch::Tensor<float, Rank>::empty(shape);
  ch::kernels::fill_normal(ch::Cpu{}, 0, 1000, 0, out.numel(), out.data(), 0.0f, 1.0f);
  return out;
}

/// Uniform labels in [0, classes).
inline ch::Tensor<std::int64_t, 1> labels(ch::Index count, int classes) {
  auto out = ch::Tensor<std::int64_t, 1>::empty({count});
  for (ch::Index i = 0; i < count; ++i)
    out(i) = ch::philox(1, {static_cast<std::uint32_t>(i), 0, 0, 0})[0] % static_cast<std::uint32_t>(classes);
  return out;
}

/// Milliseconds of the median of up to `most` steps, within about `seconds`, after three to warm up.
template <class Step>
double median_ms(const Step& step, std::size_t most, double seconds) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 3; ++i) step();
  std::vector<double> times;
  const auto begin = Clock::now();
  while (times.size() < most && std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    const auto start = Clock::now();
    step();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// One training step on a fixed batch: zero_grad, forward, cross entropy, backward, optimizer step.
template <class Net, class Optimizer, class Images>
auto make_step(Net& net, Optimizer& optimizer, const Images& images, const ch::Tensor<std::int64_t, 1>& targets) {
  return [&net, &optimizer, images, targets] {
    optimizer.zero_grad();
    const auto loss = ch::cross_entropy(net(images), targets);
    loss.backward();
    optimizer.step();
  };
}

/// A case's optimizer: called with parameters, it makes one.
template <class Opt>
struct Optimizing {
  using type = Opt;
  typename Opt::options_type options;
  auto operator()(auto parameters) const { return std::make_unique<Opt>(std::move(parameters), options); }
};

/// Calls `run(name, make, images, targets, optimizer)` for the cases that were asked for, with models on a `D` and the
/// batch on the CPU; returns false for an unknown one.
template <class D = ch::Cpu, class Run>
bool for_each_case(std::span<const std::string_view> wanted, const Run& run) {
  const Optimizing<ch::optim::Sgd<D>> sgd{{.lr = 0.01, .momentum = 0.9}};
  const Optimizing<ch::optim::Adam<D>> adam{{.lr = 1e-3}};
  const Optimizing<ch::optim::AdamW<D>> adam_w{{.lr = 1e-3, .weight_decay = 0.01}};
  constexpr std::string_view known[] = {"toy_b16", "toy_b128", "mlp_b64", "resnet18_b32", "gpt_b16"};
  for (const auto name : wanted)
    if (std::find(std::begin(known), std::end(known), name) == std::end(known)) {
      std::string message = ch::cat("unknown case '", name, "'; known are:");  // in one piece: every rank says so
      for (const auto k : known) message += ch::cat(" ", k);
      std::fprintf(stderr, "%s\n", message.c_str());
      return false;
    }
  const auto asked = [&](std::string_view name) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  if (asked("toy_b16"))
    run(
        "toy_b16", [] { return Toy<D>{}; }, normal<4>({16, 3, 32, 32}), labels(16, 10), sgd);
  if (asked("toy_b128"))
    run(
        "toy_b128", [] { return Toy<D>{}; }, normal<4>({128, 3, 32, 32}), labels(128, 10), sgd);
  if (asked("mlp_b64"))
    run(
        "mlp_b64", [] { return Mlp<D>{}; }, normal<2>({64, 784}), labels(64, 10), adam);
  if (asked("resnet18_b32"))
    run(
        "resnet18_b32", [] { return ResNet18<D>{}; }, normal<4>({32, 3, 32, 32}), labels(32, 10), sgd);
  if (asked("gpt_b16"))
    run(
        "gpt_b16", [] { return Gpt<D>{}; }, labels(16 * 128, 65).view(ch::Shape<2>{16, 128}), labels(16 * 128, 65),
        adam_w);
  return true;
}

}  // namespace bench
