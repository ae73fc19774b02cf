/// Times one training step of the reference models on a GPU: train_step_cuda [hash] [CASE ...]
/// Two lines a case, mode=eager and mode=graphs: name, device, mode, median step in ms, samples per second, peak GPU
/// memory by then. A step is zero_grad, forward, cross entropy, backward, optimizer step, on one fixed random batch, in
/// float; resnet18_b256_bf16 computes in bf16. A time is of one step and the wait for the GPU, as in torch_train.py.

#include <chorus/nn/mixed_precision.hpp>

#include "cases.hpp"
#include "cuda_step.hpp"

namespace ch = chorus;
using ch::Cuda;

int main(int argc, char** argv) {
  if (ch::cuda::device_count() == 0) {
    std::fprintf(stderr, "train_step_cuda: this machine has no CUDA device\n");
    return 77;
  }
  try {
    std::vector<std::string_view> wanted(argv + 1, argv + argc);
    bench::take_hash_word(wanted);
    const bool all = wanted.empty(), narrow = all || std::erase(wanted, "resnet18_b256_bf16") > 0;
    if (!wanted.empty() || all)
      if (!bench::for_each_case<Cuda>(
              wanted, [](const char* name, auto make, const auto& images, const auto& targets, auto make_optimizer) {
                bench::time_eager_and_graphs(name, make(), images, targets, make_optimizer);
              }))
        return 2;
    if (narrow)
      bench::time_eager_and_graphs("resnet18_b256_bf16", ch::nn::MixedPrecision<bench::ResNet18<Cuda>>{},
                                   bench::normal<4>({256, 3, 32, 32}), bench::labels(256, 10),
                                   bench::Optimizing<ch::optim::Sgd<Cuda>>{{.lr = 0.01, .momentum = 0.9}});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_step_cuda: %s\n", error.what());
    return 1;
  }
}
