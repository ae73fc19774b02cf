#pragma once
/// What chorus-simulate does: simulates what was wished for, and prints tables of it.

#include <algorithm>
#include <charconv>
#include <chorus/core/atomic_file.hpp>
#include <chorus/simulate/meshed.hpp>
#include <chorus/simulate/pipelined.hpp>
#include <chorus/simulate/recorded.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chorus/simulate/training.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ch = chorus;
namespace sim = chorus::simulated;
namespace cs = chorus::comm::simulated;
using ch::comm::Algorithm;

/// Of `pipe=2,data=4,tensor=2`: axes that are left out have one rank.
inline sim::MeshAxes mesh_axes(std::string_view text) {
  sim::MeshAxes axes;
  std::map<std::string_view, int*> left = {
      {"pipe", &axes.pipe}, {"data", &axes.data}, {"shard", &axes.shard}, {"tensor", &axes.tensor}};
  for (auto rest = text; !rest.empty();) {
    const auto word = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), word.size() + 1));
    const auto equals = std::min(word.size(), word.find('=')), begin = std::min(word.size(), equals + 1);
    const auto axis = left.find(word.substr(0, equals));
    ch::check<ch::UsageError>(axis != left.end(), "--mesh ", ch::printable(text),
                              ": expected pipe, data or shard, and tensor, each once: pipe=2,data=4,tensor=2");
    const auto [end, error] = std::from_chars(word.data() + begin, word.data() + word.size(), *axis->second);
    ch::check<ch::UsageError>(error == std::errc() && end == word.data() + word.size() && *axis->second >= 1 &&
                                  *axis->second <= cs::most_scheduled_ranks,
                              "--mesh ", ch::printable(text), ": expected 1 to ", cs::most_scheduled_ranks,
                              " ranks for ", axis->first);
    left.erase(axis);
  }
  ch::check<ch::UsageError>(axes.count() <= cs::most_scheduled_ranks, "--mesh ", ch::printable(text), ": ",
                            axes.count(), " ranks, expected up to ", cs::most_scheduled_ranks);
  return axes;
}

struct Wishes {
  std::string model = "resnet50", policy = "ddp", all_reduce = "auto", recorded, trace, optimizer = "sgd";
  std::string schedule = "1f1b", mesh;
  std::optional<std::string> named_links;
  double efficiency = 1, compute = 100, bucket_cap = 25, first_bucket_cap = 1, unit_cap = 4, jitter = 0;
  std::optional<double> alpha, call;
  std::vector<std::string> stragglers;
  std::optional<int> named_ranks;
  int steps = 3, period = 8, fragments = 0, overlap = 0, batch = 32;
  std::optional<std::size_t> sample, output, activation;
  std::optional<int> micro_batches;
  std::uint64_t seed = 0;
  bool brief = false, trace_ring = false, nccl = false, keep_parameters = false;

  bool copies() const { return policy == sim::name(sim::TrainingPolicy::data_parallel); }
  bool sharded() const { return policy == sim::name(sim::TrainingPolicy::fully_sharded); }
  bool tensors() const { return policy == sim::name(sim::TrainingPolicy::tensor_parallel); }
  bool sequences() const { return policy == sim::name(sim::TrainingPolicy::sequence_parallel); }
  bool pipelined() const { return policy == "pp"; }
  bool meshed() const { return policy == "mesh"; }
  sim::MeshAxes axes() const { return meshed() ? mesh_axes(mesh) : sim::MeshAxes{}; }
  /// So many ranks have the same batch.
  int sharing_batch(int ranks) const {
    return meshed() ? std::min(ranks, axes().pipe * axes().tensor) : tensors() || sequences() || pipelined() ? ranks : 1;
  }
  bool shares_batch() const { return tensors() || sequences() || pipelined() || meshed(); }
  int ranks() const {
    return named_ranks.value_or(meshed() ? axes().ranks() : copies() || shares_batch() ? 4 : 64);
  }
  int micro_batches_of(int stages) const { return micro_batches.value_or(std::min(4 * stages, batch)); }
  std::string links() const { return named_links.value_or(copies() ? "pcie" : "25gbit"); }
};

