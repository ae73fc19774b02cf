// ParameterServer, LocalSgd and PostLocalSgd on random programs, compared with an equivalent on one device; and on
// programs in which one rank fails. Other seeds: CHORUS_RANDOM_SEEDS=17 (one, whose program is printed), or =1000-2000
// (all of them, and how often each feature was drawn).
#include "random.hpp"

#include <unistd.h>

#include <catch.hpp>

#include <unit/parallel/check_programs.hpp>
#include <unit/parallel/ranks.hpp>

namespace averaging_random_test {

using namespace test::names;
using namespace test::random;
using namespace test::random::averaging;

/// The result of `net` on one rank.
template <class Opt, class Net>
std::string run(const Averaging& a, Net& net, const World& world, const typename Opt::options_type& options) {
  const Program& p = a.program;
  const auto rank = static_cast<std::size_t>(world.rank);
  Opt optimizer{net.parameters(), options};
  std::optional<optim::GradScaler<Cpu>> scaler;
  if (p.asks)
    scaler.emplace(net, scaling);
  else
    scaler.emplace(net.parameters(), scaling);
  for (std::size_t s = 0; s < p.steps.size(); ++s) {
    const Step& step = p.steps[s];
    const bool fails = world.rank == a.faulty_rank && static_cast<int>(s) == a.faulty_step;
    if (a.before[s] == Before::synchronise) {
      if constexpr (requires { net.synchronise(); }) net.synchronise();
    }
    if (a.before[s] == Before::evaluate || (a.before[s] == Before::synchronise && a.kind == Kind::post_local)) {
      net.eval();
      peek(net, step.passes[0]);
      net.train();
    }
    freeze(net.module(), step.frozen);
    optimizer.set_lr(options.lr * a.rates[s]);
    if (!step.keeps) optimizer.zero_grad();
    for (const Pass& pass : step.passes) {
      const bool last = &pass == &step.passes.back();
      auto part = part_of(pass, rank);
      if (last && step.poisoned == world.rank) part.side = INFINITY;
      if (fails && last && !a.fails_in_backward) fail<Error>("the program's own error");
      const NoSync quiet = pass.quiet_backward ? net.no_sync() : NoSync();
      auto loss = loss_of(net, pass, part);
      if (pass.peeks >> rank & 1) peek(net, pass);
      if (p.scaled) loss = scaler->scale(loss);
      if (fails && last)
        net.module().in.weight.register_hook([](const auto& g) {
          fail<Error>("the program's own error");
          return g;
        });
      if (pass.again) loss.backward(true);
      loss.backward();
    }
    const bool finite = !p.scaled || scaler->unscale();
    if (finite && p.clip > 0) optim::clip_grad_norm(net.parameters(), p.clip);
    if (p.scaled)
      scaler->step(optimizer);
    else
      optimizer.step();
  }
  net.eval();
  auto out = a.kind == Kind::server ? shared_values(net.module(), p, *scaler) : shared_values(net.module(), p);
  if (a.kind != Kind::server && p.asks) out.push_back(std::log2(scaler->loss_scale()));
  return test::text_of(out) + "|";
}

template <class Opt>
std::string one_rank(const Averaging& a, const World& world, const typename Opt::options_type& options) {
  auto communicator = comm::connect(world);
  auto model = model_of(a, world.rank == 0 ? 1 : 2);
  switch (a.kind) {
    case Kind::server: {
      ParameterServer<Drawn<Cpu>> net{std::move(model), communicator, 3};
      return run<Opt>(a, net, world, options);
    }
    case Kind::local: {
      LocalSgd<Drawn<Cpu>> net{std::move(model), communicator, {.period = a.period}, 3};
      return run<Opt>(a, net, world, options);
    }
    default: {
      DistributedDataParallel<Drawn<Cpu>, PostLocalSgd> net{
          std::move(model), communicator, a.program.options, 3, {.start_local_sgd_iter = a.start, .period = a.period}};
      return run<Opt>(a, net, world, options);
    }
  }
}
std::vector<std::string> on_ranks(const Averaging& a) {
  return Ranks(a.program.ranks,
               [&](const World& world) {
                 alarm(30);  // a rank that hangs is killed
                 if (a.program.adam) return one_rank<optim::Adam<Cpu>>(a, world, adam);
                 return one_rank<optim::Sgd<Cpu>>(a, world, sgd);
               })
      .texts();
}
template <class Opt>
std::vector<double> expected_of(const Averaging& a, const typename Opt::options_type& options, int way) {
  if (a.kind == Kind::server) return alone<Opt>(a.program, options, way);
  return AllRanks<Opt>(a, options, way).run();
}

/// What is wrong with a program's run, or "".
std::string judge(const Averaging& a) {
  const auto expected = [&](int way) {
    return a.program.adam ? expected_of<optim::Adam<Cpu>>(a, adam, way) : expected_of<optim::Sgd<Cpu>>(a, sgd, way);
  };
  const auto texts = on_ranks(a);
  if (const auto wrong = no_common_end(texts); !wrong.empty()) return wrong;
  return difference(test::numbers_in(texts[0].substr(0, texts[0].find('|'))), expected(0), a.program.width, expected);
}

TEST_CASE(
    "averaging random: programs that seeds draw end as what is written out does, with the same bits on all ranks") {
  check_programs(150, draw_averaging, judge);
}

TEST_CASE("averaging random: where one rank fails all end soon, and none crashes") {
  for_seeds(
      40,
      [&](std::uint64_t seed) {
        auto a = draw_averaging(seed);
        if (a.program.ranks == 1) return;
        Draw d(seed + 77);
        a.faulty_rank = static_cast<int>(d.below(static_cast<std::uint32_t>(a.program.ranks)));
        a.faulty_step = static_cast<int>(d.below(static_cast<std::uint32_t>(a.program.steps.size())));
        a.fails_in_backward = d.chance(50);
        a.program.steps[static_cast<std::size_t>(a.faulty_step)].frozen = 0;
        const auto start = comm::Clock::now();
        const auto texts = on_ranks(a);
        INFO(a.text() << lines(texts));
        for (const auto& text : texts)
          CHECK((!text.empty() && !has_ended(text) && text.find("ended with status") == std::string::npos));
        CHECK(comm::Clock::now() - start < 5s);
      },
      [](std::uint64_t seed) { return draw_averaging(seed).text(); });
}

}  // namespace averaging_random_test
