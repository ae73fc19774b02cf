// Steps of meshes without numbers: of one axis they are exactly those of its policy, and what goes along several is
// what the formulas of each say.
#include <algorithm>
#include <catch.hpp>
#include <chorus/simulate/meshed.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <numeric>
#include <set>

#include "../message_of.hpp"

namespace simulated_mesh_test {

using namespace chorus;
using namespace chorus::simulated;
using namespace comm::simulated;
using Catch::Matchers::Contains;

constexpr double forward_time = 0.05, backward_time = 0.1, optimizer_time = 0.004;
constexpr std::size_t activation = 3 << 20;
constexpr int steps = 3;

MeshTraining mesh(const MeshAxes& axes, const char* model = "gpt2", int micro_batches = 4) {
  return {.axes = axes,
          .model = model_named(model),
          .forward = forward_time,
          .backward = backward_time,
          .optimizer = optimizer_time,
          .activation = activation,
          .schedule = OneForwardOneBackward::of(axes.pipe, micro_batches),
          .unit_cap = 32,
          .optimizer_slots = 2};
}
/// The same under a policy of one axis.
Training training(TrainingPolicy policy, const MeshTraining& of) {
  Training out{.policy = policy,
               .forward = forward_time,
               .backward = backward_time,
               .optimizer = optimizer_time,
               .keeps_parameters = of.keeps_parameters,
               .layers = of.model.layers,
               .activation = activation,
               .parameter_bytes = of.model.flat_bytes(),
               .optimizer_slots = 2};
  if (policy == TrainingPolicy::fully_sharded)
    out.units = unit_times(of.model, of.unit_cap, forward_time, backward_time);
  else
    out.buckets = bucket_times(of.model, of.caps, backward_time);
  return out;
}
SimulationOptions over(const char* links, int ranks) {
  return {.ranks = ranks, .links = links_named(links), .keep_spans = true};
}

std::size_t most_held(const RankTimes& rank) {
  std::size_t most = 0;
  for (const auto& held : rank.memory)
    most = std::max(most, std::accumulate(held.bytes.begin(), held.bytes.end(), std::size_t{0}));
  return most;
}
std::size_t sent_by(const RankTimes& rank) {
  std::size_t sum = 0;
  for (const auto& call : rank.calls)
    for (const auto& [to, bytes] : call.sent) sum += bytes;
  return sum;
}

/// Exactly: same times, to the last femtosecond, bytes and memory.
void check_same(const MeshTimes& found, const TrainingTimes& expected, std::size_t axis) {
  CHECK(found.step == expected.step);
  CHECK(found.exposed == expected.exposed);
  CHECK(found.axes[axis].exposed == Approx(expected.exposed));
  REQUIRE(found.times.ranks.size() == expected.times.ranks.size());
  double sent = 0;
  for (std::size_t rank = 0; rank < found.times.ranks.size(); ++rank) {
    const auto &own = found.times.ranks[rank], &other = expected.times.ranks[rank];
    CHECK(own.end == other.end);
    if (rank >= 64) continue;
    CHECK(sent_by(own) == sent_by(other));
    CHECK(own.calls.size() == other.calls.size());
    sent += static_cast<double>(sent_by(own)) / std::min<double>(64, static_cast<double>(found.times.ranks.size()));
    if (!other.memory.empty()) CHECK(found.held == most_held(other));
  }
  CHECK(found.axes[axis].bytes == Approx(sent / steps));
}

TEST_CASE("simulated mesh: of one axis it is exactly that axis' policy") {
  for (const auto* const links : {"25gbit", "nvlink", "nvlink8+25gbit"})
    for (const int ranks : {2, 4, 8, 32, 100}) {
      if (ranks > 8 && std::string_view(links).starts_with("nvlink8")) continue;  // see the next test
      INFO(links << ", " << ranks);
      const auto options = over(links, ranks);
      for (const auto* const model : {"gpt2", "resnet50"}) {
        const auto of = mesh({.data = ranks}, model);
        check_same(simulate_mesh(options, of, steps),
                   simulate_training(options, training(TrainingPolicy::ddp, of), steps), 1);
      }
      for (const bool keeps : {false, true}) {
        auto of = mesh({.shard = ranks});
        of.keeps_parameters = keeps;
        check_same(simulate_mesh(options, of, steps),
                   simulate_training(options, training(TrainingPolicy::fully_sharded, of), steps), 1);
      }
      const auto tensors = mesh({.tensor = ranks});
      check_same(simulate_mesh(options, tensors, steps),
                 simulate_training(options, training(TrainingPolicy::tensor_parallel, tensors), steps), 2);
    }
  for (const int stages : {2, 4, 12})
    for (const auto& schedule : {GPipe::of(stages, 8), OneForwardOneBackward::of(stages, 8),
                                 ZeroBubbleH1::of(stages, 8), Interleaved<2>::of(stages / 2, 8)}) {
      auto of = mesh({.pipe = schedule.size()});
      of.schedule = schedule;
      if (schedule.size() == 1) continue;
      const auto options = over("nvlink2+25gbit", schedule.size());
      check_same(simulate_mesh(options, of, steps),
                 simulate_pipeline(options, {schedule, forward_time, backward_time, optimizer_time, activation}, steps),
                 0);
    }
}

// There a call ends on some ranks before it ends on others, and the next one begins there: a mesh has it begin when the
// last one ends.
TEST_CASE("simulated mesh: of one axis over several islands it is nearly that axis' policy") {
  for (const int ranks : {16, 64}) {
    const auto options = over("nvlink8+25gbit", ranks);
    const auto of = mesh({.data = ranks});
    const auto shards = mesh({.shard = ranks});
    for (const auto& [found, expected] :
         {std::pair<TrainingTimes, TrainingTimes>(
              simulate_mesh(options, of, steps),
              simulate_training(options, training(TrainingPolicy::ddp, of), steps)),
          {simulate_mesh(options, shards, steps),
           simulate_training(options, training(TrainingPolicy::fully_sharded, shards), steps)}}) {
      CHECK(found.step == Approx(expected.step).epsilon(2e-3));
      CHECK(found.exposed == Approx(expected.exposed).epsilon(5e-3));
    }
  }
}

TEST_CASE("simulated mesh: each axis carries what its formula says") {
  constexpr int m = 4, layers = 12;
  for (const auto& [axes, shards] : {std::pair(MeshAxes{.pipe = 2, .data = 4, .tensor = 2}, false),
                                     {MeshAxes{.pipe = 3, .data = 2, .tensor = 4}, false},
                                     {MeshAxes{.data = 8, .tensor = 4}, false},
                                     {MeshAxes{.pipe = 2, .shard = 4, .tensor = 2}, true}}) {
    auto of = mesh(axes, "gpt2", m);
    // Numbers that everything divides: 12 layers of one parameter each.
    of.model = {.name = "even", .layers = layers, .of_layer = 1};
    for (int layer = 0; layer < layers; ++layer) of.model.add(96 * 1024, 0, 1);
    const double p = axes.pipe, d = axes.shares(), t = axes.tensor, rounds = axes.pipe > 1 ? m : 1;
    const double whole = static_cast<double>(of.model.count()) * 4;
    const auto found = simulate_mesh(over("nvlink", 1), of, steps);
    INFO("pipe " << p << ", batch " << d << ", tensor " << t);
    // Along pipe: each micro-batch from a stage to the next one and back.
    CHECK(found.axes[0].bytes == Approx(rounds * 2 * (p - 1) / p * activation));
    // Along data an all-reduce of a rank's gradients, along shard a gather and a reduce-scatter; and shares, by Bruck.
    const bool few = axes.shares() <= 3;
    const double control = few ? 120 * (d - 1) : 0;
    CHECK(found.axes[1].bytes == Approx(2 * (d - 1) / d * whole / p / t + control).margin(few ? 1e-6 : 4 * 120 * d));
    // Along tensor four sums a layer and micro-batch; and programs.
    CHECK(found.axes[2].bytes ==
          Approx(layers / p * 4 * rounds * 2 * (t - 1) / t * activation + 56 * (t - 1)).margin(4 * 56 * t));
    // A rank's parameters, gradients and Adam's numbers, each in a block of the allocator's; of shards its part,
    // and the others' of the parameters and gradients of the one unit.
    const double part = whole / p / t;
    CHECK(static_cast<double>(found.held) ==
          (shards ? 4 * part / d + 2 * (part - part / d) : 4.0 * static_cast<double>(size_class<64>(static_cast<std::size_t>(part)).bytes)));
    const double waits = found.axes[0].exposed + found.axes[1].exposed + found.axes[2].exposed;
    CHECK(waits == Approx(found.exposed));
    for (const auto& axis : found.axes) CHECK((axis.ranks == 1) == (axis.exposed == 0));
  }
}

TEST_CASE("simulated mesh: its times are made of those of its axes") {
  const auto links = "25gbit";
  // Where messages take no time, idle stages are all there is.
  SimulationOptions free;
  free.links.between = free.links.inside = {.alpha = 0, .bandwidth = 1e30};
  free.links.call = 0;
  const auto all = simulate_mesh(free, mesh({.pipe = 4, .data = 2, .tensor = 3}, "gpt2", 8), 1);
  CHECK(all.step == Approx((forward_time + backward_time) / 12 * 11 / 8 + optimizer_time / 12));
  // Gradients are averaged when a pipeline has ended: on all ranks of all stages at once.
  const auto alone = simulate_mesh(over(links, 1), mesh({.pipe = 2, .tensor = 2}), 1);
  const auto averaged = simulate_mesh(over(links, 1), mesh({.pipe = 2, .data = 4, .tensor = 2}), 1);
  CHECK(averaged.axes[2].exposed == Approx(alone.axes[2].exposed));
  CHECK(averaged.step > alone.step);
  CHECK(averaged.step <= alone.step + 2 * averaged.axes[1].exposed);
  // Without stages backward hides some of it.
  const auto flat = simulate_mesh(over(links, 1), mesh({.data = 4}), 1);
  const auto split = simulate_mesh(over(links, 1), mesh({.data = 4, .tensor = 2}), 1);
  CHECK(flat.axes[1].exposed > 0);
  CHECK(split.axes[1].exposed < flat.axes[1].exposed);  // half the gradients, and sums along tensor beside them
  // Neighbours along tensor share an island, the others don't.
  const auto near = simulate_mesh(over("nvlink2+25gbit", 1), mesh({.data = 4, .tensor = 2}), 1);
  CHECK(near.axes[2].exposed < split.axes[2].exposed / 10);
  CHECK(near.axes[1].bytes == Approx(split.axes[1].bytes));
}

TEST_CASE("simulated mesh: a trace tells each rank's neighbours on each axis") {
  auto options = over("nvlink", 1);
  options.all_reduce = comm::Algorithm::ring;
  const auto times = simulate_mesh(options, mesh({.pipe = 2, .data = 4, .tensor = 2}), 1).times;
  // Rank 13 is the second of the last pair of the second stage's four.
  std::map<std::string, std::set<int>> neighbours;
  for (const auto& call : times.ranks[13].calls)
    for (const auto& [to, bytes] : call.sent)
      if (call.traffic != trace::Traffic::control)
        neighbours[std::string(trace::name(call.traffic)) + (call.call.envelope.op == comm::Op::message ? "'" : "")]
            .insert(to);
  CHECK(neighbours["gradients"] == std::set{15});
  CHECK(neighbours["activations"] == std::set{12});
  CHECK(neighbours["activations'"] == std::set{5});
  const auto trace = parse_trace(trace_text(times, 64, "mesh", ""), "mesh.json");
  CHECK(trace.processes.size() == 16);
}

TEST_CASE("simulated mesh: micro-batches that one stage accumulates") {
  const auto step = [](MeshTraining of, int accumulated) {
    of.accumulated = accumulated;
    return simulate_mesh(over("25gbit", 1), of, 1);
  };
  // Data averages once, whatever the number of micro-batches, and only the last one's backward hides it.
  const auto once = step(mesh({.data = 4}), 1), often = step(mesh({.data = 4}), 4);
  CHECK(often.axes[1].bytes == once.axes[1].bytes);
  CHECK(often.step > once.step);
  CHECK(often.step < once.step + backward_time);
  CHECK(often.times.ranks[0].waited > once.times.ranks[0].waited);
  // Shard gathers and averages with each.
  const auto parts = step(mesh({.shard = 4}), 1), in_all = step(mesh({.shard = 4}), 4);
  CHECK(in_all.axes[1].bytes == Approx(4 * parts.axes[1].bytes).epsilon(1e-3));
  // Without messages only the work counts.
  CHECK(step(mesh({}), 4).step == Approx(forward_time + backward_time + optimizer_time));
}

TEST_CASE("simulated mesh: activations are held until backward, or computed again") {
  const auto step = [](MeshTraining of, bool recompute) {
    of.holds_activations = true;
    of.recompute = recompute;
    return simulate_mesh(over("nvlink", 1), of, 1);
  };
  const auto without = [](const MeshTraining& of) { return simulate_mesh(over("nvlink", 1), of, 1).held; };
  constexpr std::size_t layers = 12, whole = 16 * activation;  // that a layer keeps
  const auto one = mesh({.data = 2});
  CHECK(step(one, false).held - without(one) == layers * whole);
  CHECK(step(one, true).held - without(one) == layers * activation + whole);
  // Inputs are whole on each rank along tensor: 4 of 16.
  const auto cut = mesh({.tensor = 4});
  CHECK(step(cut, false).held - without(cut) == layers * 7 * activation);
  // Micro-batches one after another hold no more than one.
  auto accumulated = one;
  accumulated.accumulated = 4;
  CHECK(step(accumulated, false).held == step(one, false).held);
  // A stage keeps as many micro-batches as its schedule says.
  for (const auto& schedule : {GPipe::of(4, 8), OneForwardOneBackward::of(4, 8), Interleaved<2>::of(2, 8)}) {
    auto pipeline = mesh({.pipe = schedule.size()});
    pipeline.model = gpt_sizes("a", layers, 64, 64);
    pipeline.schedule = schedule;
    const auto kept = check_schedule(schedule).kept_inputs;
    const auto most = static_cast<std::size_t>(*std::max_element(kept.begin(), kept.end()));
    const auto of_stage = layers / static_cast<std::size_t>(schedule.stages) * whole;
    const auto times = step(pipeline, false);
    CHECK(times.held > most * of_stage);
    CHECK(times.held < most * of_stage + of_stage / 2);
    for (const auto& rank : times.times.ranks)
      CHECK(rank.memory.back().bytes[static_cast<std::size_t>(trace::Memory::activations)] == 0);
  }
  // Recomputing is a forward more in each backward, and its sums along tensor.
  CHECK(step(mesh({}), true).step == Approx(2 * forward_time + backward_time + optimizer_time));
  CHECK(step(cut, true).axes[2].bytes == Approx(1.5 * step(cut, false).axes[2].bytes).epsilon(1e-3));
}

TEST_CASE("simulated mesh: axes that make no sense") {
  const auto refused = [](const SimulationOptions& options, const MeshTraining& of) {
    return message_of<UsageError>([&] { simulate_mesh(options, of, 1); });
  };
  const SimulationOptions options;
  CHECK(refused(options, mesh({.pipe = 2, .data = 2, .tensor = 2})) == "nothing");
  CHECK_THAT(refused(options, mesh({.pipe = 5})), Contains("the 12 layers of gpt2 in 5 stages"));
  CHECK_THAT(refused(options, mesh({.tensor = 2}, "resnet50")), Contains("resnet50 is not a transformer"));
  CHECK_THAT(refused(options, mesh({.pipe = 64}, "vgg16")), Contains("one of them has no parameters"));
  CHECK_THAT(refused(options, mesh({.data = 2, .shard = 2})), Contains("data and shard together"));
  CHECK_THAT(refused(over("nvlink8+25gbit", 1), mesh({.data = 4, .tensor = 3})), Contains("on islands of 8"));
  CHECK_THAT(refused(over("nvlink8+25gbit:shared", 1), mesh({.data = 4})), Contains("without :shared"));
  CHECK_THAT(refused(options, mesh({.data = 65536, .tensor = 2})), Contains("131072 ranks, expected up to 65536"));
  CHECK_THAT(refused(options, mesh({.data = 0})), Contains("an axis of 0 ranks"));
  auto slow = options;
  slow.computing.stragglers = {{0, 2}};
  CHECK_THAT(refused(slow, mesh({.data = 4})), Contains("no stragglers"));
  auto again = mesh({.pipe = 2});
  again.recompute = true;
  again.schedule = ZeroBubbleH1::of(2, 4);
  CHECK_THAT(refused(options, again), Contains("a backward in two parts"));
  auto held = mesh({.data = 2}, "resnet50");
  held.holds_activations = true;
  CHECK_THAT(refused(options, held), Contains("what layers of resnet50 keep is not known"));
  auto accumulated = mesh({.pipe = 2});
  accumulated.accumulated = 2;
  CHECK_THAT(refused(options, accumulated), Contains("2 accumulated micro-batches in 2 stages"));
  auto other = mesh({.pipe = 2});
  other.schedule = GPipe::of(3, 4);
  CHECK_THAT(refused(options, other), Contains("a schedule of 3 ranks"));
}

}  // namespace simulated_mesh_test
