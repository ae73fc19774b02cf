// Steps of meshes without numbers: of one axis they are exactly those of its policy, and what goes along several is
// what the formulas of each say.
#include <catch.hpp>
#include <chorus/simulate/meshed.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <numeric>

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

}  // namespace simulated_mesh_test