inline std::pair<int, double> straggler_in(const std::string& word) {
  int rank = 0, end = 0;
  double factor = 0;
  const bool is = std::sscanf(word.c_str(), "%d:%lf%n", &rank, &factor, &end) == 2 &&
                  static_cast<std::size_t>(end) == word.size() && std::isfinite(factor);
  ch::check<ch::UsageError>(is, "--straggler ", ch::printable(word), ": expected RANK:FACTOR, as 3:1.5");
  return {rank, factor};
}

inline ch::Schedule schedule_in(const std::string& word, int ranks, int micro_batches) {
  if (word == ch::GPipe::name) return ch::GPipe::of(ranks, micro_batches);
  if (word == ch::Interleaved<2>::name) return ch::Interleaved<2>::of(ranks, micro_batches);
  if (word == ch::ZeroBubbleH1::name) return ch::ZeroBubbleH1::of(ranks, micro_batches);
  return ch::OneForwardOneBackward::of(ranks, micro_batches);
}
inline constexpr const char* schedules[] = {ch::GPipe::name, ch::OneForwardOneBackward::name, ch::Interleaved<2>::name,
                                     ch::ZeroBubbleH1::name};

// How many numbers it keeps for each parameter.
inline int slots_in(const std::string& optimizer) { return optimizer == "adam" ? 2 : optimizer == "momentum" ? 1 : 0; }

inline Algorithm algorithm_in(const std::string& word) {
  for (const auto algorithm : {Algorithm::automatic, Algorithm::ring, Algorithm::direct, Algorithm::hierarchical})
    if (word == ch::comm::name(algorithm)) return algorithm;
  ch::fail<ch::UsageError>("--all-reduce ", ch::printable(word), ": expected auto, ring, direct or hierarchical");
}

