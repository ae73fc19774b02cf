/// chorus-simulate: how long a training step takes on up to 65,536 ranks, and why, in virtual time.

#include <algorithm>
#include <cerrno>
#include <chorus/comm/simulated/trace_file.hpp>
#include <chorus/core/check_output.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/standard_streams.hpp>
#include <chorus/parallel/simulated/recorded.hpp>
#include <chorus/parallel/simulated/training.hpp>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "command_line.hpp"

namespace ch = chorus;
namespace sim = chorus::simulated;
namespace cs = chorus::comm::simulated;
using ch::comm::Algorithm;

namespace {

constexpr const char* description =
    R"(Simulates data-parallel training: every rank makes the calls that its policy makes, of chorus' own collectives, over
links of a latency (alpha) and a bandwidth each. Times are virtual, and the same on every machine.

  chorus-simulate --ranks 64 --links 25gbit --model resnet50 --compute 150
  chorus-simulate --ranks 1024 --links nvlink8+25gbit --model bert_large --compute 400 --straggler 5:1.3
  chorus-simulate --ranks 64 --links 100gbit --recorded run.json --trace simulated.json
  chorus-simulate --policy dp --devices 4 --links nvlink --trace dp.json

Prints how the step scales with the number of ranks, how much communication computing doesn't hide, the best size of
buckets, and ring against hierarchical all-reduce. Of --policy dp, DataParallel, whose devices are those of one machine:
what device 0's link carries, and when.)";

struct Wishes {
  std::string model = "resnet50", policy = "ddp", all_reduce = "auto", recorded, trace, optimizer = "sgd";
  std::optional<std::string> named_links;
  double efficiency = 1, compute = 100, bucket_cap = 25, first_bucket_cap = 1, jitter = 0;
  std::optional<double> alpha, call;
  std::vector<std::string> stragglers;
  std::optional<int> named_ranks;
  int steps = 3, period = 8, batch = 32;
  std::optional<std::size_t> sample, output;
  std::uint64_t seed = 0;
  bool brief = false, trace_ring = false, nccl = false;

  bool copies() const { return policy == sim::name(sim::TrainingPolicy::data_parallel); }
  int ranks() const { return named_ranks.value_or(copies() ? 4 : 64); }
  std::string links() const { return named_links.value_or(copies() ? "pcie" : "25gbit"); }
};

std::pair<int, double> straggler_in(const std::string& word) {
  int rank = 0, end = 0;
  double factor = 0;
  const bool is = std::sscanf(word.c_str(), "%d:%lf%n", &rank, &factor, &end) == 2 &&
                  static_cast<std::size_t>(end) == word.size() && std::isfinite(factor);
  ch::check<ch::UsageError>(is, "--straggler ", ch::printable(word), ": expected RANK:FACTOR, as 3:1.5");
  return {rank, factor};
}

// How many numbers it keeps for each parameter.
int slots_in(const std::string& optimizer) { return optimizer == "adam" ? 2 : optimizer == "momentum" ? 1 : 0; }

Algorithm algorithm_in(const std::string& word) {
  for (const auto algorithm : {Algorithm::automatic, Algorithm::ring, Algorithm::direct, Algorithm::hierarchical})
    if (word == ch::comm::name(algorithm)) return algorithm;
  ch::fail<ch::UsageError>("--all-reduce ", ch::printable(word), ": expected auto, ring, direct or hierarchical");
}

class Program {
 public:
  explicit Program(const Wishes& wishes) : wishes_(wishes) {
    options_.ranks = wishes.ranks();
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
    for (const auto policy : {sim::TrainingPolicy::ddp, sim::TrainingPolicy::local_sgd,
                              sim::TrainingPolicy::parameter_server, sim::TrainingPolicy::data_parallel})
      if (wishes.policy == sim::name(policy)) training_.policy = policy;
    training_.period = wishes.period;
    training_.parameter_bytes = wishes.recorded.empty() ? model_.flat_bytes() : training_.bytes();
    training_.optimizer_slots = slots_in(wishes.optimizer);
    training_.copied = {.parameters = training_.parameter_bytes,
                        .gradients = training_.bytes(),
                        .buffers = model_.buffers,
                        .samples = wishes.batch,
                        .sample = wishes.sample.value_or(model_.sample),
                        .output = wishes.output.value_or(model_.output),
                        .by_nccl = wishes.nccl};
    ch::check<ch::UsageError>(!wishes.nccl || wishes.copies(), "--nccl: of --policy dp alone");
    ch::check<ch::UsageError>(!wishes.trace_ring || !wishes.trace.empty(), "--trace-ring: without --trace");
    ch::check<ch::UsageError>(!wishes.trace_ring || !wishes.copies(), "--trace-ring: dp makes no collective calls");
    steps_ = training_.policy == sim::TrainingPolicy::local_sgd
                 ? (wishes.steps + wishes.period - 1) / wishes.period * wishes.period
                 : wishes.steps;
  }

