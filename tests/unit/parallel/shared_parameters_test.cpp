// One copy of the parameters for all ranks of a machine: ShardedOptimizer with share_parameters.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <catch.hpp>
#include <cerrno>
#include <chorus/core/trace.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/optim/adagrad.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/lion.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <optional>
#include <thread>

#include "../io/files.hpp"
#include "../message_of.hpp"
#include "ranks.hpp"

// This process's own, before that of the C library: it fails while a test says so.
namespace shared_parameters_test {
bool may_look = true;
}
extern "C" ssize_t readlink(const char* path, char* target, std::size_t bytes) noexcept {
  if (!shared_parameters_test::may_look) return errno = EACCES, -1;
  return syscall(SYS_readlinkat, AT_FDCWD, path, target, bytes);
}

namespace shared_parameters_test {

using namespace test::names;
using chorus_test::TemporaryFolder;
using Adam = optim::Adam<Cpu>;
using Catch::Matchers::Contains, Catch::Matchers::EndsWith, Catch::Matchers::StartsWith;
const optim::AdamOptions adam{.lr = 0.05, .amsgrad = true};
const ShardedOptimizerOptions in_common{.share_parameters = true};
using Model = test::Smooth<Cpu>;

template <class Net>
void backward(Net& net, std::uint32_t number, const World& world) {
  cross_entropy(net(test::share(numbers(12, 5, number), world)), test::share(labels(12, 3, number), world)).backward();
}
template <class Net, class Optimizer>
void step(Net& net, Optimizer& optimizer, std::uint32_t number, const World& world) {
  optimizer.zero_grad();
  backward(net, number, world);
  optimizer.step();
}

/// The parameters after some steps; of those between `frozen` and `thawed` one layer takes no part.
template <class Hook>
std::string trained(int ranks, bool share, const DistributedDataParallelOptions& options = {}, std::uint32_t frozen = 9,
                    std::uint32_t thawed = 9) {
  return common_text(ranks, [=](const World& world) {
    Distributed<Model, Hook> rank(world, options);
    ShardedOptimizer<Adam> optimizer{rank.net, adam, {.share_parameters = share}};
    if (optimizer.shares_parameters() != (share && ranks > 1)) return std::string("shared otherwise");
    std::string hashes;
    for (std::uint32_t number = 0; number < 8; ++number) {
      if (number == frozen) rank.net.module().fc2.weight.set_requires_grad(false);
      if (number == thawed) rank.net.module().fc2.weight.set_requires_grad(true);
      step(rank.net, optimizer, number, world);
      hashes += io::parameters_sha256(rank.net.module()).substr(0, 16) + " ";
    }
    return hashes;
  });
}

TEST_CASE("shared parameters: the steps are those of ranks with copies of their own, bit for bit") {
  for (const int ranks : {1, 2, 3, 4})
    for (const double cap : {25.0, 0.0}) {
      const DistributedDataParallelOptions options{.first_bucket_cap_mb = cap, .bucket_cap_mb = cap};
      INFO(ranks << " ranks, cap " << cap);
      const auto text = trained<ReduceScatter>(ranks, false, options);
      REQUIRE(std::count(text.begin(), text.end(), ' ') == 8);
      CHECK(trained<ReduceScatter>(ranks, true, options) == text);
      const auto whole = trained<AllReduce>(ranks, false, options);
      CHECK(trained<AllReduce>(ranks, true, options) == whole);
    }
}

/// The same with any optimizer.
template <class Opt>
std::string stepped(bool share, const typename Opt::options_type& of_opt, double max_norm = 0) {
  return common_text(3, [=](const World& world) {
    Distributed<Model, ReduceScatter> rank(world);
    ShardedOptimizer<Opt> optimizer{rank.net, of_opt, {.share_parameters = share}};
    std::string hashes;
    for (std::uint32_t number = 0; number < 4; ++number) {
      optimizer.zero_grad();
      backward(rank.net, number, world);
      if (max_norm > 0) hashes += cat(optimizer.clip_grad_norm(max_norm), " ");
      optimizer.step();
      hashes += io::parameters_sha256(rank.net.module()).substr(0, 16) + " ";
    }
    return hashes;
  });
}
template <class Opt>
void same_steps(const typename Opt::options_type& options) {
  for (const double max_norm : {0.0, 0.1}) {
    const auto text = stepped<Opt>(false, options, max_norm);
    REQUIRE(std::count(text.begin(), text.end(), ' ') == (max_norm > 0 ? 8 : 4));
    CHECK(stepped<Opt>(true, options, max_norm) == text);
  }
}

TEST_CASE("shared parameters: every optimizer steps with the averages, whether it adds them up or finds them") {
  same_steps<optim::Sgd<Cpu>>({.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
  same_steps<optim::AdamW<Cpu>>({.lr = 0.1, .weight_decay = 0.1});
  same_steps<optim::Adagrad<Cpu>>({.lr = 0.1});
  same_steps<optim::RmsProp<Cpu>>({.lr = 0.1, .momentum = 0.5});
  same_steps<optim::RmsProp<Cpu>>({.lr = 0.1, .centered = true});
  same_steps<optim::Lion<Cpu>>({.lr = 0.1});
}

TEST_CASE("shared parameters: averages that an optimizer was to make, which is gone, are not taken for made") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Model, ReduceScatter> rank(world);
    std::optional<ShardedOptimizer<Adam>> optimizer(std::in_place, rank.net, adam, in_common);
    step(rank.net, *optimizer, 0, world);
    optimizer->zero_grad();
    backward(rank.net, 1, world);
    optimizer.reset();
    ShardedOptimizer<Adam> other{rank.net, adam};
    const auto message = message_of<UsageError>([&] { other.step(); });
    other.zero_grad();
    step(rank.net, other, 2, world);
    return message;
  });
  CHECK_THAT(text, StartsWith("ShardedOptimizer: the last gradients were to be averaged by") && EndsWith("is gone"));
}