class Program {
 public:
  explicit Program(const Wishes& wishes) : wishes_(wishes) {
    options_.ranks = wishes.ranks();
    ch::check<ch::UsageError>(wishes.meshed() != wishes.mesh.empty(), wishes.meshed()
                                  ? "--policy mesh: expected --mesh pipe=2,data=4,tensor=2 or such"
                                  : "--mesh: of --policy mesh alone");
    ch::check<ch::UsageError>(!wishes.meshed() || wishes.ranks() == wishes.axes().ranks(), "--mesh ",
                              ch::printable(wishes.mesh), ": ", wishes.axes().ranks(), " ranks, --ranks ",
                              wishes.ranks());
    options_.links = cs::links_named(wishes.links(), wishes.efficiency);
    if (wishes.alpha) options_.links.between.alpha = *wishes.alpha * 1e-6;
    if (wishes.alpha && options_.links.island == 1) options_.links.inside.alpha = *wishes.alpha * 1e-6;
    if (wishes.call) options_.links.call = *wishes.call * 1e-6;
    options_.all_reduce = algorithm_in(wishes.all_reduce);
    options_.computing = {.jitter = wishes.jitter, .seed = wishes.seed};
    for (const auto& word : wishes.stragglers) options_.computing.stragglers.push_back(straggler_in(word));
    for (const auto& [rank, factor] : options_.computing.stragglers)
      ch::check<ch::UsageError>(rank >= 0 && rank < wishes.ranks(), "--straggler: rank ", rank, " is not in [0, ",
                                wishes.ranks(), ")");
    if (wishes.recorded.empty()) {
      model_ = sim::model_named(wishes.model);
      training_ = with_caps(wishes.first_bucket_cap, wishes.bucket_cap);
    } else {
      training_ = sim::recorded_training(wishes.recorded);
    }
    for (const auto policy :
         {sim::TrainingPolicy::ddp, sim::TrainingPolicy::local_sgd, sim::TrainingPolicy::parameter_server,
          sim::TrainingPolicy::data_parallel, sim::TrainingPolicy::fully_sharded, sim::TrainingPolicy::tensor_parallel,
          sim::TrainingPolicy::sequence_parallel})
      if (wishes.policy == sim::name(policy)) training_.policy = policy;
    ch::check<ch::UsageError>(
        wishes.recorded.empty() || (!wishes.sharded() && !wishes.shares_batch()), "--recorded: of --policy ",
        wishes.policy, " a recording lacks units and activations; expected ddp, local_sgd or parameter_server");
    if (wishes.sharded()) training_ = with_units(wishes.unit_cap);
    if (wishes.shares_batch()) {
      activation_ = wishes.activation.value_or(model_.activation);
      const bool alone = wishes.meshed() && wishes.axes().pipe * wishes.axes().tensor == 1;
      ch::check<ch::UsageError>(activation_ > 0 || alone, "--policy ", wishes.policy,
                                ": how large activations between layers of ", ch::printable(model_.name),
                                " are is not known: expected --activation BYTES, of a sample");
      training_.activation = activation_ * static_cast<std::size_t>(wishes.batch);
    }
    if (wishes.tensors() || wishes.sequences()) {
      ch::check<ch::UsageError>(model_.layers > 0, "--policy ", wishes.policy, ": ", ch::printable(model_.name),
                                " is not a transformer: expected bert_base, bert_large, gpt2, gpt2_xl or gpt3_175b");
      training_.layers = model_.layers;
    }
    const int micro_batches = wishes.micro_batches_of(stages());
    ch::check<ch::UsageError>((!wishes.pipelined() && wishes.axes().pipe == 1) || micro_batches <= wishes.batch,
                              "--micro-batches ", micro_batches, " of ", wishes.batch, " samples: expected at most one for each sample (--batch)");
    training_.period = wishes.period;
    ch::check<ch::UsageError>(wishes.fragments > 0 || wishes.overlap == 0, "--overlap: without --fragments");
    const auto fragments = static_cast<std::size_t>(wishes.fragments);
    for (std::size_t i = 0; i < fragments; ++i)
      training_.fragments.push_back(training_.bytes() * (i + 1) / fragments - training_.bytes() * i / fragments);
    training_.overlap = wishes.overlap;
    training_.parameter_bytes = wishes.recorded.empty() ? model_.flat_bytes() : training_.bytes();
    training_.optimizer_slots = slots_in(wishes.optimizer) + (wishes.fragments > 0 ? 2 : 0);
    training_.copied = {.parameters = training_.parameter_bytes,
                        .gradients = training_.bytes(),
                        .buffers = model_.buffers,
                        .samples = wishes.batch,
                        .sample = wishes.sample.value_or(model_.sample),
                        .output = wishes.output.value_or(model_.output),
                        .by_nccl = wishes.nccl};
    ch::check<ch::UsageError>(!wishes.nccl || wishes.copies(), "--nccl: of --policy dp alone");
    ch::check<ch::UsageError>(!wishes.keep_parameters || wishes.sharded() || wishes.axes().shard > 1,
                              "--keep-parameters: of --policy fsdp alone, or of mesh with shard");
    ch::check<ch::UsageError>(!wishes.trace_ring || !wishes.trace.empty(), "--trace-ring: without --trace");
    ch::check<ch::UsageError>(!wishes.trace_ring || !wishes.copies(), "--trace-ring: dp makes no collective calls");
    ch::check<ch::UsageError>(!wishes.trace_ring || !wishes.meshed(), "--trace-ring: not of --policy mesh");
    steps_ = training_.policy == sim::TrainingPolicy::local_sgd
                 ? (wishes.steps + wishes.period - 1) / wishes.period * wishes.period
                 : wishes.steps;
  }

