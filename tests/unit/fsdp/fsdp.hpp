#pragma once
/// Training steps of FullyShardedDataParallel, and of DistributedDataParallel and one device for comparison.

#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <functional>
#include <memory>
#include <string>

#include <unit/parallel/ranks.hpp>

namespace test {

/// A rank's net with its two communicators.
template <class Model, class Units>
struct FullySharded {
  ch::comm::AnyCommunicator communicator, gathers;
  ch::FullyShardedDataParallel<Model, Units> net;

  explicit FullySharded(const ch::comm::World& world, const ch::FullyShardedDataParallelOptions& options = {},
                        Model model = make<Model>(), const ch::comm::ConnectOptions& how = {})
      : communicator(ch::comm::connect(world, how)),
        gathers(ch::comm::connect(ch::comm::split(communicator, world, 0), how)),
        net(std::move(model), communicator, gathers, options, 3) {}
};

/// A unit of at most 8 bytes, hence one for each layer of any size.
using EachLayer = ch::ByBytes<8>;
/// A unit for each parameter: a layer's numbers are gathered during an operation.
struct EachParameter {
  static constexpr bool reshard_after_forward = true;
  static std::vector<ch::fsdp::Unit> cut(ch::nn::Module&, const ch::nn::FlatParameters<ch::Cpu>& flat) {
    return ch::fsdp::detail::cut(flat, [](std::size_t, const ch::fsdp::Unit&) { return true; });
  }
};

/// Additional actions in the steps of a run, on a net and its optimizer.
template <class Model>
struct Extras {
  std::function<void(Model&, std::uint32_t step)> before = [](Model&, std::uint32_t) {};
  bool no_sync = false;     // a separate pass comes first, under no_sync
  bool adds_up = false;     // an averaging pass comes first
  bool evaluates = false;   // a pass without gradients comes between
  Index batch = 7;
  std::uint32_t steps = 20;
};

/// Trains a net; returns all losses as text. Shares of a batch are this rank's.
template <class Model, class Net, class Opt>
std::string losses(Net& net, Opt& optimizer, const ch::comm::World& world, const Extras<Model>& extras) {
  std::string text;
  const auto backward = [&](std::uint32_t number) {
    const auto mine = share(labels(extras.batch, 3, number), world);
    const auto loss = ch::cross_entropy(net(share(numbers(extras.batch, 5, number), world)), mine);
    loss.backward();
    text += ch::cat(net.mean(loss.item(), mine.numel()), " ");
  };
  for (std::uint32_t step = 0; step < extras.steps; ++step) {
    extras.before(net.module(), step);
    optimizer.zero_grad();
    if (extras.no_sync) {
      [[maybe_unused]] const auto quiet = net.no_sync();
      backward(step + 100);
    }
    if (extras.adds_up) backward(step + 200);
    backward(step);
    optimizer.step();
    if (extras.evaluates) {
      const ch::NoGrad evaluation;
      net.eval();
      const auto mine = share(numbers(extras.batch, 5, step + 300), world);
      const auto output = net(mine).value();  // all ranks call it
      text += ch::cat(net.mean(mine.size(0) == 0 ? 0 : ch::mean(output).item(), mine.size(0)), " ");
      net.train();
    }
  }
  return text;
}

/// A run under FullyShardedDataParallel: losses, then parameters, equal on all ranks.
template <class Model, class Opt, class Units = EachLayer>
std::string fully_sharded(int ranks, const typename Opt::options_type& options, const Extras<Model>& extras = {},
                          const ch::FullyShardedDataParallelOptions& how = {}) {
  return common_text(ranks, [=](const ch::comm::World& world) {
    FullySharded<Model, Units> rank(world, how);
    Opt optimizer{rank.net.parameters(), options};
    auto text = losses<Model>(rank.net, optimizer, world, extras);
    const auto whole = rank.net.gathered();
    return text + text_of(values(rank.net.module()));
  });
}

/// The same under DistributedDataParallel with ReduceScatter and a ShardedOptimizer.
template <class Model, class Opt>
std::string sharded_optimizer(int ranks, const typename Opt::options_type& options, double cap_mb,
                              const Extras<Model>& extras = {}) {
  return common_text(ranks, [=](const ch::comm::World& world) {
    Distributed<Model, ch::ReduceScatter> rank(world, {.first_bucket_cap_mb = cap_mb,
                                                       .bucket_cap_mb = cap_mb,
                                                       .find_unused_parameters = true});  // averages no whole gradient
    ch::ShardedOptimizer<Opt> optimizer{rank.net, options};
    auto text = losses<Model>(rank.net, optimizer, world, extras);
    return text + text_of(values(rank.net.module()));
  });
}

/// One device, in place of a rank.
template <class Model>
struct Alone {
  ch::SingleDevice<Model> net{make<Model>(), 3};
  auto& module() { return net.module(); }
  auto operator()(const auto& x) { return net(x); }
  int no_sync() { return 0; }
  double mean(double value, Index) { return value; }
  void train() { net.train(); }
  void eval() { net.eval(); }
};

/// The same on one device.
template <class Model, class Opt>
std::string one_device(const typename Opt::options_type& options, const Extras<Model>& extras = {}) {
  Alone<Model> alone;
  Opt optimizer{alone.net.parameters(), options};
  auto text = losses<Model>(alone, optimizer, {}, extras);
  return text + text_of(values(alone.module()));
}

/// The largest difference of two runs; infinite if their counts of numbers differ.
inline double apart(const std::string& a, const std::string& b) { return distance(numbers_in(a), numbers_in(b)); }

}  // namespace test
