// DistributedDataParallel::join: ranks with different numbers of batches.
#include <catch.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_join_test {

using namespace test::names;

/// The rows of rank `rank` in step `step`: rank r has `batches[r]` batches of 2 + r rows each.
Tensor<double, 2> rows(int rank, int step) {
  return numbers(2 + rank, 5, static_cast<std::uint32_t>(10 * step + rank));
}

template <class Net>
auto loss_of(Net& net, int rank, int step) {
  return cross_entropy(net(rows(rank, step)), labels(2 + rank, 3, static_cast<std::uint32_t>(step)));
}

/// Trains with `batches[rank]` batches on each rank; returns the parameters, equal on all ranks.
template <class Model>
std::string train_unevenly(const std::vector<int>& batches, const DistributedDataParallelOptions& options = {}) {
  return common_text(static_cast<int>(batches.size()), [=](const World& world) {
    Distributed<Model> rank(world, options);
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
    for (int epoch = 0; epoch < 2; ++epoch)
      rank.net.join([&] {
        for (int step = 0; step < batches[static_cast<std::size_t>(world.rank)]; ++step) {
          optimizer.zero_grad();
          loss_of(rank.net, world.rank, step).backward();
          optimizer.step();
        }
      });
    return test::text_of(test::values(rank.net.module()));
  });
}

/// One device that takes, in each step, the batches of the ranks that still have one.
template <class Model>
std::vector<double> train_alone(const std::vector<int>& batches, const optim::SgdOptions& options = {.lr = 0.3},
                                double clip = INFINITY) {
  SingleDevice<Model> net{make<Model>(), 3};
  optim::Sgd optimizer{net.parameters(), options};
  for (int epoch = 0; epoch < 2; ++epoch)
    for (int step = 0;; ++step) {
      Index samples = 0;
      for (std::size_t r = 0; r < batches.size(); ++r)
        if (step < batches[r]) samples += 2 + static_cast<int>(r);
      if (samples == 0) break;
      optimizer.zero_grad();
      for (int r = 0; r < static_cast<int>(batches.size()); ++r)
        if (step < batches[static_cast<std::size_t>(r)])
          (loss_of(net, r, step) * ((2.0 + r) / static_cast<double>(samples))).backward();
      optim::clip_grad_norm(net.parameters(), clip);
      optimizer.step();
    }
  return test::values(net.module());
}

TEST_CASE("join: uneven numbers of batches train as one device does with what is left") {
  for (const std::vector<int>& batches : {std::vector<int>{3, 1, 2}, {1, 4, 4}, {2, 2, 2}, {0, 3, 1}}) {
    INFO(test::text_of({batches.begin(), batches.end()}));
    const auto text = train_unevenly<test::Smooth<Cpu>>(batches);
    INFO(text);
    CHECK(distance(test::numbers_in(text), train_alone<test::Smooth<Cpu>>(batches)) < rounding);
  }
}

TEST_CASE("join: with many small buckets, unused parameters allowed, and a static graph") {
  const std::vector<int> batches{1, 3, 2};
  const auto expected = train_alone<test::Smooth<Cpu>>(batches);
  for (const auto& options : {DistributedDataParallelOptions{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0},
                              DistributedDataParallelOptions{.find_unused_parameters = true},
                              DistributedDataParallelOptions{.static_graph = true}})
    CHECK(distance(test::numbers_in(train_unevenly<test::Smooth<Cpu>>(batches, options)), expected) < rounding);
}

TEST_CASE("join: buffers come from a rank that still trains, and end the same on all") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Normed<Cpu>> rank(world);
    rank.net.join([&] {
      for (int step = 0; step < 1 + 2 * world.rank; ++step) loss_of(rank.net, world.rank, step).backward();
    });
    const auto& norm = rank.net.module().norm;
    return test::text_of(norm.running_mean.value().to_vector()) + cat(norm.num_batches_tracked.value().item());
  });
  REQUIRE_FALSE(text.empty());
  CHECK(test::numbers_in(text).back() == 5);  // rank 2's
}

/// Buffers after a join of 1, 3 and 5 batches and a pass with all ranks; equal on all ranks.
std::string buffers_after_join(bool broadcast) {
  return common_text(3, [&](const World& world) {
    Distributed<test::Normed<Cpu>> rank(world, {.broadcast_buffers = broadcast});
    const auto pass = [&](int key) {
      mean(square(rank.net(numbers(4, 5, static_cast<std::uint32_t>(key))))).backward();
    };
    rank.net.join([&] {
      for (int step = 0; step < 1 + 2 * world.rank; ++step) pass(step + 10 * world.rank);
    });
    const auto joined = rank.net.module().norm.running_mean.value().to_vector();
    pass(77);
    return test::text_of(joined);
  });
}

TEST_CASE("join: with broadcast_buffers all have those of one rank") {
  CHECK(test::numbers_in(buffers_after_join(true)).size() == 3);
}
TEST_CASE("join: without broadcast_buffers all take those of a rank that went on longest") {
  CHECK(test::numbers_in(buffers_after_join(false)).size() == 3);
}