  void run() {
    auto asked = options_;
    asked.keep_spans = !wishes_.trace.empty();
    asked.keep_steps = wishes_.trace_ring;
    sim::MeshTimes mesh;
    if (wishes_.meshed()) mesh = meshed(asked);
    const auto result = wishes_.meshed() ? mesh : simulate(asked);
    const auto& name = wishes_.recorded.empty() ? model_.name : wishes_.recorded;
    std::printf("%s, %.1f MB of gradients%s, %.3f ms of computing a step; %s over %s\n", ch::printable(name).c_str(),
                static_cast<double>(training_.bytes()) * 1e-6, cut().c_str(), training_.seconds() * 1e3,
                wishes_.policy.c_str(), ch::printable(wishes_.links()).c_str());
    if (!wishes_.trace.empty()) write_trace(result);
    scaling(result);
    if (wishes_.meshed()) return axes(mesh);
    if (wishes_.brief) return;
    if (wishes_.copies()) return copies();
    if (wishes_.pipelined()) return pipelines();
    if (wishes_.tensors()) return;
    if (wishes_.sharded()) return units();
    if (training_.policy == sim::TrainingPolicy::ddp) buckets();
    if (training_.policy != sim::TrainingPolicy::parameter_server) algorithms();
  }

 private:
  // How many messages something that is only tried may take; a message takes about 0.1 us.
  static constexpr double patience = 3e7, most_messages = 1e10;

  int stages() const { return wishes_.meshed() ? wishes_.axes().pipe : options_.ranks; }
  std::string cut() const {
    if (wishes_.sharded()) return ch::cat(" in ", training_.units.size(), " units");
    if (wishes_.pipelined() || wishes_.axes().pipe > 1)
      return ch::cat(", ", wishes_.micro_batches_of(stages()), " micro-batches");
    return wishes_.tensors() || wishes_.meshed() ? "" : ch::cat(" in ", training_.buckets.size(), " buckets");
  }
  sim::Training with_units(double cap) const {
    auto training = training_;
    training.units = sim::unit_times(model_, cap, training.forward, training.backward);
    training.buckets.clear();
    training.keeps_parameters = wishes_.keep_parameters;
    return training;
  }
  sim::TrainingTimes simulate(const cs::SimulationOptions& options) const {
    if (!wishes_.pipelined()) return trained(options, training_, steps_);
    return pipeline(options, wishes_.schedule, wishes_.micro_batches_of(options.ranks));
  }
  // With a line now and then where it takes long.
  sim::TrainingTimes trained(cs::SimulationOptions options, const sim::Training& training, int steps) const {
    using Clock = std::chrono::steady_clock;
    const double all = messages(options, training) * steps;
    ch::check<ch::UsageError>(all <= most_messages, "chorus-simulate: ", options.ranks, " ranks message by message, about ",
                              all, " of them: expected up to ", most_messages, ". Ranks that are alike, or on links of ",
                              "one kind, need none (without --trace)");
    static constexpr auto pause = std::chrono::seconds(5);
    options.progress = [all, ranks = options.ranks, next = Clock::now() + pause](std::size_t sent) mutable {
      if (Clock::now() < next) return;
      next = Clock::now() + pause;
      ch::detail::say(ch::cat("simulating ", ranks, " ranks message by message: about ",
                              static_cast<int>(std::min(99.0, 100 * static_cast<double>(sent) / all)), " %"));
    };
    return sim::simulate_training(options, training, steps);
  }
  sim::MeshTimes meshed(const cs::SimulationOptions& options) const {
    const auto axes = wishes_.axes();
    const int m = axes.pipe > 1 ? wishes_.micro_batches_of(axes.pipe) : 1;
    return sim::simulate_mesh(options,
                              {.axes = axes,
                               .model = model_,
                               .forward = training_.forward,
                               .backward = training_.backward,
                               .activation = activation_ * static_cast<std::size_t>((wishes_.batch + m - 1) / m),
                               .schedule = schedule_in(wishes_.schedule, axes.pipe, m),
                               .caps = {.first_bucket_cap_mb = wishes_.first_bucket_cap,
                                        .bucket_cap_mb = wishes_.bucket_cap},
                               .unit_cap = wishes_.unit_cap,
                               .keeps_parameters = wishes_.keep_parameters,
                               .optimizer_slots = training_.optimizer_slots},
                              steps_);
  }
  void axes(const sim::MeshTimes& times) const {
    std::printf("\n%8s %12s %12s %16s\n", "axis", "ranks", "exposed, ms", "MB sent a rank");
    for (const auto& axis : times.axes)
      std::printf("%8s %12d %12.3f %16.3f\n", std::string(axis.name).c_str(), axis.ranks, axis.exposed * 1e3,
                  axis.bytes * 1e-6);
    std::printf("A rank holds %.1f MB of parameters, gradients and optimizer at most, and activations.\n",
                static_cast<double>(times.held) * 1e-6);
  }
  sim::TrainingTimes pipeline(const cs::SimulationOptions& options, const std::string& schedule, int m) const {
    const auto samples = static_cast<std::size_t>((wishes_.batch + m - 1) / m);
    return sim::simulate_pipeline(options,
                                  {.schedule = schedule_in(schedule, options.ranks, m),
                                   .forward = training_.forward,
                                   .backward = training_.backward,
                                   .activation = activation_ * samples},
                                  steps_);
  }
  sim::Training with_caps(double first, double others) const {
    auto training = training_;
    training.forward = wishes_.compute * 1e-3 / 3;
    training.backward = wishes_.compute * 1e-3 * 2 / 3;
    training.parameters = model_.parameters.size();
    training.buckets =
        sim::bucket_times(model_, {.first_bucket_cap_mb = first, .bucket_cap_mb = others}, training.backward);
    return training;
  }
  // About as many, with pieces of 512 KiB.
  double messages(const cs::SimulationOptions& options, const sim::Training& training) const {
    if (wishes_.pipelined() || sim::trains_together(options, training)) return 0;
    const int ranks = options.ranks;
    const bool levels = options.all_reduce == Algorithm::hierarchical ||
                        (options.all_reduce == Algorithm::automatic && has_islands(ranks));
    const double in_ring = levels ? std::ceil(static_cast<double>(ranks) / options_.links.island) : ranks;
    double sum = static_cast<double>(ranks) * ranks;
    const auto add = [&](std::size_t bytes, double calls) {
      const double pieces = static_cast<double>(bytes) / (512 << 10);
      sum += calls * (in_ring * (in_ring + 4 * pieces) + (levels ? ranks * (1 + 4 * pieces) : 0));
    };
    for (const auto& bucket : training.buckets) add(bucket.bytes, 2);
    for (const auto& unit : training.units) add(unit.bytes, 3);
    if (training.layers > 0) add(training.activation, 8.0 * training.layers);
    if (const int alike = sim::ranks_alike(options, training); alike > 0) sum *= static_cast<double>(alike) / ranks;
    return sum;
  }
  // What is tried is tried for one step, or one period: only jitter makes steps differ.
  int tried_steps() const { return training_.policy == sim::TrainingPolicy::local_sgd ? training_.period : 1; }
  bool has_islands(int ranks) const { return options_.links.island > 1 && options_.links.island < ranks; }