TEST_CASE("shared parameters: layers are frozen and thawed, and buckets made anew") {
  const auto text = trained<ReduceScatter>(3, false, {}, 2, 5);
  REQUIRE(std::count(text.begin(), text.end(), ' ') == 8);
  CHECK(trained<ReduceScatter>(3, true, {}, 2, 5) == text);
}

TEST_CASE("shared parameters: there is one copy while the optimizer lives, then each rank has its own") {
  const auto texts = Ranks(3, [](const World& world) {
                       Distributed<Model, ReduceScatter> rank(world);
                       auto& c = rank.communicator;
                       const auto first = [&]() -> double& { return *rank.net.module().fc1.weight.value().data(); };
                       const auto seen = [&](double written) {
                         c.barrier();
                         if (world.rank == 1) first() = written;
                         c.barrier();
                         const bool here = first() == written;
                         c.barrier();
                         return here ? "seen " : "unseen ";
                       };
                       std::string out;
                       {
                         ShardedOptimizer<Adam> optimizer{rank.net, adam, in_common};
                         out += seen(1.25);
                         step(rank.net, optimizer, 0, world);  // lays the parameters out anew
                         out += seen(1.5);
                         step(rank.net, optimizer, 1, world);
                       }
                       const auto before = io::parameters_sha256(rank.net.module());
                       out += comm::broadcast_object(c, before) == before ? "same " : "different ";
                       out += seen(1.75);
                       return out;
                     }).texts();
  CHECK(texts == std::vector<std::string>{"seen seen same unseen ", "seen seen same seen ", "seen seen same unseen "});
}

TEST_CASE("shared parameters: a step sends none, where two ranks with their own send each number once") {
  for (const bool share : {true, false}) {
    const auto text = common_text(2, [share](const World& world) {
      Distributed<Model, ReduceScatter> rank(world);
      ShardedOptimizer<Adam> optimizer{rank.net, adam, {.share_parameters = share}};
      step(rank.net, optimizer, 0, world);
      const auto before = trace::bytes_sent(world.rank, trace::Traffic::parameters);
      for (const std::uint32_t number : {1u, 2u}) step(rank.net, optimizer, number, world);
      auto sent = trace::bytes_sent(world.rank, trace::Traffic::parameters) - before;
      rank.communicator.all_reduce(std::span(&sent, 1));
      return cat(sent, " of ", rank.net.flat_parameters().bytes());
    });
    CHECK(text == (share ? "0 of 888" : "1776 of 888"));
  }
}

TEST_CASE("shared parameters: nobody steps while another rank may compute with the old ones") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Model, ReduceScatter> rank(world);
    ShardedOptimizer<Adam> optimizer{rank.net, adam, in_common};
    std::string out;
    for (std::uint32_t number = 0; number < 2; ++number) {
      optimizer.zero_grad();
      sum(rank.net(test::share(numbers(12, 5, number), world))).backward();
      if (world.rank == 0) std::this_thread::sleep_for(100ms);
      out += io::parameters_sha256(rank.net.module()).substr(0, 16) + " ";
      optimizer.step();
    }
    return out;
  });
  CHECK(std::count(text.begin(), text.end(), ' ') == 2);
}

