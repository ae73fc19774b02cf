/// What a training step of GPT-2 and of ResNet-50 has to move and to compute on a GPU, by kernel: roofline CASE BATCH
/// [GB/s TFLOP/s], with those of an H100 where none are given. No GPU is needed: launches are noted, none is run.
/// Products and convolutions count as one kernel each, which reads its operands once, whichever library runs them.

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

void print(double bandwidth, double speed) {
  double bytes = 0, operations = 0, ms = 0;
  std::size_t launches = 0;
  std::printf("| kernel | launches | GB | Tera-operations | ms at least |\n|---|---|---|---|---|\n");
  for (const auto& [name, total] : ch::roofline::recorder().totals) {
    const double least = std::max(total.bytes / bandwidth, total.operations / speed) * 1e3;
    std::printf("| %s | %zu | %.3f | %.3f | %.3f |%s\n", name.c_str(), total.launches, total.bytes / 1e9,
                total.operations / 1e12, least, total.unknown > 0 ? " parts of arrays left out" : "");
    launches += total.launches;
    bytes += total.bytes;
    operations += total.operations;
    ms += least;
  }
  std::printf("| all | %zu | %.3f | %.3f | %.3f |\n", launches, bytes / 1e9, operations / 1e12, ms);
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