  void scaling(const sim::TrainingTimes& whole) const {
    std::printf("\n%8s %12s %12s %12s %12s %12s\n", "ranks", "step, ms", "exposed, ms", "late, ms", "efficiency",
                "speed-up");
    std::vector<int> counts;
    const bool alone = wishes_.brief || wishes_.meshed();
    for (int ranks = 1; ranks < options_.ranks; ranks *= alone ? options_.ranks : 4) counts.push_back(ranks);
    for (const int ranks : counts) {
      auto options = options_;
      options.ranks = ranks;
      std::erase_if(options.computing.stragglers, [&](const auto& one) { return one.first >= ranks; });
      if (options.all_reduce == Algorithm::hierarchical && !has_islands(ranks))
        options.all_reduce = Algorithm::automatic;
      if (messages(options, training_) > patience) continue;
      line(ranks, simulate(options));
    }
    line(options_.ranks, whole);
    std::printf("exposed: waits for links; late: for the rank that comes last to a call. %s\n",
                wishes_.meshed()
                    ? "Ranks along data or shard have a\nbatch each, which others share; speed-up is of samples a second."
                : wishes_.shares_batch()
                    ? "Strong scaling: all ranks share one batch;\nspeed-up is one rank's step over this one."
                    : "Weak scaling: each rank has its own\nbatch; speed-up is of samples a second.");
  }
  void line(int ranks, const sim::TrainingTimes& times) const {
    const double efficiency = training_.seconds() / times.step / wishes_.sharing_batch(ranks);
    std::printf("%8d %12.3f %12.3f %12.3f %11.1f%% %12.1f\n", ranks, times.step * 1e3,
                (times.exposed - times.late) * 1e3, times.late * 1e3, efficiency * 100, efficiency * ranks);
  }

