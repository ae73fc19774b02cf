#pragma once
/// Training steps of DistributedDataParallel, and real processes that run them.

#include <chorus/parallel/distributed_data_parallel.hpp>
#include <cstdlib>
#include <memory>
#include <string>

#include "../comm/processes.hpp"
#include "policies.hpp"

namespace test {

/// A rank's net and its communicator.
template <class Model, class Hook = ch::AllReduce>
struct Distributed {
  ch::comm::AnyCommunicator communicator;
  ch::DistributedDataParallel<Model, Hook> net;

  explicit Distributed(const ch::comm::World& world, const ch::DistributedDataParallelOptions& options = {},
                       Model model = make<Model>(), Hook hook = {})
      : communicator(ch::comm::connect(world)), net(std::move(model), communicator, options, 3, std::move(hook)) {}
};

/// Sets the environment as a launcher does for this rank.
inline void become(const ch::comm::World& world) {
  setenv("RANK", std::to_string(world.rank).c_str(), 1);
  setenv("LOCAL_RANK", std::to_string(world.rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(world.size).c_str(), 1);
  setenv("LOCAL_WORLD_SIZE", std::to_string(world.size).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(world.master_port).c_str(), 1);
  if (world.listen_fd >= 0) setenv("CHORUS_RENDEZVOUS_FD", std::to_string(world.listen_fd).c_str(), 1);
}

/// This rank's rows of a global batch: sizes differ by at most one, and may be 0.
template <class T, int Rank>
ch::Tensor<T, Rank> share(const ch::Tensor<T, Rank>& whole, const ch::comm::World& world) {
  const auto ranks = static_cast<std::size_t>(world.size), rank = static_cast<std::size_t>(world.rank);
  return whole.slice(0, ch::share_begin(whole.size(0), ranks, rank),
                     ch::share_begin(whole.size(0), ranks, rank + 1));
}

/// One step on this rank's share of batch `number`; returns the loss of the whole batch.
template <class Net>
double step(Net& net, ch::optim::Optimizer<ch::Cpu>& optimizer, std::uint32_t number, Index size,
            const ch::comm::World& world, double clip = 0) {
  optimizer.zero_grad();
  const auto mine = share(labels(size, 3, number), world);
  const auto loss = ch::cross_entropy(net(share(numbers(size, 5, number), world)), mine);
  loss.backward();
  if (clip > 0) ch::optim::clip_grad_norm(net.parameters(), clip);
  optimizer.step();
  return net.mean(loss.item(), mine.numel());
}

/// Numbers as text, with all digits.
inline std::string text_of(const std::vector<double>& numbers) {
  std::string text;
  for (const double number : numbers) text += ch::cat(number, " ");
  return text;
}
inline std::vector<double> numbers_in(const std::string& text) {
  std::vector<double> out;
  const char* at = text.c_str();
  for (char* end = nullptr;; at = end) {
    const double number = std::strtod(at, &end);
    if (end == at) return out;
    out.push_back(number);
  }
}

/// Trains like `test::train`; returns as text the losses, then the parameters, then a hash for each step.
template <class Model>
std::string train(const ch::comm::World& world, const ch::DistributedDataParallelOptions& options = {}) {
  Distributed<Model> rank(world, options);
  auto& net = rank.net;
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01}};
  std::string hashes;
  const auto losses = each_step([&](std::uint32_t number, Index size) {
    const double loss = step(net, optimizer, number, size, world);
    hashes += ch::io::parameters_sha256(net.module()).substr(0, 16) + " ";
    return loss;
  });
  return text_of(losses) + text_of(values(net.module())) + "|" + hashes;
}

/// For a buffer hook: averages the F64 buffers over all ranks.
template <class Buffers, class Communicator>
void average_buffers(const Buffers& buffers, Communicator& communicator) {
  for (const auto& named : buffers)
    if (named.buffer->dtype() == ch::DType::f64)
      communicator.all_reduce(
          std::span(static_cast<double*>(named.buffer->data()), static_cast<std::size_t>(named.buffer->count())),
          ch::comm::ReduceOp::sum, {.scale = 1.0 / communicator.size()});
}

/// The common result of all ranks; "" if they differ.
inline std::string common_text(int size, Ranks::Function function, std::chrono::milliseconds timeout = 10s) {
  const auto texts = Ranks(size, std::move(function), timeout).texts();
  for (const auto& text : texts)
    if (text != texts[0]) return "";
  return texts[0];
}

namespace names {
using namespace std::chrono_literals;
using comm::World;
using test::common_text, test::Distributed, test::Ranks;
}  // namespace names

}  // namespace test
