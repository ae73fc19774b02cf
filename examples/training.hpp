#pragma once
/// What the example programs share: options, the choice of a policy, the optimizer, losses on their way into the log.

#include <algorithm>
#include <charconv>
#include <chorus/chorus.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "command_line.hpp"

/// Options of every example. Each sets its own defaults before `add_options`.
struct TrainingOptions {
  std::string policy = "single", optimizer = "sgd", schedule = "none";
  std::optional<int> devices{};
  chorus::Index batch = 64, epochs = 5, steps = 0, warmup = 0;
  std::uint64_t seed = 1;
  double lr = 0.02, momentum = 0.9, weight_decay = 0, clip = 0;
  std::optional<double> timeout{};
  std::string all_reduce{};
  bool quiet = false;
  std::string metrics{}, save{};
};

/// A check for an option: a number within limits. Its message is short and says what was given.
template <class Number>
CLI::Validator in_range(Number least, Number most = std::numeric_limits<Number>::max()) {
  const auto limits =
      most == std::numeric_limits<Number>::max() ? chorus::cat("at least ", least) : chorus::cat(least, " to ", most);
  const auto check = [=](std::string& text) {
    Number number{};
    const auto* const end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, number);
    const bool fits = read.ec == std::errc() && read.ptr == end && number >= least && number <= most;
    return fits ? ""
                : chorus::cat("expected a ", std::is_integral_v<Number> ? "whole " : "", "number, ", limits, ", got '",
                              chorus::printable(text), "'");
  };
  return CLI::Validator(check, limits);
}

inline void add_options(CLI::App& app, TrainingOptions& options) {
  const auto positive = in_range(1, 1 << 24);
  // So that a script's options can be overridden by later ones.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--policy", options.policy, "single, dp or ddp")
      ->check(CLI::IsMember({"single", "dp", "ddp"}))
      ->capture_default_str();
  app.add_option("--devices", options.devices, "devices; under ddp, processes (default: 2 for dp and ddp)")
      ->check(in_range(1, 64));
  app.add_option("--batch", options.batch, "samples in a batch, over all devices")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--epochs", options.epochs, "passes over the data")
      ->check(in_range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "stop after so many steps in all; 0: don't")
      ->check(in_range(chorus::Index{0}));
  app.add_option("--seed", options.seed, "seed of everything random")
      ->check(in_range(std::uint64_t{0}))
      ->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "sgd or adam")
      ->check(CLI::IsMember({"sgd", "adam"}))
      ->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate")->check(in_range(0.0))->capture_default_str();
  app.add_option("--momentum", options.momentum, "sgd's momentum")->check(in_range(0.0))->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay, "weight decay")->check(in_range(0.0))->capture_default_str();
  app.add_option("--schedule", options.schedule, "none, step (a tenth after each third of the run) or cosine")
      ->check(CLI::IsMember({"none", "step", "cosine"}))
      ->capture_default_str();
  app.add_option("--warmup", options.warmup, "steps in which the learning rate rises from nearly nothing; 0: none")
      ->check(in_range(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--clip", options.clip, "largest norm of the gradient; 0: any")
      ->check(in_range(0.0))
      ->capture_default_str();
  app.add_option("--metrics", options.metrics, "file for the run's numbers, as JSON lines");
  app.add_option("--timeout", options.timeout,
                 "seconds that a process waits for another one (default: CHORUS_TIMEOUT, else 60)")
      ->check(in_range(0.001, 1e6));
  app.add_option("--all-reduce", options.all_reduce,
                 "how processes add up their gradients under ddp (default: CHORUS_ALL_REDUCE, else auto: the fastest)")
      ->check(CLI::IsMember({"auto", "ring", "direct", "in_place", "hierarchical"}));
  app.add_flag("--quiet", options.quiet, "no progress, no summary");
}

/// The same, and looks at options that don't go together.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv, const TrainingOptions& options) {
  if (const auto status = parse(app, argc, argv)) return status;
  if (options.policy == "single" && options.devices.value_or(1) != 1) {
    std::fprintf(stderr, "%s: --policy single has one device, got --devices %d: choose dp or ddp\n",
                 app.get_name().c_str(), *options.devices);
    return 2;
  }
  return std::nullopt;
}