  // Of a step: what goes through device 0's link, and for how long nothing else goes on there.
  void copies() const {
    auto sizes = training_.copied;
    sizes.samples *= options_.ranks;
    const auto of_step = sim::data_parallel_copies(sizes, options_.ranks);
    std::printf(
        "\ndevice 0's link, of %d samples with %zu bytes of input and %zu of output each:\n%18s %8s %12s %12s\n",
        static_cast<int>(sizes.samples), sizes.sample, sizes.output, "", "copies", "MB", "ms");
    const auto& link = options_.links.inside;
    double all = 0;
    const auto put = [&](const char* what, std::size_t count, double bytes, double seconds) {
      all += seconds;
      std::printf("%18s %8zu %12.3f %12.3f\n", what, count, bytes * 1e-6, seconds * 1e3);
    };
    using ch::trace::Traffic;
    const auto line = [&](const char* what, const std::vector<sim::DeviceCopy>& part, Traffic kind) {
      std::size_t count = 0;
      double bytes = 0;
      for (const auto& copy : part)
        if (copy.kind == kind) ++count, bytes += static_cast<double>(copy.bytes);
      put(what, count, bytes, static_cast<double>(count) * link.alpha + bytes / link.bandwidth);
    };
    // What goes along a chain of all devices passes each link once.
    const auto by_nccl = [&](const char* what, std::size_t bytes) {
      const auto once = static_cast<double>(bytes);
      put(what, 1, once, options_.links.call + (options_.ranks - 1) * link.alpha + once / link.bandwidth);
    };
    line("inputs", of_step.prepare, Traffic::inputs);
    if (of_step.by_nccl) {
      by_nccl("broadcast", std::accumulate(sizes.buffers.begin(), sizes.buffers.end(), sizes.parameters));
    } else {
      line("parameters", of_step.prepare, Traffic::parameters);
      line("buffers", of_step.prepare, Traffic::buffers);
    }
    line(sizes.output == 0 ? "losses" : "outputs", of_step.gather, Traffic::outputs);
    line("their gradients", of_step.output_gradients, Traffic::outputs);
    if (of_step.by_nccl)
      by_nccl("reduce", sizes.gradients);
    else
      line("gradients", of_step.reduce, Traffic::gradients);
    std::printf("%18s %34.3f\n", "together", all * 1e3);
  }

  // What a rank holds of parameters at most, as FullyShardedDataParallel has it.
  void units() const {
    std::printf("\n%12s %8s %12s %12s %16s\n", "unit cap, MiB", "units", "step, ms", "exposed, ms", "parameters, MB");
    for (const double cap : {2.0, 8.0, 32.0, 128.0, 1e6}) {
      const auto training = with_units(cap);
      const auto whole = training.bytes();
      std::size_t largest = 0;
      for (const auto& unit : training.units) largest = std::max(largest, unit.bytes);
      const auto held = wishes_.keep_parameters
                            ? whole
                            : std::min(whole, whole / static_cast<std::size_t>(options_.ranks) + 2 * largest);
      if (messages(options_, training) > patience) {
        std::printf("%12s %8zu %25s\n", ch::cat(cap).c_str(), training.units.size(), "too many messages");
        continue;
      }
      const auto times = trained(options_, training, tried_steps());
      std::printf("%12s %8zu %12.3f %12.3f %16.1f\n", cap == 1e6 ? "all" : ch::cat(cap).c_str(), training.units.size(),
                  times.step * 1e3, times.exposed * 1e3, static_cast<double>(held) * 1e-6);
    }
  }
  void pipelines() const {
    std::printf("\n%12s %14s %12s %12s %12s %14s\n", "schedule", "micro-batches", "step, ms", "idle", "by formula",
                "inputs kept");
    for (const auto* const schedule : schedules)
      for (const int times : {1, 2, 4, 8}) {
        const int m = times * options_.ranks;
        if (m > wishes_.batch) continue;
        const auto result = pipeline(options_, schedule, m);
        const auto facts = ch::check_schedule(schedule_in(schedule, options_.ranks, m));
        std::printf("%12s %14d %12.3f %11.1f%% %11.1f%% %14d\n", schedule, m, result.step * 1e3,
                    (1 - training_.seconds() / options_.ranks / result.step) * 100, facts.idle * 100,
                    *std::max_element(facts.kept_inputs.begin(), facts.kept_inputs.end()));
      }
    std::printf(
        "By formula: of the table alone, where messages take no time. 1f1b waits longer for messages than gpipe: it\n"
        "has no more micro-batches on their way than stages, and each goes to the next stage and back before one\n"
        "more may begin; gpipe has others to compute meanwhile, and keeps all their inputs.\n");
  }

