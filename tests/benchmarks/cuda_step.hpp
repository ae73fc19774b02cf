#pragma once
/// How a training step is timed on a GPU: as torch_train.py times PyTorch's, so that both can stand side by side.

#include <algorithm>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chrono>
#include <cstdio>
#include <string_view>
#include <vector>

#include "models.hpp"

namespace bench {

/// Milliseconds of the median step: ten to warm up, then up to 300 within 4 seconds, each with a wait for the GPU.
template <class Step>
double cuda_median_ms(const Step& step) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 10; ++i) step();
  ch::cuda::synchronize(ch::Cuda{});
  std::vector<double> times;
  const auto begin = Clock::now();
  while (times.size() < 300 && Clock::now() - begin < std::chrono::seconds(4)) {
    const auto start = Clock::now();
    step();
    ch::cuda::synchronize(ch::Cuda{});
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Prints a line: name, device, mode, median step, samples per second, peak GPU memory of the process so far.
template <class Step>
void time_step(const char* name, const char* mode, ch::Index samples, const Step& step) {
  const double ms = cuda_median_ms(step);
  std::printf("%s device=cuda mode=%s median_ms=%.3f samples_per_s=%.0f peak_gpu_mib=%zu\n", name, mode, ms,
              static_cast<double>(samples) / ms * 1e3, ch::trace::memory(ch::trace_slot(ch::Cuda{})).peak >> 20);
  std::fflush(stdout);
}

/// Whether the word `hash` was among a program's arguments: then no step is timed, but a line for each case and mode
/// has the loss of the twentieth step and a hash of the parameters after it. A run repeated prints the same.
inline bool& hashes() {
  static bool asked = false;
  return asked;
}
/// Takes it out.
inline void take_hash_word(std::vector<std::string_view>& words) { hashes() = std::erase(words, "hash") > 0; }
template <class Net, class Step>
void print_hash(const char* name, const char* mode, Net& net, const Step& step) {
  double loss = 0;
  for (int i = 0; i < 20; ++i) loss = step();
  std::printf("%s device=cuda mode=%s steps=20 loss=%.9g hash=%s\n", name, mode, loss,
              ch::io::parameters_sha256(net.module()).c_str());
  std::fflush(stdout);
}

/// A training step, eager and as a CUDA graph, on one fixed batch: zero_grad, forward, cross entropy, backward,
/// optimizer step.
template <class Model, class Images, class MakeOptimizer>
void time_eager_and_graphs(const char* name, Model model, const Images& images,
                           const ch::Tensor<std::int64_t, 1>& targets, const MakeOptimizer& make_optimizer) {
  ch::SingleDevice<Model> net{std::move(model)};
  const auto optimizer = make_optimizer(net.parameters());
  const auto x = ch::to_device(images, ch::Cuda{});
  const auto y = ch::to_device(targets, ch::Cuda{});
  const auto step = [&](const auto& in, const auto& out) {
    optimizer->zero_grad();
    const auto loss = ch::cross_entropy(net(in), out);
    loss.backward();
    optimizer->step();
    return loss;
  };
  if (hashes()) {
    print_hash(name, "eager", net, [&] { return static_cast<double>(step(x, y).item()); });
    ch::Graphed graphed(net, step);
    return print_hash(name, "graphs", net, [&] { return graphed(x, y), graphed.losses().back(); });
  }
  time_step(name, "eager", images.size(0), [&] { step(x, y); });
  ch::Graphed graphed(net, step);
  time_step(name, "graphs", images.size(0), [&] { graphed(x, y); });
}

}  // namespace bench
