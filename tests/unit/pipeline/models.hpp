#pragma once
/// Chains for the tests of pipelines, training steps on them, and one device's results.

#include <chorus/nn/chain.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <string>
#include <unit/parallel/ranks.hpp>
#include <utility>
#include <vector>

namespace test {

/// Residual, with dropout.
struct Block : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc{6, 6};
  ch::nn::Dropout drop{0.3};
  CHORUS_MODULE(Block, fc, drop)
  auto forward(const auto& x) const { return x + drop(ch::tanh(fc(x))); }
};
/// For x alone returns the logits, with targets the loss.
struct Head : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc{6, 3};
  CHORUS_MODULE(Head, fc)
  auto forward(const auto& x) const { return fc(x); }
  auto forward(const auto& x, const auto& y) const { return ch::cross_entropy(fc(x), y); }
};
template <int Blocks>
struct Chain : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> embed{5, 6};
  ch::nn::ModuleList<Block> blocks{std::vector<Block>(Blocks)};
  Head head;
  Chain() {
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = Block{};  // copies would share parameters
  }
  CHORUS_MODULE(Chain, embed, blocks, head)
  CHORUS_PIPELINE(embed, blocks, head)
};

/// A rank's pipeline with its communicator.
template <class Model, class Order = ch::OneForwardOneBackward>
struct Piped {
  ch::comm::AnyCommunicator communicator;
  ch::Pipeline<Model, Order> net;

  explicit Piped(const ch::comm::World& world, const ch::PipelineOptions& options = {}, Model model = make<Model>())
      : communicator(ch::comm::connect(world)), net(std::move(model), communicator, world, options, 3) {}
};

/// A step on batch `number`: of the loss that the model returns, or of a loss of its output.
template <class Net>
double chain_step(Net& net, ch::optim::Optimizer<ch::Cpu>& optimizer, std::uint32_t number, Index size,
                  bool model_gives_loss) {
  optimizer.zero_grad();
  const auto x = numbers(size, 5, number);
  const auto y = labels(size, 3, number);
  const auto loss = model_gives_loss ? net(x, y) : ch::cross_entropy(net(x), y);
  loss.backward();
  optimizer.step();
  return loss.item();
}
/// 20 steps, with batches that can't be divided evenly, and some with fewer samples than micro-batches.
template <class Net>
std::vector<double> chain_losses(Net& net, bool model_gives_loss, int steps = 20) {
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}};
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i)
    losses.push_back(chain_step(net, optimizer, static_cast<std::uint32_t>(i),
                                sizes[static_cast<std::size_t>(i) % sizes.size()], model_gives_loss));
  return losses;
}
template <class Model>
std::vector<double> chain_losses_alone(int steps = 20) {
  ch::SingleDevice<Model> net{make<Model>(), 3};
  return chain_losses(net, true, steps);
}

/// A rank's own parameters, by name, as text.
template <class Net>
std::string own_values(const Net& net) {
  std::string text;
  for (const auto& named : net.parameters()) {
    const auto* const data = static_cast<const double*>(named.parameter->value_data());
    for (Index i = 0; i < named.parameter->count(); ++i) text += ch::cat(data[i], " ");
  }
  return text;
}

}  // namespace test