  void buckets() const {
    if (!wishes_.recorded.empty()) {
      std::printf("\nbuckets are those of the recording: no other sizes are tried\n");
      return;
    }
    std::printf("\n%12s %8s %12s %12s\n", "cap, MiB", "buckets", "step, ms", "exposed, ms");
    double best = 0, best_cap = wishes_.bucket_cap;
    for (const double cap : {0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 1e6}) {
      const auto training = with_caps(std::min(cap, wishes_.first_bucket_cap), cap);
      const bool all = cap == 1e6;
      const auto one = all ? with_caps(cap, cap) : training;
      if (messages(options_, one) > patience) {
        std::printf("%12s %8zu %25s\n", all ? "all" : ch::cat(cap).c_str(), one.buckets.size(), "too many messages");
        continue;
      }
      const auto times = trained(options_, one, tried_steps());
      std::printf("%12s %8zu %12.3f %12.3f\n", all ? "all" : ch::cat(cap).c_str(), one.buckets.size(), times.step * 1e3,
                  times.exposed * 1e3);
      if (best == 0 || times.step < best) best = times.step, best_cap = cap;
    }
    if (best > 0) std::printf("best: --bucket-cap %s, %.3f ms\n", ch::cat(best_cap).c_str(), best * 1e3);
  }

  void algorithms() const {
    std::vector<Algorithm> all = {Algorithm::ring};
    if (has_islands(options_.ranks)) all.push_back(Algorithm::hierarchical);
    if (all.size() == 1) {
      std::printf("\nall-reduce: one kind of link, ring alone\n");
      return;
    }
    std::printf("\n%14s %12s %12s\n", "all-reduce", "step, ms", "exposed, ms");
    for (const auto algorithm : all) {
      const std::string name(ch::comm::name(algorithm));
      auto options = options_;
      options.all_reduce = algorithm;
      if (messages(options, training_) > patience) {
        std::printf("%14s %25s\n", name.c_str(), "too many messages");
        continue;
      }
      const auto times = trained(options, training_, tried_steps());
      std::printf("%14s %12.3f %12.3f\n", name.c_str(), times.step * 1e3, times.exposed * 1e3);
    }
  }

  void write_trace(const sim::TrainingTimes& result) const {
    constexpr int drawn = 64;
    const auto text =
        cs::trace_text(result.times, drawn, wishes_.policy,
                       ch::cat(R"("gradient_bytes":)", training_.bytes(), R"(,"ranks":)", wishes_.ranks(),
                               wishes_.pipelined() ? ch::cat(R"(,"schedule":")", wishes_.schedule, '"') : ""));
    ch::io::write_file("trace", wishes_.trace, text);
    std::printf("trace of ranks 0 to %d: %s\n", std::min(drawn, wishes_.ranks()) - 1,
                ch::printable(wishes_.trace).c_str());
  }

  const Wishes wishes_;
  cs::SimulationOptions options_;
  sim::ModelSizes model_;
  sim::Training training_;
  std::size_t activation_ = 0;  // bytes of a sample's between layers
  int steps_ = 1;
};
