/// What a training step of GPT-2 and of ResNet-50 has to move and to compute on a GPU, by kernel: roofline CASE BATCH
/// [GB/s TFLOP/s], with those of an H100 where none are given. No GPU is needed: launches are noted, none is run.
/// Products and convolutions count as one kernel each, which reads its operands once, whichever library runs them.
/// CHORUS_CUDA_ATTENTION_MIB=0 shows attention by blocks.

#include "recorder.hpp"

#include <chorus/nn/mixed_precision.hpp>

#include <chorus/nn/models/resnet.hpp>
#include "../../benchmarks/cases.hpp"
#include "../../benchmarks/gpt2.hpp"

namespace ch = chorus;
using ch::Cuda;

namespace {

template <class Model, class Images, class MakeOptimizer>
void note(Model model, const Images& images, const ch::Tensor<std::int64_t, 1>& targets, const MakeOptimizer& make) {
  ch::SingleDevice<Model> net{std::move(model)};
  const auto optimizer = make(net.parameters());
  const auto x = ch::to_device(images, Cuda{});
  const auto y = ch::to_device(targets, Cuda{});
  for (int step = 0; step < 2; ++step) {  // the second is like all that follow
    ch::roofline::recorder().totals.clear();
    optimizer->zero_grad();
    const auto loss = ch::cross_entropy(net(x), y);
    loss.backward();
    optimizer->step();
    for (const auto& entry : net.flat_parameters().entries()) {
      const auto& parameter = entry.parameter();
      const auto count = static_cast<std::size_t>(parameter.count());
      ch::roofline::part(parameter.memory(), count * sizeof(float));
      ch::roofline::part(parameter.grad_data(), count * sizeof(float));
      ch::roofline::part(parameter.narrow_copy.data, count * sizeof(ch::bf16));
    }
  }
}

// An H100's L2 cache as others have measured it, bytes a second, and its nominal speed in float without tensor cores.
constexpr double cache_rate = 5.5e12, plain_speed = 67e12;

void print(double bandwidth, double speed) {
  ch::roofline::Total all;
  double ms = 0;
  std::printf(
      "| kernel | launches | GB | GB in the cache | Tera-operations | ms at least |\n|---|---|---|---|---|---|\n");
  const auto line = [](const char* name, const ch::roofline::Total& total, double least) {
    std::printf("| %s | %zu | %.3f | %.3f | %.3f | %.3f |%s\n", name, total.launches, total.bytes / 1e9,
                total.cached / 1e9, (total.operations + total.plain_operations) / 1e12, least,
                total.unknown > 0 ? " parts of arrays left out" : "");
  };
  for (const auto& [name, total] : ch::roofline::recorder().totals) {
    const double computing = total.operations / speed + total.plain_operations / plain_speed;
    const double least = std::max({total.bytes / bandwidth, total.cached / cache_rate, computing}) * 1e3;
    line(name.c_str(), total, least);
    all.launches += total.launches;
    all.bytes += total.bytes;
    all.cached += total.cached;
    all.operations += total.operations;
    all.plain_operations += total.plain_operations;
    ms += least;
  }
  line("all", all, ms);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const ch::Index batch = argc > 2 ? std::atoi(argv[2]) : 0;
  const double bandwidth = argc > 3 ? std::atof(argv[3]) : 3350, speed = argc > 4 ? std::atof(argv[4]) : 989;
  if ((name != "gpt2" && name != "resnet50") || batch < 1 || argc == 4 || bandwidth <= 0 || speed <= 0) {
    std::fprintf(stderr, "usage: roofline gpt2|resnet50 BATCH [GB/s TFLOP/s]\n");
    return 2;
  }
  if (name == "gpt2") {
    const bench::Gpt2Sizes sizes;
    const ch::Index count = batch * sizes.context;
    const auto text = bench::labels(count, static_cast<int>(sizes.vocabulary));
    note(ch::nn::MixedPrecision<bench::Gpt2<Cuda>>{bench::Gpt2<Cuda>(sizes)},
         text.view(ch::Shape<2>{batch, sizes.context}), text,
         bench::Optimizing<ch::optim::AdamW<Cuda>>{{.lr = 1e-4, .weight_decay = 0.01}});
  } else {
    note(ch::nn::MixedPrecision<ch::nn::ResNet50<Cuda>>{ch::nn::ResNet50<Cuda>{}},
         bench::normal<4>({batch, 3, 224, 224}), bench::labels(batch, 1000),
         bench::Optimizing<ch::optim::Sgd<Cuda>>{{.lr = 0.01, .momentum = 0.9}});
  }
  print(bandwidth * 1e9, speed * 1e12);
  return 0;
}
