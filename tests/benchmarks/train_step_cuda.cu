/// Times one training step of the reference models on a GPU: train_step_cuda [CASE ...]
/// Two lines a case, mode=eager and mode=graphs: name, device, mode, median step in ms, samples per second, peak GPU
/// memory by then. A step is zero_grad, forward, cross entropy, backward, optimizer step, on one fixed random batch, in
/// float; resnet18_b256_bf16 computes in bf16. Times are of ten steps and a wait for the GPU, divided by ten.

#include <chorus/nn/mixed_precision.hpp>
#include <chorus/parallel/cuda/graphed.hpp>

#include "cases.hpp"

namespace ch = chorus;
using ch::Cuda;

namespace {

template <class Step>
void time(const char* name, const char* mode, ch::Index samples, const Step& step) {
  constexpr int steps = 10;
  const double ms = bench::median_ms(
                        [&] {
                          for (int i = 0; i < steps; ++i) step();
                          ch::cuda::synchronize(Cuda{});
                        },
                        30, 2) /
                    steps;
  std::printf("%s device=cuda mode=%s median_ms=%.3f samples_per_s=%.0f peak_gpu_mib=%zu\n", name, mode, ms,
              static_cast<double>(samples) / ms * 1e3, ch::trace::memory(ch::trace_slot(Cuda{})).peak >> 20);
  std::fflush(stdout);
}

template <class Model, class Images, class MakeOptimizer>
void time_both(const char* name, Model model, const Images& images, const ch::Tensor<std::int64_t, 1>& targets,
               const MakeOptimizer& make_optimizer) {
  ch::SingleDevice<Model> net{std::move(model)};
  const auto optimizer = make_optimizer(net.parameters());
  const auto x = ch::to_device(images, Cuda{});
  const auto y = ch::to_device(targets, Cuda{});
  const auto step = [&](const auto& in, const auto& out) {
    optimizer->zero_grad();
    const auto loss = ch::cross_entropy(net(in), out);
    loss.backward();
    optimizer->step();
    return loss;
  };
  time(name, "eager", images.size(0), [&] { step(x, y); });
  ch::Graphed graphed(net, step);
  time(name, "graphs", images.size(0), [&] { graphed(x, y); });
}

}  // namespace

int main(int argc, char** argv) {
  if (ch::cuda::device_count() == 0) {
    std::fprintf(stderr, "train_step_cuda: this machine has no CUDA device\n");
    return 77;
  }
  try {
    std::vector<std::string_view> wanted(argv + 1, argv + argc);
    const bool narrow = wanted.empty() || std::erase(wanted, "resnet18_b256_bf16") > 0;
    if (!wanted.empty() || argc == 1)
      if (!bench::for_each_case<Cuda>(
              wanted, [](const char* name, auto make, const auto& images, const auto& targets, auto make_optimizer) {
                time_both(name, make(), images, targets, make_optimizer);
              }))
        return 2;
    if (narrow)
      time_both("resnet18_b256_bf16", ch::nn::MixedPrecision<bench::ResNet18<Cuda>>{},
                bench::normal<4>({256, 3, 32, 32}), bench::labels(256, 10), [](auto parameters) {
                  return std::make_unique<ch::optim::Sgd<Cuda>>(parameters,
                                                                ch::optim::SgdOptions{.lr = 0.01, .momentum = 0.9});
                });
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_step_cuda: %s\n", error.what());
    return 1;
  }
}