TEST_CASE("shared parameters: an optimizer that doesn't know of them would step them once for each rank, and refuses") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Model> rank(world);
    optim::Sgd<Cpu> plain{rank.net.parameters(), {.lr = 0.1}};
    const auto before = test::values(rank.net.module());
    std::string message;
    {
      ShardedOptimizer<Adam> optimizer{rank.net, adam, in_common};
      message = message_of<UsageError>([&] { step(rank.net, plain, 0, world); });
      if (test::values(rank.net.module()) != before) message += "moved";
    }
    plain.step();  // each rank has its own again
    if (test::values(rank.net.module()) == before) message += "stayed";
    return message;
  });
  CHECK_THAT(text, Contains("optimizer: all ranks have '") && Contains("in common") && EndsWith("may"));
}

TEST_CASE("shared parameters: averages can be followed, but not exchanged with what all ranks have") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Model> rank(world);
    ShardedOptimizer<Adam> optimizer{rank.net, adam, in_common};
    optim::ParameterAverage average{rank.net.parameters(), optim::exponential(0.5)};
    step(rank.net, optimizer, 0, world);
    average.update();
    return message_of<UsageError>([&] { const optim::AveragedScope use{average}; });
  });
  CHECK_THAT(text, StartsWith("ParameterAverage: all ranks have '"));
}

TEST_CASE("shared parameters: where a rank can't map them, all keep copies of their own") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<Model, ReduceScatter> rank(world);
    may_look = world.rank != 1;
    ShardedOptimizer<Adam> optimizer{rank.net, adam, in_common};
    for (const std::uint32_t number : {0u, 1u}) step(rank.net, optimizer, number, world);
    return cat(optimizer.shares_parameters(), " ", io::parameters_sha256(rank.net.module()));
  });
  CHECK_THAT(text, StartsWith("false "));
}

TEST_CASE("shared parameters: memory of a process that is not what it was said to be is not taken") {
  CHECK_THAT(message_of<CommError>([] { comm::SharedRegion::open(getpid(), 0, 8); }),
             Contains("shared memory: /proc/"));
}

TEST_CASE("shared parameters: a run that is broken off and resumed ends with the same bits, shared or not") {
  const TemporaryFolder folder;
  const auto run = [&](bool share, std::uint32_t last, const std::string& from, const std::string& to) {
    return common_text(2, [=](const World& world) {
      Distributed<Model, ReduceScatter> rank(world);
      ShardedOptimizer<Adam> optimizer{rank.net, adam, {.share_parameters = share}};
      io::TrainingPosition position;
      if (!from.empty()) position = io::load_checkpoint(rank.net, optimizer, from);
      for (; position.step < last; ++position.step)
        step(rank.net, optimizer, static_cast<std::uint32_t>(position.step), world);
      if (!to.empty()) io::save_checkpoint(rank.net, optimizer, position, to);
      return io::parameters_sha256(rank.net.module());
    });
  };
  const auto whole = run(false, 6, "", "");
  REQUIRE(!whole.empty());
  for (const bool first : {false, true})
    for (const bool second : {false, true}) {
      REQUIRE(!run(first, 3, "", folder / "run").empty());
      CHECK(run(second, 6, folder / "run", "") == whole);
    }
}

TEST_CASE("shared parameters: with join a rank that has ended steps its part of them still") {
  const auto trained = [](bool share) {
    return common_text(3, [share](const World& world) {
      Distributed<Model, ReduceScatter> rank(world);
      ShardedOptimizer<Adam> optimizer{rank.net, adam, {.share_parameters = share}};
      const auto batches = 2 + 2 * static_cast<std::uint32_t>(world.rank);
      rank.net.join(
          [&] {
            for (std::uint32_t number = 0; number < batches; ++number) step(rank.net, optimizer, number, world);
          },
          {.step = [&] { optimizer.step(); }});
      return io::parameters_sha256(rank.net.module());
    });
  };
  const auto text = trained(false);
  REQUIRE(!text.empty());
  CHECK(trained(true) == text);
}

}  // namespace shared_parameters_test
