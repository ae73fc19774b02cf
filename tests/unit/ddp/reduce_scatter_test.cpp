// Gradients averaged in parts, and the optimizer that steps them.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <limits>

#include <unit/parallel/ranks.hpp>

namespace reduce_scatter_test {

using namespace test::names;
using Sgd = optim::Sgd<Cpu>;
using Adam = optim::Adam<Cpu>;
using Model = test::Smooth<Cpu>;
const optim::SgdOptions sgd{.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01};
const optim::AdamOptions adam{.lr = 0.05, .amsgrad = true};
const DistributedDataParallelOptions every_parameter{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0};

/// Actions before and after backward in step `number`, on nets and their optimizers.
struct Extras {
  double clip = 0;
  bool freezes = false;     // fc1 is frozen in steps 2 and 3
  bool two_passes = false;  // gradients of two batches accumulate
};

template <class Net>
void freeze_or_thaw(Net& net, const Extras& extras, std::uint32_t number) {
  if (!extras.freezes) return;
  net.module().fc1.weight.set_requires_grad(number < 2 || number > 3);
  net.module().fc1.bias.set_requires_grad(number < 2 || number > 3);
}

/// Parameters after some steps on one device with the plain optimizer, and the norms before clipping.
template <class Opt>
std::vector<double> plain(const typename Opt::options_type& options, const Extras& extras = {}) {
  SingleDevice<Model> net{make<Model>(), 3};
  Opt optimizer{net.parameters(), options};
  std::vector<double> norms;
  for (std::uint32_t number = 0; number < 6; ++number) {
    freeze_or_thaw(net, extras, number);
    optimizer.zero_grad();
    if (extras.two_passes) cross_entropy(net(numbers(7, 5, number + 9)), labels(7, 3, number)).backward();
    cross_entropy(net(numbers(7, 5, number)), labels(7, 3, number)).backward();
    if (extras.clip > 0) norms.push_back(optim::clip_grad_norm(net.parameters(), extras.clip));
    optimizer.step();
  }
  auto all = test::values(net.module());
  all.insert(all.end(), norms.begin(), norms.end());
  return all;
}

/// The same on ranks; each steps its part.
template <class Opt, class Hook = ReduceScatter>
std::vector<double> sharded(int ranks, const typename Opt::options_type& options,
                            const DistributedDataParallelOptions& net_options = {}, const Extras& extras = {}) {
  return test::numbers_in(common_text(ranks, [=](const World& world) {
    Distributed<Model, Hook> rank(world, net_options);
    auto& net = rank.net;
    ShardedOptimizer<Opt> optimizer{net, options};
    std::string norms;
    const auto backward = [&](std::uint32_t images, std::uint32_t number) {
      cross_entropy(net(test::share(numbers(7, 5, images), world)), test::share(labels(7, 3, number), world))
          .backward();
    };
    for (std::uint32_t number = 0; number < 6; ++number) {
      freeze_or_thaw(net, extras, number);
      optimizer.zero_grad();
      if (extras.two_passes) {
        const auto quiet = net.no_sync();
        backward(number + 9, number);
      }
      backward(number, number);
      if (extras.clip > 0) norms += cat(optimizer.clip_grad_norm(extras.clip), " ");
      optimizer.step();
    }
    return test::text_of(test::values(net.module())) + norms;
  }));
}

TEST_CASE("reduce-scatter: the steps are those of the plain optimizer, in one bucket or many") {
  // 111 numbers: parts of 3 ranks are even, those of 2 and 4 are not; nor are shares of 7 samples.
  for (const int ranks : {1, 2, 3, 4})
    for (const auto& options :
         {DistributedDataParallelOptions{}, every_parameter, DistributedDataParallelOptions{.static_graph = true},
          DistributedDataParallelOptions{.find_unused_parameters = true}}) {
      INFO(ranks << " ranks, " << options.describe<Cpu>());
      CHECK(distance(sharded<Sgd>(ranks, sgd, options), plain<Sgd>(sgd)) < rounding);
      CHECK(distance(sharded<Adam>(ranks, adam, options), plain<Adam>(adam)) < rounding);
    }
}

TEST_CASE("reduce-scatter: passes under no_sync add up, and clipping takes all ranks' norm") {
  const Extras extras{.clip = 0.2, .two_passes = true};
  for (const int ranks : {1, 2, 3}) {
    CHECK(distance(sharded<Sgd>(ranks, sgd, {}, extras), plain<Sgd>(sgd, extras)) < rounding);
    CHECK(distance(sharded<Sgd, AllReduce>(ranks, sgd, {}, extras), plain<Sgd>(sgd, extras)) < rounding);
  }
}

TEST_CASE("sharded optimizer: parameters that rest for a while keep their state") {
  const Extras extras{.freezes = true};
  for (const auto& options : {DistributedDataParallelOptions{}, every_parameter}) {
    CHECK(distance(sharded<Adam>(3, adam, options, extras), plain<Adam>(adam, extras)) < rounding);
    CHECK(distance(sharded<Adam, AllReduce>(2, adam, options, extras), plain<Adam>(adam, extras)) < rounding);
  }
}

TEST_CASE("reduce-scatter: a step sends what an all-reduce alone does") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<Model, ReduceScatter> rank(world);
    ShardedOptimizer<Adam> optimizer{rank.net, {.lr = 0.1}};
    std::string sent;
    const auto gradients = [&] { return trace::bytes_sent(world.rank, trace::Traffic::gradients) / 8; };
    for (int step = 0; step < 2; ++step) {
      trace::reset_traffic();
      sum(rank.net(test::share(numbers(8, 5, 1), world))).backward();
      const auto in_backward = gradients();
      optimizer.step();
      sent += cat(in_backward, " + ", gradients() - in_backward, ", ",
                  trace::bytes_sent(world.rank, trace::Traffic::parameters) / 8, "; ");
    }
    return sent;
  });
  // The first pass computes whole averages.
  CHECK(text == "148 + 0, 74; 74 + 0, 74; ");
}

