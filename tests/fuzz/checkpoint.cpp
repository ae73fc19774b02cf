// A checkpoint with an optimizer's state: what is refused changes nothing, what is accepted is saved as it was.
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/single_device.hpp>

#include "fuzz.hpp"

namespace fuzz_checkpoint {

struct Model : chorus::nn::Module {
  chorus::nn::Linear<chorus::Cpu> fc{1, 2};
  chorus::nn::BatchNorm1d<chorus::Cpu> norm{2};
  CHORUS_MODULE(Model, fc, norm)
  int forward() const { return 0; }
};

struct Run {
  chorus::SingleDevice<Model> net{Model(), 3};
  chorus::optim::Adam<chorus::Cpu> optimizer{net.parameters(), {.lr = 0.1}};
  chorus::optim::GradScaler<chorus::Cpu> scaler{net};

  /// All that a checkpoint is to restore.
  std::string numbers() {
    auto text = chorus::cat(chorus::io::parameters_sha256(net.module()), net.forward_passes(), " ", optimizer.lr());
    for (const auto& tensor : optimizer.state()) {
      std::size_t bytes = chorus::size_of(tensor.dtype);
      for (const auto size : tensor.shape) bytes *= static_cast<std::size_t>(size);
      text.append(static_cast<const char*>(tensor.data), bytes);
    }
    for (const double number : scaler.kept()) text.append(reinterpret_cast<const char*>(&number), sizeof number);
    return text;
  }
};

}  // namespace fuzz_checkpoint

FUZZ_TARGET(checkpoint) {
  using namespace chorus;
  static Run run;
  const fuzz::MemoryFile file(input);
  const auto before = run.numbers();
  try {
    const auto position = io::load_checkpoint(run.net, run.optimizer, file.path(), run.scaler);
    FUZZ_REQUIRE(position.epoch >= 0 && position.batch >= 0 && position.step >= 0);
  } catch (const Error&) {
    FUZZ_REQUIRE(run.numbers() == before);
    throw;
  }
}