  void run() {
    auto asked = options_;
    asked.keep_spans = !wishes_.trace.empty();
    asked.keep_steps = wishes_.trace_ring;
    const auto result = sim::simulate_training(asked, training_, steps_);
    const auto& name = wishes_.recorded.empty() ? model_.name : wishes_.recorded;
    std::printf("%s, %.1f MB of gradients in %zu buckets, %.3f ms of computing a step; %s over %s\n",
                ch::printable(name).c_str(), static_cast<double>(training_.bytes()) * 1e-6, training_.buckets.size(),
                training_.seconds() * 1e3, wishes_.policy.c_str(), ch::printable(wishes_.links()).c_str());
    if (!wishes_.trace.empty()) write_trace(result);
    scaling(result);
    if (wishes_.brief) return;
    if (wishes_.copies()) return copies();
    if (training_.policy == sim::TrainingPolicy::ddp) buckets();
    if (training_.policy != sim::TrainingPolicy::parameter_server) algorithms();
  }

 private:
  // How many messages something that is only tried may take; a message takes about 0.1 us.
  static constexpr double patience = 3e7;

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
  double messages(int ranks, const sim::Training& training, Algorithm algorithm) const {
    const bool levels =
        algorithm == Algorithm::hierarchical || (algorithm == Algorithm::automatic && has_islands(ranks));
    const double in_ring = levels ? std::ceil(static_cast<double>(ranks) / options_.links.island) : ranks;
    double sum = static_cast<double>(ranks) * ranks;
    for (const auto& bucket : training.buckets) {
      const double pieces = static_cast<double>(bucket.bytes) / (512 << 10);
      sum += 2 * in_ring * (in_ring + 4 * pieces) + (levels ? 2 * ranks * (1 + 4 * pieces) : 0);
    }
    return sum;
  }
  // What is tried is tried for one step, or one period: only jitter makes steps differ.
  int tried_steps() const { return training_.policy == sim::TrainingPolicy::local_sgd ? training_.period : 1; }
  bool has_islands(int ranks) const { return options_.links.island > 1 && options_.links.island < ranks; }

  void scaling(const sim::TrainingTimes& whole) const {
    std::printf("\n%8s %12s %12s %12s %12s\n", "ranks", "step, ms", "exposed, ms", "efficiency", "speed-up");
    std::vector<int> counts;
    for (int ranks = 1; ranks < options_.ranks; ranks *= wishes_.brief ? options_.ranks : 4) counts.push_back(ranks);
    for (const int ranks : counts) {
      auto options = options_;
      options.ranks = ranks;
      std::erase_if(options.computing.stragglers, [&](const auto& one) { return one.first >= ranks; });
      if (options.all_reduce == Algorithm::hierarchical && !has_islands(ranks))
        options.all_reduce = Algorithm::automatic;
      if (messages(ranks, training_, options.all_reduce) > patience) continue;
      line(ranks, sim::simulate_training(options, training_, steps_));
    }
    line(options_.ranks, whole);
  }
  void line(int ranks, const sim::TrainingTimes& times) const {
    const double efficiency = training_.seconds() / times.step;
    std::printf("%8d %12.3f %12.3f %11.1f%% %12.1f\n", ranks, times.step * 1e3, times.exposed * 1e3, efficiency * 100,
                efficiency * ranks);
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
      if (messages(options_.ranks, one, options_.all_reduce) > patience) {
        std::printf("%12s %8zu %25s\n", all ? "all" : ch::cat(cap).c_str(), one.buckets.size(), "too many messages");
        continue;
      }
      const auto times = sim::simulate_training(options_, one, tried_steps());
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
      if (messages(options_.ranks, training_, algorithm) > patience) {
        std::printf("%14s %25s\n", name.c_str(), "too many messages");
        continue;
      }
      auto options = options_;
      options.all_reduce = algorithm;
      const auto times = sim::simulate_training(options, training_, tried_steps());
      std::printf("%14s %12.3f %12.3f\n", name.c_str(), times.step * 1e3, times.exposed * 1e3);
    }
  }

  void write_trace(const sim::TrainingTimes& result) const {
    constexpr int drawn = 64;
    const auto text =
        cs::trace_text(result.times, drawn, wishes_.policy,
                       ch::cat(R"("gradient_bytes":)", training_.bytes(), R"(,"ranks":)", wishes_.ranks()));
    const ch::detail::HeldSignal held(SIGXFSZ);
    std::FILE* const file = ch::detail::open_to_write(wishes_.trace.c_str());
    bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (file != nullptr) written = std::fclose(file) == 0 && written;
    ch::check<ch::FileError>(written, ch::printable(wishes_.trace),
                             ": the trace cannot be written: ", std::strerror(errno));
    std::printf("trace of ranks 0 to %d: %s\n", std::min(drawn, wishes_.ranks()) - 1,
                ch::printable(wishes_.trace).c_str());
  }