TEST_CASE("reduce-scatter: nobody sees gradients that are not whole, and none is lost without a word") {
  comm::AnyCommunicator alone;
  DistributedDataParallel<Model, ReduceScatter> net{make<Model>(), alone};
  const auto backward = [&] { sum(net(numbers(8, 5, 1))).backward(); };
  const auto seen = [&] {
    int found = 0;
    for (const auto& named : net.parameters()) found += named.parameter->grad_arrived();
    return found;
  };
  backward();
  CHECK(seen() == 0);
  const auto in_parts = Contains("': it is sharded");
  CHECK_THAT(message_of<UsageError>([&] { net.clip_grad_norm(1); }), in_parts);
  CHECK_THAT(message_of<UsageError>([&] { net.module().fc1.weight.grad(); }), in_parts);
  Sgd unaware{net.parameters(), sgd};
  CHECK_THAT(message_of<UsageError>([&] { unaware.step(); }), in_parts);
  CHECK_THAT(message_of<UsageError>(backward), Contains("before the ShardedOptimizer has used"));
}

TEST_CASE("reduce-scatter: passes that come before the step, and frozen parameters, are refused") {
  comm::AnyCommunicator alone;
  DistributedDataParallel<Model, ReduceScatter> net{make<Model>(), alone};
  ShardedOptimizer<Sgd> optimizer{net, sgd};
  const auto backward = [&] { sum(net(numbers(8, 5, 1))).backward(); };
  backward();
  {
    const auto quiet = net.no_sync();
    CHECK_THAT(message_of<UsageError>(backward), Contains("run several passes for one step under no_sync"));
  }
  net.module().fc1.weight.set_requires_grad(false);
  CHECK_THAT(message_of<UsageError>(backward), Contains("can't be frozen"));
  optimizer.zero_grad();
  backward();
  optimizer.step();
  CHECK_THAT(message_of<UsageError>([&] { FusedOptimizer<Sgd> fused(net, sgd); }), Contains("whole averages"));
  CHECK_THAT(message_of<UsageError>([&] { optimizer.clip_grad_norm(0); }), Contains("must be positive"));
}