/// Calls `body(std::type_identity<Net>{}, run)` with the policy that the options name around the model.
template <class Model, class Body>
int launch(int argc, char** argv, const TrainingOptions& options, const Body& body) {
  chorus::LaunchOptions launching;
  launching.devices = options.devices;
  launching.seed = options.seed;
  if (options.timeout)
    launching.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(*options.timeout * 1000));
  if (!options.all_reduce.empty()) launching.all_reduce = chorus::comm::all_reduce_of(options.all_reduce);
  const auto with = [&]<class Net>(std::type_identity<Net> net) {
    return chorus::launch<Net>(argc, argv, launching, [&](chorus::Run& run) { body(net, run); });
  };
  if (options.policy == "dp") return with(std::type_identity<chorus::DataParallel<Model>>{});
  if (options.policy == "ddp") return with(std::type_identity<chorus::DistributedDataParallel<Model>>{});
  return with(std::type_identity<chorus::SingleDevice<Model>>{});
}

/// The optimizer that the options name.
template <class Net>
auto make_optimizer(Net& net, const TrainingOptions& options)
    -> std::unique_ptr<chorus::optim::Optimizer<typename Net::device_type>> {
  using D = typename Net::device_type;
  if (options.optimizer == "adam")
    return std::make_unique<chorus::optim::Adam<D>>(
        net.parameters(), chorus::optim::AdamOptions{.lr = options.lr, .weight_decay = options.weight_decay});
  return std::make_unique<chorus::optim::Sgd<D>>(
      net.parameters(),
      chorus::optim::SgdOptions{.lr = options.lr, .momentum = options.momentum, .weight_decay = options.weight_decay});
}

/// The learning rate of a step, which is counted over all epochs.
inline double rate(const TrainingOptions& options, int epoch, chorus::Index step) {
  const int epochs = static_cast<int>(options.epochs), warmup = static_cast<int>(options.warmup);
  double lr = options.lr;
  if (options.schedule == "step")
    lr = chorus::optim::StepDecay{.step_size = std::max(1, epochs / 3)}(lr, epoch);
  else if (options.schedule == "cosine")
    lr = chorus::optim::CosineAnnealing{.t_max = epochs}(lr, epoch);
  if (step >= warmup) return lr;
  return chorus::optim::LinearRamp{.start_factor = 1.0 / (warmup + 1), .total = warmup}(lr, static_cast<int>(step));
}

/// Losses of steps on their way into the metrics file: each rank knows its share alone, so they are summed over the
/// ranks, many at a time.
template <class Net>
class StepLosses {
 public:
  StepLosses(Net& net, chorus::MetricsLog& metrics, chorus::Progress& progress)
      : net_(net), metrics_(metrics), progress_(progress) {}

  void add(double loss, chorus::Index samples, chorus::Index index, chorus::Index batches) {
    sums_.push_back(samples == 0 ? 0 : loss * static_cast<double>(samples));
    sums_.push_back(static_cast<double>(samples));
    places_.push_back({index, batches});
    if (places_.size() == 16) flush();
  }
  void flush() {
    net_.sum(sums_);
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const double samples = sums_[2 * i + 1], loss = samples == 0 ? 0 : sums_[2 * i] / samples;
      metrics_.step(next_step_++, loss);
      progress_.step(loss, static_cast<chorus::Index>(samples), places_[i].first, places_[i].second);
      epoch_loss_ += sums_[2 * i];
      epoch_samples_ += samples;
    }
    sums_.clear();
    places_.clear();
  }
  /// The mean loss since the last call.
  double epoch_mean() {
    flush();
    const double mean = epoch_samples_ == 0 ? 0 : epoch_loss_ / epoch_samples_;
    epoch_loss_ = epoch_samples_ = 0;
    return mean;
  }
  double samples() const { return epoch_samples_; }
  void start_at(std::int64_t step) { next_step_ = step; }

 private:
  Net& net_;
  chorus::MetricsLog& metrics_;
  chorus::Progress& progress_;
  std::vector<double> sums_;
  std::vector<std::pair<chorus::Index, chorus::Index>> places_;
  std::int64_t next_step_ = 0;
  double epoch_loss_ = 0, epoch_samples_ = 0;
};

