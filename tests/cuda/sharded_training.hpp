#pragma once
/// Training in half on the device, with an optimizer that is plain or shared out, and a loss scale.

#include <chorus/nn/linear.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <string>

namespace test {

namespace ch = chorus;

struct ShardedNet : ch::nn::Module {
  ch::nn::Linear<ch::Cuda> fc1{5, 19}, fc2{19, 3};
  CHORUS_MODULE(ShardedNet, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::tanh(fc1(x))); }
};
using HalfShardedNet = ch::nn::MixedPrecision<ShardedNet, ch::half>;

inline constexpr ch::optim::AdamOptions sharded_adam{.lr = 0.02};
inline constexpr int sharded_steps = 40, sharded_warm_up = 3;
/// Small, so that there are several.
inline const ch::DistributedDataParallelOptions sharded_buckets{.first_bucket_cap_mb = 1e-4, .bucket_cap_mb = 1e-4};

/// Losses, in steps from a scale that overflows, so that some are left out; then the scale, how many were left out, and
/// how many captured. All ranks call it with their own net; `graphed` or eager.
template <class Net, class Optimizer>
std::vector<double> train_in_half(Net& net, Optimizer& optimizer, bool graphed) {
  using namespace ch;
  optim::GradScaler scaler{net, {.init_scale = 0x1p24, .growth_interval = 4}};
  Graphed step(net,
               [&](const auto& x, const auto& y) {
                 optimizer.zero_grad();
                 auto loss = cross_entropy(net(x), y);
                 scaler.scale(loss).backward();
                 scaler.step(optimizer);
                 return loss;
               },
               {.warm_up = graphed ? sharded_warm_up : 1000});
  const Index mine = 12 / net.communicator().size(), first = mine * net.communicator().rank();
  for (std::uint32_t number = 0; number < sharded_steps; ++number) {
    auto x = Tensor<float, 2>::empty({mine, 5});
    auto y = Tensor<std::int64_t, 1>::empty({mine});
    for (Index row = 0; row < mine; ++row) {
      for (Index c = 0; c < 5; ++c)
        x(row, c) = unit_float(philox(3, {static_cast<std::uint32_t>((first + row) * 5 + c), number, 0, 0})[0]) - 0.5f;
      y(row) = x(row, 0) > 0 ? 0 : x(row, 1) > 0 ? 1 : 2;
    }
    if (number == 30) optimizer.set_lr(sharded_adam.lr / 2);
    step(x, y);
  }
  auto out = step.losses();
  for (double& loss : out) loss = net.mean(loss, mine);
  out.insert(out.end(),
             {scaler.loss_scale(), static_cast<double>(scaler.skipped_steps()), static_cast<double>(step.replays())});
  return out;
}

/// The same with a plain optimizer or a sharded one, as text. `make_net(model, options)`, of a net whose hook is
/// `Hook`.
template <bool sharded, class MakeNet>
std::string train_in_half(const MakeNet& make_net, bool graphed) {
  ch::manual_seed(4);
  auto net = make_net(HalfShardedNet{}, sharded_buckets);
  using Adam = ch::optim::Adam<ch::Cuda>;
  std::vector<double> numbers;
  if constexpr (sharded) {
    ch::ShardedOptimizer<Adam> optimizer{*net, sharded_adam};
    numbers = train_in_half(*net, optimizer, graphed);
  } else {
    Adam optimizer{net->parameters(), sharded_adam};
    numbers = train_in_half(*net, optimizer, graphed);
  }
  std::string text;
  for (const double number : numbers) text += ch::cat(number, " ");
  return text;
}

}  // namespace test
