// Canonical shares where ranks have parts of the parameters: FullyShardedDataParallel, and Mesh along Data and Shard,
// train to the bits of one device.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/same_bits/mesh.hpp>

#include <unit/io/files.hpp>
#include <unit/message_of.hpp>

#include "canonical_programs.hpp"

namespace canonical_sharded_test {

using namespace test::names;
using namespace test::canonical;
using Catch::Matchers::Contains;
using Cut = SameBits<Model>;
using Units = ByBytes<1024>;  // several
using Sharded = FullyShardedDataParallel<Cut, Units>;
using InMesh = Mesh<Cut, mesh::Data<mesh::dynamic>, mesh::Shard<mesh::dynamic, Units>>;

/// Ranks: `data` groups of `shards`; 1 group is a FullyShardedDataParallel, but for `in_mesh`.
struct Way {
  int shards = 2, data = 1;
  bool in_mesh = false;
  comm::Backend backend = comm::Backend::automatic;
  int ranks() const { return shards * data; }
};

/// Calls `body(net)` with the net of one rank.
template <class Body>
std::string with_net(Model model, int shares, const Way& way, const World& world, bool find_unused, const Body& body) {
  alarm(60);  // kills a rank that hangs
  auto communicator = comm::connect(world, {.backend = way.backend});
  if (way.in_mesh) {
    InMesh net({std::move(model), shares}, communicator, world,
               {.sizes = {.data = way.data, .shard = way.shards}, .find_unused_parameters = find_unused}, 3);
    return body(net);
  }
  auto gathers = comm::connect(comm::split(communicator, world, 0), {.backend = way.backend});
  Sharded net({std::move(model), shares}, communicator, gathers, {.find_unused_parameters = find_unused}, 3);
  return body(net);
}
/// The common result of all ranks, or all results.
template <class Body>
std::string of_ranks(int ranks, const Body& body) {
  const auto texts = Ranks(ranks, body).texts();
  std::string lines;
  for (const auto& text : texts) lines += "\n  " + text.substr(0, 600);
  return std::count(texts.begin(), texts.end(), texts[0]) == ranks ? texts[0] : "ranks end differently:" + lines;
}
std::string result(const Program& program, const Way& way) {
  return of_ranks(way.ranks(), [&](const World& world) {
    auto model = model_of(program);
    freeze(model, program, program.frozen_first);
    return with_net(std::move(model), program.shares, way, world, program.has_side, [&](auto& net) {
      return test::canonical::Run(program, {program.shares, way.ranks(), world.rank}, Steps::whole, net)();
    });
  });
}
void check_same(const Program& program, const std::vector<Way>& ways) {
  INFO(program.text());
  const auto expected = result(program, Setup{});
  REQUIRE(expected.find('|') != expected.npos);
  for (const auto& way : ways) {
    INFO(way.data << " groups of " << way.shards << (way.in_mesh ? ", in a mesh" : ""));
    CHECK(difference(result(program, way), expected) == "");
  }
}
/// Steps of one pass each, on batches of these sizes.
std::vector<Step> steps(const std::vector<Index>& sizes) {
  std::vector<Step> out;
  for (const Index size : sizes)
    out.push_back({.passes = {{.key = static_cast<std::uint32_t>(out.size()), .size = size}}});
  return out;
}
const std::vector<Way> some{{.shards = 2}, {.shards = 3}, {.shards = 2, .data = 2, .in_mesh = true}};

TEST_CASE("canonical sharded: FullyShardedDataParallel has one device's bits on 1 to 8 ranks") {
  check_same({.shares = 8,
              .norm = true,
              .dropped = 0.3,
              .stepping = Stepping::adam,
              .clip = 0.3,
              .steps = steps({16, 11, 5})},
             {{.shards = 1}, {.shards = 2}, {.shards = 3}, {.shards = 4}, {.shards = 8},
              {.shards = 3, .backend = comm::Backend::tcp}});
}

TEST_CASE("canonical sharded: so has a mesh along Data and Shard") {
  check_same({.shares = 8, .norm = true, .dropped = 0.3, .stepping = Stepping::adam, .clip = 0.3, .steps = steps({16, 11, 5})},
             {{.shards = 2, .data = 2, .in_mesh = true}, {.shards = 3, .data = 2, .in_mesh = true},
              {.shards = 2, .data = 4, .in_mesh = true}, {.shards = 1, .data = 3, .in_mesh = true}});
}

TEST_CASE("canonical sharded: synchronised statistics, attention, losses of tokens, parts that are computed again") {
  check_same({.shares = 7, .synced = true, .attends = true, .dropped = 0.3, .rows_loss = true, .steps = steps({3, 1, 8})},
             some);
  check_same({.shares = 4, .norm = true, .dropped = 0.3, .recomputes = true, .steps = steps({8, 7, 5})}, some);
}

TEST_CASE("canonical sharded: layers that some shares use, layers frozen for a step, evaluation between steps") {
  check_same({.shares = 4, .has_side = true, .stepping = Stepping::adam, .steps = steps({8, 7, 2})}, some);
  Program program{.shares = 4, .norm = true, .frozen_first = 2, .steps = steps({8, 7, 5})};
  program.steps[1].frozen = 12;
  program.steps[1].evaluates = true;
  check_same(program, some);
}

TEST_CASE("canonical sharded: gradients that add up, and several passes of one run or through one graph") {
  Program program{.shares = 4, .dropped = 0.3, .clip = 0.3, .steps = steps({8, 7, 5})};
  program.steps[0].passes.push_back({.key = 50, .size = 6});
  program.steps[0].passes[0].quiet = true;
  program.steps[1].keeps = true;
  program.steps[1].passes[0].pair = true;
  program.steps[2].passes[0].again = true;
  check_same(program, some);
}

TEST_CASE("canonical sharded: a GradScaler leaves out the same steps; Muon gets whole matrices") {
  Program program{.shares = 4, .clip = 0.3, .scaled = true, .steps = steps({8, 7, 5})};
  program.steps[1].poisoned = true;
  check_same(program, some);
  check_same({.shares = 4, .stepping = Stepping::muon, .steps = steps({8, 7, 5})}, some);
}

TEST_CASE("canonical sharded: a ShardedOptimizer clips to the same norm, with whole averages or parts of them") {
  const Program program{.shares = 5, .norm = true, .clip = 0.3, .steps = steps({16, 11, 5})};
  const auto expected = result(program, Setup{});
  CHECK(difference(result(program, {.who = Who::ddp, .devices = 3, .bucket_mb = 1.0 / 1024, .steps = Steps::sharded}),
                   expected) == "");
  for (const int ranks : {2, 3}) {
    const auto got = of_ranks(ranks, [&](const World& world) {
      test::Distributed<Cut, ReduceScatter> rank(world, {.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 1e-3},
                                                 {model_of(program), program.shares});
      return test::canonical::Run(program, {program.shares, ranks, world.rank}, Steps::sharded, rank.net)();
    });
    CHECK(difference(got, expected) == "");
  }
}

TEST_CASE("canonical sharded: bytes of a step on 4 ranks, K of parameters, one share each") {
  const auto sent = [](const auto& with_net) {
    std::array<double, 2> of_ranks{};  // in units of K: gradients, parameters
    for (const auto& text : Ranks(4, [&](const World& world) {
           std::string numbers;
           with_net(world, [&](auto& net) {
             test::canonical::Run(Program{.shares = 4, .steps = steps({8})}, {4, 4, world.rank}, Steps::whole, net)();
             trace::reset_traffic();
             const Part part{4, 4, world.rank};
             const auto [scores, rows] = net(part(images(8, 1)), part(reshape(labels(32, 7, 1), Shape<2>{8, 4})));
             (cross_entropy(scores, part(labels(8, 3, 1))) + cross_entropy(rows, part(labels(8, 5, 1)))).backward();
             for (const auto kind : {trace::Traffic::gradients, trace::Traffic::parameters})
               numbers += cat(trace::bytes_sent(world.rank, kind), " ");
             return numbers;
           });
           std::size_t bytes = 0;
           Model model(8);
           for (const auto& named : nn::named_parameters<Cpu>(model)) bytes += named.parameter->size_bytes();
           return cat(numbers, bytes);
         }).texts()) {
      const auto numbers = test::numbers_in(text);
      of_ranks[0] += numbers[0] / numbers[2];
      of_ranks[1] += numbers[1] / numbers[2];
    }
    return of_ranks;
  };
  const auto sharded = sent([](const World& world, const auto& body) {
    with_net(Model(8), 4, {.shards = 4}, world, false, body);
  });
  CHECK(sharded[0] == Approx(3));                       // the tree's reduce-scatter
  CHECK(sharded[1] == Approx(2 * 3).epsilon(0.3));      // gathered in forward and in backward, but for the last unit
  const auto replicated = sent([](const World& world, const auto& body) {
    test::Distributed<Cut> rank(world, {}, {Model(8), 4});
    body(rank.net);
  });
  CHECK(replicated[0] == Approx(2 * 3).epsilon(0.1));  // and an all-gather
}

TEST_CASE("canonical sharded: what needs sums over pieces, or whole gradients, is refused by name") {
  const auto refusal = [](const auto& trained) {
    return of_ranks(2, [&](const World& world) -> std::string {
      const Program program{.shares = 2};
      return with_net(model_of(program), 2, {}, world, false, [&](auto& net) {
        return message_of<UsageError>([&] {
          const auto [scores, rows] = net(images(2, 1), reshape(labels(8, 7, 1), Shape<2>{2, 4}));
          trained(net, cross_entropy(scores, labels(2, 3, 1)) + cross_entropy(rows, labels(2, 5, 1)));
        });
      });
    });
  };
  CHECK_THAT(refusal([](auto& net, const auto& loss) {
               optim::Lamb optimizer{net.parameters(), {}};
               loss.backward();
               optimizer.step();
             }),
             Contains("Lamb: SameBits: ranks have pieces of parameters"));
  CHECK_THAT(refusal([](auto& net, const auto& loss) {
               net.module().head.bias.register_hook([](const auto& gradient) { return gradient; });
               loss.backward();
             }),
             Contains("SameBits: a hook on 'head.bias' needs the whole batch's gradient"));
}

TEST_CASE("canonical sharded: a plain net beside one with shares has the bits of its own norm, and takes Lamb") {
  const auto trained = [](bool beside) {
    return of_ranks(2, [&](const World& world) {
      test::Distributed<Model> rank(world, {}, model_of({}));
      std::optional<SingleDevice<Cut>> other;
      if (beside) other.emplace(Cut{model_of({}), 4});
      ShardedOptimizer<optim::Lamb<Cpu>> optimizer{rank.net, {}};
      std::string text;
      for (std::uint32_t key = 0; key < 3; ++key) {
        optimizer.zero_grad();
        const auto [scores, rows] = rank.net(images(2, key), reshape(labels(8, 7, key), Shape<2>{2, 4}));
        (cross_entropy(scores, labels(2, 3, key)) + cross_entropy(rows, labels(2, 5, key))).backward();
        text += digits(rank.net.clip_grad_norm(0.1)) + digits(optimizer.clip_grad_norm(0.05));
        optimizer.step();
      }
      return text + numbers_of(rank.net.module());
    });
  };
  const auto expected = trained(false);
  REQUIRE(expected.find("& ") != expected.npos);
  CHECK(trained(true) == expected);
}

TEST_CASE("canonical sharded: a checkpoint goes from one device to shards, and back") {
  const chorus_test::TemporaryFolder folder;
  const auto train = [&](auto& net, const Part& part, const std::string& from, int end, const std::string& to) {
    optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
    io::TrainingPosition position;
    if (!from.empty()) position = io::load_checkpoint(net, optimizer, from);
    for (auto number = static_cast<int>(position.step); number < end; ++number) {
      const auto key = static_cast<std::uint32_t>(number);
      optimizer.zero_grad();
      const auto [scores, rows] = net(part(images(9, key)), part(reshape(labels(36, 7, key), Shape<2>{9, 4})));
      (cross_entropy(scores, part(labels(9, 3, key))) + cross_entropy(rows, part(labels(9, 5, key)))).backward();
      optimizer.step();
    }
    if (!to.empty()) io::save_checkpoint(net, optimizer, {.step = end}, to);
    std::string numbers;
    net.gathered([&](auto& model) { numbers = numbers_of(model); });
    return numbers;
  };
  const auto single = [&](const std::string& from, int end, const std::string& to) {
    return of_ranks(1, [&](const World&) {
      SingleDevice<Cut> net({model_of({.norm = true}), 4}, 3);
      return train(net, {}, from, end, to);
    });
  };
  const auto sharded = [&](const Way& way, const std::string& from, int end, const std::string& to) {
    return of_ranks(way.ranks(), [&](const World& world) {
      return with_net(model_of({.norm = true}), 4, way, world, false, [&](auto& net) {
        return train(net, {4, way.ranks(), world.rank}, from, end, to);
      });
    });
  };
  const auto whole = single("", 3, "");
  single("", 1, folder / "one");
  CHECK(sharded({.shards = 3}, folder / "one", 2, folder / "three") != "");
  CHECK(sharded({.shards = 2, .data = 2, .in_mesh = true}, folder / "three", 3, "") == whole);
  CHECK(single(folder / "three", 3, "") == whole);
}

}  // namespace canonical_sharded_test