/// `measure(i)` for each device, or, where each rank has its own, by each rank.
template <class Net, class Measure>
std::vector<std::uint64_t> per_device(Net& net, const Measure& measure) {
  std::vector<double> values(static_cast<std::size_t>(net.devices()));
  const auto take = [&](int i) { values[static_cast<std::size_t>(i)] = static_cast<double>(measure(i)); };
  if constexpr (Net::distributed) {
    take(net.communicator().rank());
    net.sum(values);
  } else {
    for (int i = 0; i < net.devices(); ++i) take(i);
  }
  return {values.begin(), values.end()};
}

/// A fingerprint of the model's parameters; empty where the program was built without OpenSSL.
template <class Model>
std::string fingerprint(Model& model) {
  return chorus::io::Sha256::available ? chorus::io::parameters_sha256(model) : "";
}

/// The last line of the metrics file.
template <class Net>
chorus::RunSummary run_summary(Net& net, double samples, double seconds) {
  return {.policy = Net::name,
          .devices = net.devices(),
          .samples_per_second = seconds > 0 ? samples / seconds : 0,
          .bytes_sent_per_device = per_device(net, [](int i) { return chorus::trace::bytes_sent(i); }),
          .peak_memory_bytes_per_device =
              per_device(net, [&](int i) { return chorus::trace::memory(chorus::trace_slot(net, i)).peak; }),
          .parameters_sha256 = fingerprint(net.module())};
}

/// The training loop of the smaller examples. `batches` has size(), set_epoch(epoch) and get(b), this rank's share of
/// global batch b; `loss_of(batch)` gives the mean loss over it and the number of its samples.
template <class Net, class Batches, class Loss>
void fit(Net& net, chorus::Run& run, const TrainingOptions& options, Batches& batches, const Loss& loss_of) {
  const auto start = std::chrono::steady_clock::now();
  auto optimizer = make_optimizer(net, options);
  chorus::MetricsLog metrics{run.is_main() ? options.metrics : std::string()};
  const bool talks = run.is_main() && !options.quiet;
  if (talks) std::printf("%s\n", chorus::nn::summary(net.module()).c_str());
  chorus::Progress progress{{.enabled = talks, .epochs = static_cast<int>(options.epochs)}};
  StepLosses losses{net, metrics, progress};
  double samples = 0;
  chorus::Index step = 0;
  for (const int epoch : progress) {
    const auto epoch_start = std::chrono::steady_clock::now();
    batches.set_epoch(epoch);
    for (chorus::Index b = 0; b < batches.size() && (options.steps == 0 || step < options.steps); ++b, ++step) {
      const auto batch = batches.get(b);
      optimizer->set_lr(rate(options, epoch, step));
      optimizer->zero_grad();
      const auto [loss, count] = loss_of(batch);
      loss.backward();
      if (options.clip > 0) chorus::optim::clip_grad_norm(net.parameters(), options.clip);
      optimizer->step();
      losses.add(loss.item(), count, b, batches.size());
    }
    losses.flush();
    samples += losses.samples();
    const double mean = losses.epoch_mean();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - epoch_start;
    metrics.epoch(epoch, mean, 0, seconds.count());
    if (talks) std::printf("epoch %d: mean loss %.4f\n", epoch + 1, mean);
    if (options.steps > 0 && step >= options.steps) break;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (run.is_main() && !options.save.empty()) chorus::io::save(net.module(), options.save);
  metrics.done(run_summary(net, samples, seconds.count()));
}