TEST_CASE("join: accumulation under no_sync at each interval") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
    rank.net.join([&] {
      for (int step = 0; step < 2 + 2 * world.rank; ++step) {
        if (step % 2 == 0) {
          const auto quiet = rank.net.no_sync();
          loss_of(rank.net, world.rank, step).backward();
        } else {
          loss_of(rank.net, world.rank, step).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
      }
    });
    return test::text_of(test::values(rank.net.module()));
  });
  SingleDevice<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  for (int step = 0; step < 4; ++step) {
    if (step < 2) (loss_of(net, 0, step) * 0.4).backward();
    (loss_of(net, 1, step) * (step < 2 ? 0.6 : 1)).backward();
    if (step % 2 == 0) continue;
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(distance(test::numbers_in(text), test::values(net.module())) < rounding);
}

/// Trains like `train_alone` with momentum and clipping, over two epochs; returns the parameters, equal on all ranks.
template <class MakeOptimizer>
std::string train_with_state(const std::vector<int>& batches, const DistributedDataParallelOptions& options,
                             const MakeOptimizer& make_optimizer, bool in_company = true) {
  return common_text(static_cast<int>(batches.size()), [&](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, options);
    auto optimizer = make_optimizer(rank.net);
    const auto step = [&] {
      optim::clip_grad_norm(rank.net.parameters(), 0.2);
      optimizer->step();
    };
    for (int epoch = 0; epoch < 2; ++epoch)
      rank.net.join(
          [&] {
            for (int i = 0; i < batches[static_cast<std::size_t>(world.rank)]; ++i) {
              optimizer->zero_grad();
              loss_of(rank.net, world.rank, i).backward();
              step();
            }
          },
          {.step = in_company ? std::function<void()>(step) : nullptr});
    return test::text_of(test::values(rank.net.module()));
  });
}

TEST_CASE("join: ranks that have ended step with the others, so that an optimizer's state stays the same") {
  const std::vector<int> batches{1, 4, 0};
  const auto sgd = [](auto& net) {
    return std::make_unique<optim::Sgd<Cpu>>(net.parameters(), optim::SgdOptions{.lr = 0.3, .momentum = 0.9});
  };
  const auto sharded = [](auto& net) {
    return std::make_unique<ShardedOptimizer<optim::Sgd<Cpu>>>(net, optim::SgdOptions{.lr = 0.3, .momentum = 0.9});
  };
  const auto expected = train_alone<test::Smooth<Cpu>>(batches, {.lr = 0.3, .momentum = 0.9}, 0.2);
  for (const auto& options :
       {DistributedDataParallelOptions{}, DistributedDataParallelOptions{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0},
        DistributedDataParallelOptions{.find_unused_parameters = true},
        DistributedDataParallelOptions{.static_graph = true}}) {
    INFO(options.describe<Cpu>());
    for (const auto& text : {train_with_state(batches, options, sgd), train_with_state(batches, options, sharded)}) {
      INFO(text);
      CHECK(distance(test::numbers_in(text), expected) < rounding);
    }
  }
  // Without it, momenta diverge in the first epoch, and so do parameters in the second, until its end.
  const std::vector<int> others{1, 4, 2};
  const auto alone = train_alone<test::Smooth<Cpu>>(others, {.lr = 0.3, .momentum = 0.9}, 0.2);
  CHECK(distance(test::numbers_in(train_with_state(others, {}, sgd)), alone) < rounding);
  CHECK(distance(test::numbers_in(train_with_state(others, {}, sgd, false)), alone) > 1e-3);
}

TEST_CASE("join: a parameter that is each rank's own stays as it is when its rank has ended") {
  Ranks ranks(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, {.parameters_and_buffers_to_ignore = {"fc2.weight"}});
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
    std::vector<double> then;
    rank.net.join(
        [&] {
          for (int i = 0; i < 1 + 2 * world.rank; ++i) {
            optimizer.zero_grad();
            loss_of(rank.net, world.rank, i).backward();
            optimizer.step();
          }
          then = rank.net.module().fc2.weight.value().to_vector();
        },
        {.step = [&] { optimizer.step(); }});
    return cat(then == rank.net.module().fc2.weight.value().to_vector());
  });
  CHECK(ranks.texts() == std::vector<std::string>{"true", "true"});
}

TEST_CASE("join: throw_on_early_termination ends all ranks, with the one that ran out") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    return message_of<UsageError>([&] {
      rank.net.join(
          [&] {
            for (int step = 0; step < 3 - world.rank % 2; ++step) loss_of(rank.net, world.rank, step).backward();
          },
          {.throw_on_early_termination = true});
    });
  });
  CHECK(text ==
        "DistributedDataParallel::join: rank 1 has run out of batches; throw_on_early_termination ends all ranks");
}

