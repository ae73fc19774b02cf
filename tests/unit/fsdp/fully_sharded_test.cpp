// FullyShardedDataParallel gives the numbers of DistributedDataParallel, with 1/n of the memory.
#include <chorus/core/trace.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/muon.hpp>
#include <unit/comm/nccl_carrier.hpp>
#include <unit/fsdp/fsdp.hpp>

#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif

namespace fully_sharded_test {

using namespace test::names;
using test::apart, test::numbers_in, test::EachLayer, test::Extras, test::fully_sharded, test::FullySharded, test::one_device;
using Sgd = optim::Sgd<Cpu>;
using AdamW = optim::AdamW<Cpu>;
const optim::SgdOptions sgd{.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01};
const optim::AdamOptions adam{.lr = 0.02, .weight_decay = 0.01};

/// A block that is used twice, with another one in between.
template <class D>
struct Reused : nn::Module {
  nn::Linear<D, double> in{5, 6}, twice{6, 6}, between{6, 6}, out{6, 3};
  CHORUS_MODULE(Reused, in, twice, between, out)
  auto forward(const auto& x) const { return out(tanh(twice(tanh(between(tanh(twice(tanh(in(x))))))))); }
};
/// Layers are listed in another order than they are used.
template <class D>
struct Scrambled : nn::Module {
  nn::Linear<D, double> out{6, 3}, second{6, 6}, first{5, 6}, third{6, 6};
  CHORUS_MODULE(Scrambled, out, second, first, third)
  auto forward(const auto& x) const { return out(tanh(third(tanh(second(tanh(first(x))))))); }
};
/// Two layers share a weight.
template <class D>
struct Tied : nn::Module {
  nn::Linear<D, double> first{5, 5}, middle{5, 5}, last{5, 5}, out{5, 3};
  Tied() { last.weight = first.weight; }
  CHORUS_MODULE(Tied, first, middle, last, out)
  auto forward(const auto& x) const { return out(tanh(last(tanh(middle(tanh(first(x))))))); }
};
/// Backward recomputes two layers.
template <class D>
struct Checkpointed : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 6}, fc3{6, 6}, fc4{6, 3};
  nn::Dropout dropout{0.3};
  CHORUS_MODULE(Checkpointed, fc1, fc2, fc3, fc4, dropout)
  auto forward(const auto& x) const {
    const auto inner = [this](const auto& h) { return tanh(fc3(dropout(tanh(fc2(h))))); };
    return fc4(checkpoint(inner, tanh(fc1(x))));
  }
};
/// Parameters in layers of many kinds, one too small to be cut.
template <class D>
struct Mixed : nn::Module {
  nn::Linear<D, double> fc1{5, 16};
  nn::LayerNorm<D, double> norm{16};
  Parameter<double, 1, D> scale{Tensor<double, 1, D>::full({1}, 0.7)};
  nn::Linear<D, double> fc2{16, 3};
  CHORUS_MODULE(Mixed, fc1, norm, scale, fc2)
  auto forward(const auto& x) const { return fc2(tanh(norm(fc1(x))) * scale); }
};

template <class Model>
void check_same(int ranks, const Extras<Model>& extras = {}) {
  INFO(ranks << " ranks");
  CHECK(apart(fully_sharded<Model, AdamW>(ranks, adam, extras), one_device<Model, AdamW>(adam, extras)) < 1e-9);
}

TEST_CASE("fsdp: train_parity: the bits of DistributedDataParallel with ReduceScatter and a ShardedOptimizer") {
  using Model = test::Dropping<Cpu>;
  for (const int ranks : {2, 3, 4}) {
    INFO(ranks << " ranks");
    CHECK(fully_sharded<Model, AdamW, test::EachParameter>(ranks, adam) ==
          test::sharded_optimizer<Model, AdamW>(ranks, adam, 0));
    CHECK(fully_sharded<Model, Sgd, ByBytes<>>(ranks, sgd, {.no_sync = true}) ==
          test::sharded_optimizer<Model, Sgd>(ranks, sgd, 1, {.no_sync = true}));
    check_same<Model>(ranks);
  }
}

const optim::MuonOptions muon{.lr = 0.05, .adam = {.lr = 0.02}};

