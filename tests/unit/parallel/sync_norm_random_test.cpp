// Nets with several SyncBatchNorms on randomly drawn programs, under DataParallel, DistributedDataParallel (also in two
// groups at the same time) and ParameterServer, compared with one device that has the whole batch; and programs in
// which one share's forward pass fails. CHORUS_RANDOM_SEEDS=17 runs another seed and shows its program; =1000-2000 runs
// all of them and shows how often each feature was drawn.
#include "sync_norm_random.hpp"

#include <unistd.h>

#include <catch.hpp>
#include <chorus/comm/split.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include "ranks.hpp"

namespace sync_norm_random_test {

using namespace test::names;
using comm::World;
using namespace test::random::sync_norm;
using test::Ranks, test::random::check_programs, test::random::Draw, test::random::has_ended, test::random::lines;

/// Rows of one share of a color, or of all its shares if `rank` is -1.
struct Rows {
  Index begin = 0, count = 0;
};
Rows rows_of(const Program& p, const Pass& pass, int color, int rank) {
  Rows rows;
  for (std::size_t r = 0; r < pass.rows.size(); ++r) {
    if (p.colors[r] != color || static_cast<int>(r) > rank) {
      if (p.colors[r] == color && rank < 0) rows.count += pass.rows[r];
    } else if (static_cast<int>(r) < rank) {
      rows.begin += pass.rows[r];
    } else {
      rows.count = pass.rows[r];
    }
  }
  return rows;
}

/// The final results: scores in evaluation, parameters, running statistics.
template <class Policy>
std::vector<double> train(Policy& net, const Program& p, int color, int rank, int way = 0) {
  test::random::nudge(net, way);
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}};
  auto& model = net.module();
  const auto peek = [&] {
    const NoGrad scope;
    net.eval();
    const auto scores = net(numbers(3, 5, 77), -1).value().to_vector();
    net.train();
    return scores;
  };
  for (std::size_t s = 0; s < p.steps.size(); ++s) {
    const auto& step = p.steps[s];
    test::random::freeze(model, step.frozen);
    optimizer.zero_grad();
    for (const Pass& pass : step.passes) {
      const auto whole = color + 2 * static_cast<int>(pass.key);  // each group has its own data
      const auto [begin, count] = rows_of(p, pass, color, rank);
      auto x = contiguous(numbers(begin + count, 5, static_cast<std::uint32_t>(whole)).slice(0, begin, begin + count));
      const auto y =
          contiguous(labels(begin + count, 3, static_cast<std::uint32_t>(whole)).slice(0, begin, begin + count));
      const bool fails = p.faulty >= 0 && p.faulty == rank && s + 1 == p.steps.size() && count > 0;
      if (fails) x(0, 0) = 3;
      const auto run = [&] {
        for (std::size_t i = 0; i < model.layers.size(); ++i) model.layers[i].train((step.evaluates >> i & 1) == 0);
        const auto loss = cross_entropy(net(x, p.fails), y);
        if (pass.again) loss.backward(true);
        loss.backward();
        net.train();
      };
      if (pass.peeks) peek();
      if constexpr (requires { net.no_sync(); }) {
        if (pass.quiet) {
          const auto quiet = net.no_sync();
          run();
          continue;
        }
      }
      run();
    }
    optimizer.step();
  }
  auto out = peek();
  net.eval();
  for (const double value : test::values(model)) out.push_back(value);
  for (const auto& named : nn::named_buffers<Cpu>(model))
    for (Index i = 0; i < named.buffer->count(); ++i)
      out.push_back(named.buffer->dtype() == DType::f64
                        ? static_cast<double*>(named.buffer->data())[i]
                        : static_cast<double>(static_cast<std::int64_t*>(named.buffer->data())[i]));
  return out;
}

std::string one_rank(const Program& p, const World& world) {
  const auto color = p.colors[static_cast<std::size_t>(world.rank)];
  const DistributedDataParallelOptions options{.bucket_cap_mb = p.small_buckets ? 3e-4 : 25,
                                               .static_graph = p.static_graph};
  auto all = comm::connect(world);
  if (p.kind == Kind::server) {
    ParameterServer<Net<Cpu>> net{p.model(), all, 3};
    return test::text_of(train(net, p, color, world.rank)) + "|";
  }
  auto group = p.kind == Kind::groups ? comm::connect(comm::split(all, world, color)) : comm::AnyCommunicator();
  DistributedDataParallel<Net<Cpu>> net{p.model(), p.kind == Kind::groups ? group : all, options, 3};
  return test::text_of(train(net, p, color, world.rank)) + "|";
}

/// The results of the ranks, or of all devices together.
std::vector<std::string> on_ranks(const Program& p) {
  const bool one_process = p.kind == Kind::data_parallel;
  return Ranks(one_process ? 1 : static_cast<int>(p.colors.size()),
               [&](const World& world) {
                 alarm(30);  // kills a rank that hangs
                 if (!one_process) return one_rank(p, world);
                 std::vector<int> ids(p.colors.size());
                 for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int>((i + p.seed) % 3);
                 DataParallel<Net<Cpu>> net{p.model(), {.device_ids = ids, .output_device = ids[0]}, 3};
                 return test::text_of(train(net, p, 0, -1)) + "|";
               })
      .texts();
}

/// What is wrong with a program's run, or "".
std::string judge(const Program& p) {
  const auto texts = on_ranks(p);
  for (int color = 0; color < 2; ++color) {
    const auto first = std::find(p.colors.begin(), p.colors.end(), color);
    if (first == p.colors.end()) continue;
    const auto alone = [&](int way) {
      SingleDevice<Net<Cpu>> net{p.model(), 3};
      return train(net, p, color, -1, way);
    };
    const auto& one = texts[static_cast<std::size_t>(first - p.colors.begin())];
    for (std::size_t r = 0; r < texts.size(); ++r)
      if (p.colors[r] == color && (texts[r] != one || !has_ended(one)))
        return "the ranks end differently:" + lines(texts);
    if (const auto wrong = test::random::difference(test::numbers_in(one), alone(0), width, alone); !wrong.empty())
      return cat("group ", color, ": ", wrong);
  }
  return "";
}

TEST_CASE("sync batch norm random: programs that seeds draw train as one device does") {
  check_programs(80, draw, judge);
}

TEST_CASE("sync batch norm random: where one share fails, all ranks say so soon") {
  test::for_seeds(
      25,
      [&](std::uint64_t seed) {
        auto p = draw(seed);
        if (p.kind == Kind::data_parallel) return;
        Draw d(seed + 77);
        p.faulty = static_cast<int>(d.below(static_cast<std::uint32_t>(p.colors.size())));
        p.fails = static_cast<int>(d.below(static_cast<std::uint32_t>(p.layers.size())));
        p.steps.back().passes[0].rows[static_cast<std::size_t>(p.faulty)] += 1;
        const auto start = comm::Clock::now();
        const auto texts = on_ranks(p);
        INFO(p.text() << lines(texts));
        const auto color = p.colors[static_cast<std::size_t>(p.faulty)];
        for (std::size_t r = 0; r < texts.size(); ++r) {
          if (static_cast<int>(r) == p.faulty)
            CHECK(texts[r] == "a two is too much");
          else if (p.colors[r] == color)
            CHECK((texts[r].find("rank ") != std::string::npos && texts[r].find("ended with") == std::string::npos));
          else
            CHECK(has_ended(texts[r]));
        }
        CHECK(comm::Clock::now() - start < 5s);
      },
      [](std::uint64_t seed) { return draw(seed).text(); });
}

}  // namespace sync_norm_random_test