TEST_CASE("join: a rank that has a thousand batches fewer than others says so, once") {
  const auto run = [](const World& world) {
    return test::with_stderr([&] {
      Distributed<test::Smooth<Cpu>> rank(world);
      rank.net.join([&] {
        for (int step = 0; step < (world.rank == 0 ? 1010 : 3); ++step) loss_of(rank.net, world.rank, step).backward();
      });
      return "";
    });
  };
  const auto texts = Ranks(2, run).texts();
  CHECK(texts[0].empty());
  CHECK(texts[1] ==
        "chorus: warning: DistributedDataParallel::join: rank 1 has at least 1000 batches fewer than others "
        "have, and only joins their collective calls\n");
}

TEST_CASE("join: gradients that are forgotten behind the step, not before the pass") {
  const std::vector<int> batches{3, 1, 2};
  const auto expected = train_alone<test::Smooth<Cpu>>(batches);
  for (const auto& options :
       {DistributedDataParallelOptions{}, DistributedDataParallelOptions{.find_unused_parameters = true},
        DistributedDataParallelOptions{.static_graph = true}})
    for (const bool in_company : {true, false}) {
      const auto text = common_text(3, [&](const World& world) {
        Distributed<test::Smooth<Cpu>> rank(world, options);
        optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3}};
        for (int epoch = 0; epoch < 2; ++epoch)
          rank.net.join(
              [&] {
                for (int i = 0; i < batches[static_cast<std::size_t>(world.rank)]; ++i) {
                  loss_of(rank.net, world.rank, i).backward();
                  optimizer.step();
                  optimizer.zero_grad();
                }
              },
              {.step = in_company ? std::function<void()>([&] { optimizer.step(); }) : nullptr});
        return test::text_of(test::values(rank.net.module()));
      });
      CHECK(distance(test::numbers_in(text), expected) < rounding);
    }
}

TEST_CASE("join: what a rank has added up under no_sync when it ends counts in the others' next average") {
  const auto loss_in = [](auto& net, int rank, int step) { return loss_of(net, rank, 2 * step + 1); };
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  (loss_in(single, 0, 0) * 0.4).backward();
  (loss_in(single, 1, 0) * 0.6).backward();
  loss_in(single, 0, 1).backward();
  for (const auto& options :
       {DistributedDataParallelOptions{}, DistributedDataParallelOptions{.find_unused_parameters = true},
        DistributedDataParallelOptions{.static_graph = true}}) {
    const auto texts = Ranks(2, [&](const World& world) {
                         Distributed<test::Smooth<Cpu>> rank(world, options);
                         std::string averaged;
                         rank.net.join([&] {
                           {
                             const auto quiet = rank.net.no_sync();
                             loss_in(rank.net, world.rank, 0).backward();
                           }
                           if (world.rank == 1) return;
                           loss_in(rank.net, 0, 1).backward();
                           averaged = test::text_of(test::gradients(rank.net.module()));
                         });
                         return averaged;
                       }).texts();
    CHECK(distance(test::numbers_in(texts[0]), test::gradients(single.module())) < rounding);
  }
}

TEST_CASE("join: afterwards all ranks have seen as many forward passes, of which masks of dropout depend") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    rank.net.join([&] {
      for (int step = 0; step < 1 + 2 * world.rank; ++step) loss_of(rank.net, world.rank, step).backward();
    });
    return cat(rank.net.forward_passes());
  });
  CHECK(text == "5");
}

TEST_CASE("join: a NaN that ends it leaves a net that averages as before") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, {.find_unused_parameters = true, .non_finite = NonFinite::throw_error});
    auto& net = rank.net;
    const auto pass = [&](double factor) {
      for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
      (loss_of(net, 1, 0) * factor).backward();
    };
    const auto why = message_of<NonFiniteError>([&] {
      net.join([&] {
        if (world.rank == 0) pass(NAN);
      });
    });
    pass(1);
    double size = 0;
    for (const double x : net.module().fc2.weight.grad().to_vector()) size += std::abs(x);
    return cat(why.empty() ? "no error" : "error", size > 0 ? ", averaged" : ", lost");
  });
  CHECK(text == "error, averaged");
}

TEST_CASE("join: what a body throws comes out, and a join inside a join is refused") {
  comm::AnyCommunicator alone;
  DistributedDataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), alone};
  CHECK(message_of<FileError>([&] { net.join([] { fail<FileError>("no such file"); }); }) == "no such file");
  CHECK_THAT(message_of<UsageError>([&] { net.join([&] { net.join([] {}); }); }), Contains("already inside join"));
  net.join([&] { loss_of(net, 0, 0).backward(); });
}

TEST_CASE("join: ranks whose epochs end unevenly without join end soon, all of them") {
  Ranks ranks(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world);
    for (int step = 0; step < 1 + world.rank; ++step) loss_of(rank.net, world.rank, step).backward();
    return std::string("done");
  });
  const auto start = comm::Clock::now();
  const auto texts = ranks.texts();
  CHECK(comm::Clock::now() - start < 5s);
  CHECK(texts[0] == "done");
  CHECK_THAT(texts[1], Contains("rank 0 has left the group"));
}

}  // namespace ddp_join_test