/// Bits of a ShardedOptimizer with the same pieces, and one device's steps.
template <class Opt>
void check_by_wholes(const typename Opt::options_type& options) {
  using Model = Mixed<Cpu>;
  const auto alone = one_device<Model, Opt>(options, {.batch = 16, .steps = 5});
  for (const int ranks : {2, 3, 8}) {
    INFO(ranks << " ranks");
    const auto sharded = fully_sharded<Model, Opt, test::EachParameter>(ranks, options, {.batch = 16, .steps = 5});
    CHECK(apart(sharded, alone) < 1e-9);
    CHECK(sharded == test::sharded_optimizer<Model, Opt>(ranks, options, 0, {.batch = 16, .steps = 5}));
  }
}
TEST_CASE("fsdp: LARS, LAMB and Muon: the bits of a ShardedOptimizer, and one device's steps") {
  check_by_wholes<optim::Lars<Cpu>>({.lr = 0.5, .weight_decay = 0.1, .trust = 0.1});
  check_by_wholes<optim::Lamb<Cpu>>({.lr = 0.05});
  check_by_wholes<optim::Muon<Cpu>>(muon);
}

// Of 5 x 16 and 16 x 3 numbers, the owner lacks three quarters, which come and go in 2 bytes each.
TEST_CASE("fsdp: for a step of Muon all but an owner's pieces move twice, in bf16; for LAMB two sums a parameter") {
  const auto sent = common_text(4, [](const World& world) {
    FullySharded<Mixed<Cpu>, test::EachParameter> rank(world);
    optim::Muon<Cpu> by_owners{rank.net.parameters(), muon};
    optim::Lamb<Cpu> by_norms{rank.net.parameters()};
    std::string text;
    const auto bytes = [&](auto& optimizer, trace::Traffic kind) {
      sum(rank.net(test::share(numbers(8, 5, 1), world))).backward();
      optimizer.step();  // the first one learns who has what
      trace::reset_traffic();
      optimizer.step();
      auto of_all = static_cast<double>(trace::bytes_sent(world.rank, kind));
      rank.net.sum({&of_all, 1});
      text += cat(of_all, " ");
    };
    bytes(by_owners, trace::Traffic::gradients);
    bytes(by_norms, trace::Traffic::gradients);
    return text;
  });
  CHECK(sent == cat(2 * 2 * 3 * (80 + 48) / 4, " 0 "));
}

TEST_CASE("fsdp: one rank sends nothing, and 8 ranks have parts of units that are smaller than they are many") {
  CHECK(fully_sharded<test::Dropping<Cpu>, AdamW>(1, adam) == one_device<test::Dropping<Cpu>, AdamW>(adam));
  check_same<Mixed<Cpu>>(8, {.batch = 16, .steps = 5});
}

TEST_CASE("fsdp: layers that are reused, listed in another order, tied, or computed again by a checkpoint") {
  for (const int ranks : {2, 3}) {
    check_same<Reused<Cpu>>(ranks);
    check_same<Scrambled<Cpu>>(ranks);
    check_same<Tied<Cpu>>(ranks);
    check_same<Checkpointed<Cpu>>(ranks);
  }
}

TEST_CASE("fsdp: gradient_accumulation: under no_sync, and over passes that each average") {
  for (const int ranks : {2, 3}) {
    check_same<test::Dropping<Cpu>>(ranks, {.no_sync = true});
    check_same<test::Dropping<Cpu>>(ranks, {.adds_up = true});
    check_same<test::Dropping<Cpu>>(ranks, {.no_sync = true, .adds_up = true});
  }
}

TEST_CASE("fsdp: train_eval: passes without gradients come between") {
  check_same<test::Dropping<Cpu>>(3, {.evaluates = true});
  check_same<Scrambled<Cpu>>(2, {.evaluates = true, .batch = 1});  // one share is empty
}

TEST_CASE("fsdp: train_mixed_requires_grad: parameters that freeze and thaw, a part of a unit and a whole one") {
  const Extras<test::Smooth<Cpu>> extras{.before = [](auto& model, std::uint32_t step) {
    model.fc2.weight.set_requires_grad(step < 3 || step > 6);
    model.fc1.weight.set_requires_grad(step % 5 != 4);
    model.fc1.bias.set_requires_grad(step % 5 != 4);
  }};
  for (const int ranks : {2, 3}) check_same(ranks, extras);
}

TEST_CASE("fsdp: KeepParameters, and units by bytes and by module, change nothing") {
  const auto alone = one_device<Checkpointed<Cpu>, AdamW>(adam);
  CHECK(apart(fully_sharded<Checkpointed<Cpu>, AdamW, KeepParameters>(2, adam), alone) < 1e-9);
  CHECK(apart(fully_sharded<Checkpointed<Cpu>, AdamW, ByBytes<600>>(3, adam), alone) < 1e-9);
  CHECK(apart(fully_sharded<Checkpointed<Cpu>, AdamW, ByModule<nn::Linear<Cpu, double>>>(2, adam), alone) < 1e-9);
}