  const Wishes wishes_;
  cs::SimulationOptions options_;
  sim::ModelSizes model_;
  sim::Training training_;
  int steps_ = 1;
};

}  // namespace

int main(int argc, char** argv) {
  Wishes wishes;
  CLI::App app{description, "chorus-simulate"};
  app.add_option("--ranks,--devices", wishes.named_ranks, "how many (default: 64; of dp 4)")
      ->check(CLI::Range(1, cs::most_scheduled_ranks));
  app.add_option("--links", wishes.named_links,
                 "nvlink, pcie, 25gbit, 100mbit; nvlink8+25gbit: islands of 8 ranks, with a port to the network each; "
                 "nvlink8+25gbit:shared: with one between them (default: 25gbit; of dp pcie)");
  app.add_option("--efficiency", wishes.efficiency, "what is measured of the links' nominal rates")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  app.add_option("--alpha", wishes.alpha, "microseconds that a message takes through the network (default: NCCL's 14)")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--call", wishes.call, "microseconds that a collective call takes to begin (default: NCCL's 8.4)")
      ->check(CLI::Range(0.0, 1e6));
  auto* const model =
      app.add_option("--model", wishes.model, "resnet50, resnet101, resnet152, vgg16, bert_base, bert_large, or bytes")
          ->capture_default_str();
  auto* const compute =
      app.add_option("--compute", wishes.compute,
                     "milliseconds that a rank computes in a step: a third forward, the rest backward")
          ->check(CLI::Range(0.0, 1e6))
          ->capture_default_str();
  app.add_option("--recorded", wishes.recorded, "instead of both: a trace file, of which rank 0's last step is taken")
      ->excludes(model)
      ->excludes(compute);
  app.add_option("--policy", wishes.policy)
      ->check(CLI::IsMember({"ddp", "local_sgd", "parameter_server", "dp"}))
      ->capture_default_str();
  app.add_option("--batch", wishes.batch, "dp: samples a device")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  constexpr std::size_t most_bytes = 1'000'000'000;
  app.add_option("--sample", wishes.sample, "dp: bytes of a sample's input (default: the model's)")
      ->check(CLI::Range(std::size_t{0}, most_bytes));
  app.add_option("--output", wishes.output,
                 "dp: bytes of a sample's output (default: the model's); 0: the model returns its loss")
      ->check(CLI::Range(std::size_t{0}, most_bytes));
  app.add_flag("--nccl", wishes.nccl,
               "dp: parameters and gradients by NCCL's broadcast and reduce, as between GPUs in a build with it");
  app.add_option("--optimizer", wishes.optimizer, "sgd, momentum or adam: what a trace's memory has of it")
      ->check(CLI::IsMember({"sgd", "momentum", "adam"}))
      ->capture_default_str();
  app.add_option("--period", wishes.period, "local_sgd: steps between means")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app.add_option("--bucket-cap", wishes.bucket_cap, "MiB of a bucket of gradients")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--first-bucket-cap", wishes.first_bucket_cap, "MiB of the first one")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--all-reduce", wishes.all_reduce, "auto, ring, direct, hierarchical")->capture_default_str();
  app.add_option("--straggler", wishes.stragglers, "RANK:FACTOR: that rank computes for so many times as long");
  app.add_option("--jitter", wishes.jitter, "standard deviation of how long ranks compute, a part of the mean")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--seed", wishes.seed, "of the jitter")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--steps", wishes.steps, "the means are over")->check(CLI::Range(1, 10'000))->capture_default_str();
  app.add_option("--trace", wishes.trace, "file for a trace, as Perfetto reads it, of the first 64 ranks");
  app.add_flag("--trace-ring", wishes.trace_ring, "with each step of each collective: to see a ring turn");
  app.add_flag("--brief", wishes.brief, "the step alone, nothing is tried");
  if (const auto status = parse(app, argc, argv)) return *status;
  try {
    for (const double number : {wishes.efficiency, wishes.compute, wishes.bucket_cap, wishes.first_bucket_cap,
                                wishes.jitter, wishes.alpha.value_or(0), wishes.call.value_or(0)})
      ch::check<ch::UsageError>(!std::isnan(number), "an option is nan, expected a number");
    Program(wishes).run();
    ch::detail::check_output();
    return 0;
  } catch (const ch::UsageError& error) {
    ch::detail::say(error.what());
    return 2;
  } catch (const std::exception& error) {
    ch::detail::say(error.what());
    return 1;
  }
}