TEST_CASE(
    "reduce-scatter: clipping gradients that are not finite is the same on all ranks, or an error with the name") {
  const auto clipped = [](bool strict) {
    return common_text(3, [strict](const World& world) {
      Distributed<Model, ReduceScatter> rank(world);
      ShardedOptimizer<Sgd> optimizer{rank.net, sgd};
      const double factor = world.rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
      (sum(rank.net(test::share(numbers(8, 5, 1), world))) * factor).backward();
      if (strict)
        return message_of<NonFiniteError>([&] { optimizer.clip_grad_norm(1, {.error_if_nonfinite = true}); });
      optimizer.clip_grad_norm(1);
      optimizer.step();
      std::string out;
      for (const double number : test::values(rank.net.module())) out += std::isnan(number) ? "n" : "f";
      return out;
    });
  };
  CHECK_THAT(clipped(true), Contains("expected a finite norm of the gradients, got ") && Contains(" belongs to fc"));
  CHECK(clipped(false) == std::string(111, 'n'));
}

TEST_CASE("reduce-scatter: a gradient that is not finite is everybody's, whoever's part it lies in") {
  for (const auto policy : {NonFinite::skip_step, NonFinite::throw_error}) {
    const auto text = common_text(3, [policy](const World& world) {
      Distributed<Model, ReduceScatter> rank(world, {.non_finite = policy});
      ShardedOptimizer<Sgd> optimizer{rank.net, sgd};
      const auto step = [&](bool bad) {
        optimizer.zero_grad();
        const double factor = bad && world.rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
        (sum(rank.net(test::share(numbers(8, 5, 1), world))) * factor).backward();
        optimizer.step();
      };
      step(false);
      const auto before = test::values(rank.net.module());
      try {
        step(true);
      } catch (const NonFiniteError& error) {
        return std::string(error.what());
      }
      const bool same = test::values(rank.net.module()) == before;
      step(false);
      return cat(same, " ", test::values(rank.net.module()) == before, " ", rank.net.skipped_steps());
    });
    if (policy == NonFinite::skip_step)
      CHECK(text == "true false 1");
    else
      CHECK_THAT(text, Contains("not finite") && Contains("on rank 1"));
  }
}

TEST_CASE("reduce-scatter: ranks with fewer batches step with the others") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<Model, ReduceScatter> rank(world);
    ShardedOptimizer<Sgd> optimizer{rank.net, sgd};
    rank.net.join(
        [&] {
          for (std::uint32_t number = 0; number < 2 + static_cast<std::uint32_t>(world.rank); ++number) {
            optimizer.zero_grad();
            cross_entropy(rank.net(numbers(4, 5, number + 10 * static_cast<std::uint32_t>(world.rank))),
                          labels(4, 3, number))
                .backward();
            optimizer.step();
          }
        },
        {.step = [&] { optimizer.step(); }});
    return test::text_of(test::values(rank.net.module()));
  });
  SingleDevice<Model> net{make<Model>(), 3};
  Sgd optimizer{net.parameters(), sgd};
  for (std::uint32_t number = 0; number < 4; ++number) {
    optimizer.zero_grad();
    const auto first = number < 2 ? 0u : number - 1, ranks = 3 - first;
    for (auto rank = first; rank < 3; ++rank)
      (cross_entropy(net(numbers(4, 5, number + 10 * rank)), labels(4, 3, number)) * (1.0 / ranks)).backward();
    optimizer.step();
  }
  CHECK(distance(test::numbers_in(text), test::values(net.module())) < rounding);
}

}  // namespace reduce_scatter_test