struct InFloat : nn::Module {
  nn::Linear<Cpu> fc1{5, 8}, fc2{8, 3};
  CHORUS_MODULE(InFloat, fc1, fc2)
  auto forward(const auto& x) const { return fc2(tanh(fc1(x))); }
};

TEST_CASE("fsdp: MixedPrecision computes in bf16, over parts in float") {
  const auto run = [](auto make_rank) {
    return common_text(2, [make_rank](const World& world) {
      auto rank = make_rank(world);
      optim::Sgd optimizer{rank->net.parameters(), optim::SgdOptions{.lr = 0.1}};
      std::string losses;
      for (std::uint32_t step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        const auto x = to<float>(test::share(numbers(6, 5, step), world));
        const auto loss = cross_entropy(rank->net(x), test::share(labels(6, 3, step), world));
        loss.backward();
        optimizer.step();
        losses += cat(loss.item(), " ");
      }
      return std::string(rank->net.devices() == 2 ? "" : "?") + cat(rank->net.mean(numbers_in(losses).back(), 3));
    });
  };
  using Model = nn::MixedPrecision<InFloat>;
  const auto make_model = [] {
    manual_seed(5);
    return Model();
  };
  const auto sharded = run([=](const World& world) {
    return std::make_unique<FullySharded<Model, EachLayer>>(world, FullyShardedDataParallelOptions{}, make_model());
  });
  const auto distributed = run([=](const World& world) {
    return std::make_unique<Distributed<Model>>(world, DistributedDataParallelOptions{}, make_model());
  });
  CHECK(!sharded.empty());
  CHECK(sharded == distributed);
}

TEST_CASE("fsdp: over TCP, gloo and NCCL's stand-in as over shared memory") {
  using Model = test::Dropping<Cpu>;
  const auto run = [](comm::Backend backend) {
    return common_text(3, [backend](const World& world) {
      FullySharded<Model, EachLayer> rank(world, {}, make<Model>(), {.backend = backend});
      AdamW optimizer{rank.net.parameters(), adam};
      auto text = test::losses<Model>(rank.net, optimizer, world, {.steps = 5});
      const auto whole = rank.net.gathered();
      return text + test::text_of(test::values(rank.net.module()));
    });
  };
  const auto over_tcp = run(comm::Backend::tcp);
  CHECK(!over_tcp.empty());
  CHECK(apart(over_tcp, run(comm::Backend::shm)) < 1e-9);
  test::NcclCarrier::register_it(/*host_computes=*/true);
  const auto over_nccl = run(comm::Backend::nccl);
  CHECK(!over_nccl.empty());
  CHECK(apart(over_nccl, over_tcp) < 1e-9);
#if CHORUS_USE_GLOO
  const auto over_gloo = run(comm::Backend::gloo);
  CHECK(!over_gloo.empty());
  CHECK(apart(over_gloo, over_tcp) < 1e-9);
#endif
}

/// Each rank skips a layer, a different one in each step.
template <class D>
struct Skipping : nn::Module {
  nn::Linear<D, double> in{5, 6}, even{6, 6}, odd{6, 6}, out{6, 3};
  std::function<int()> which = [] { return 0; };
  CHORUS_MODULE(Skipping, in, even, odd, out)
  auto forward(const auto& x) const {
    const auto h = tanh(in(x));
    return out(tanh(which() % 2 == 0 ? even(h) : odd(h)));
  }
};

TEST_CASE("fsdp: not_all_outputs_used: ranks that use different layers take part in each other's gathers") {
  const auto run = [](bool sharded) {
    return common_text(3, [sharded](const World& world) {
      int step = 0;
      auto model = test::make<Skipping<Cpu>>();
      model.which = [&step, rank = world.rank] { return step % 3 == 2 ? 0 : step + rank; };
      const auto train = [&](auto& net, auto optimizer) {
        for (; step < 12; ++step) {
          optimizer.zero_grad();
          const auto number = static_cast<std::uint32_t>(step);
          cross_entropy(net(test::share(numbers(6, 5, number), world)), test::share(labels(6, 3, number), world))
              .backward();
          optimizer.step();
        }
      };
      if (!sharded) {
        Distributed<Skipping<Cpu>> rank(world, {.find_unused_parameters = true}, std::move(model));
        train(rank.net, AdamW{rank.net.parameters(), adam});
        return test::text_of(test::values(rank.net.module()));
      }
      FullySharded<Skipping<Cpu>, EachLayer> rank(world, {.find_unused_parameters = true}, std::move(model));
      train(rank.net, AdamW{rank.net.parameters(), adam});
      const auto whole = rank.net.gathered();
      return test::text_of(test::values(rank.net.module()));
    });
  };
  CHECK(apart(run(true), run(false)) < 1e-9);
}

}  // namespace fully_sharded_test
