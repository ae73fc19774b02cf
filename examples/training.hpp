#pragma once
/// Everything around the training loops of the example programs, so that the loops only show training: the optimizer
/// chosen by the options, the learning rate, logging of losses, progress, early stopping and saving.

#include <algorithm>
#include <chorus/chorus.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/nn/summary.hpp>
#include <chorus/train/metrics.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "early_stopping.hpp"
#include "training_options.hpp"

/// The optimizer chosen by the options. Its step first clips gradients to the norm of --clip.
template <class Net>
class NamedOptimizer {
 public:
  using D = typename Net::device_type;

  NamedOptimizer(Net& net, const TrainingOptions& options) : net_(net), clip_(options.clip) {
    const double lr = options.lr, decay = options.weight_decay;
    if (options.optimizer == "adam")
      optimizer_ = std::make_unique<chorus::optim::Adam<D>>(
          net.parameters(), chorus::optim::AdamOptions{.lr = lr, .weight_decay = decay});
    else
      optimizer_ = std::make_unique<chorus::optim::Sgd<D>>(
          net.parameters(), chorus::optim::SgdOptions{.lr = lr, .momentum = options.momentum, .weight_decay = decay});
  }

  void zero_grad() { optimizer_->zero_grad(); }
  void step() {
    if (clip_ > 0) net_.clip_grad_norm(clip_);
    optimizer_->step();
  }
  /// The library's optimizer, for checkpoints.
  chorus::optim::Optimizer<D>& plain() { return *optimizer_; }

 private:
  Net& net_;
  double clip_;
  std::unique_ptr<chorus::optim::Optimizer<D>> optimizer_;
};

/// The learning rate of a step; steps are counted over all epochs.
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

/// Collects the steps' losses for the metrics file: each rank knows only its share, so they are summed over the ranks,
/// many at a time.
template <class Net>
class StepLosses {
 public:
  StepLosses(Net& net, chorus::MetricsLog& metrics, chorus::Progress& progress)
      : net_(net), metrics_(metrics), progress_(progress) {}

  /// If `ends_step` is false, the next loss belongs to the same step.
  void add(double loss, chorus::Index samples, chorus::Index index, chorus::Index batches, bool ends_step = true) {
    if (sums_.size() == 2 * places_.size()) sums_.resize(sums_.size() + 2);
    sums_.end()[-2] += samples == 0 ? 0 : loss * static_cast<double>(samples);
    sums_.end()[-1] += static_cast<double>(samples);
    if (!ends_step) return;
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

/// Calls `measure(i)` for each device, or, if each rank has its own, on each rank.
template <class Net, class Measure>
std::vector<std::uint64_t> per_device(Net& net, const Measure& measure) {
  std::vector<double> values(static_cast<std::size_t>(net.devices()));
  const auto take = [&](int i) { values[static_cast<std::size_t>(i)] = static_cast<double>(measure(i)); };
  if constexpr (Net::distributed) {
    take(net.communicator().rank());
    net.communicator().all_reduce(std::span(values));
  } else {
    for (int i = 0; i < net.devices(); ++i) take(i);
  }
  return {values.begin(), values.end()};
}

/// The number of devices, or groups of devices, that share a batch.
template <class Net>
int shares_of_batch(const Net& net) {
  if constexpr (requires { net.shares(); })
    return net.shares();
  else
    return net.devices();
}
/// The number of samples of a whole batch that the i-th of these gets.
template <class Net>
chorus::Index samples_of_device(const Net& net, const TrainingOptions& options, int i) {
  const auto devices = static_cast<std::size_t>(shares_of_batch(net));
  auto shares = devices;
  if constexpr (in_shares<Net>) shares = static_cast<std::size_t>(net.canonical_shares());
  const auto own = chorus::same_bits::shares_of_device(shares, devices, static_cast<std::size_t>(i));
  return chorus::share_begin(options.batch, shares, own.end) - chorus::share_begin(options.batch, shares, own.begin);
}

/// A fingerprint of the net's parameters; empty in a program built without OpenSSL. All ranks call it.
template <class Net>
std::string fingerprint(Net& net) {
  if (!chorus::io::Sha256::available) return "";
  const chorus::trace::PeakKept training_alone(chorus::trace_slot(net, 0));
  return chorus::io::parameters_sha256(net);
}

/// The last line of the metrics file.
template <class Net>
chorus::RunSummary run_summary(Net& net, const TrainingOptions& options, double samples, double seconds) {
  return {.policy = options.policy,
          .devices = net.devices(),
          .canonical_shares = options.canonical_shares,
          .samples_per_second = seconds > 0 ? samples / seconds : 0,
          .bytes_sent_per_device = per_device(net, [&](int i) { return chorus::trace::bytes_sent(chorus::trace_place(net, i)); }),
          .peak_memory_bytes_per_device =
              per_device(net, [&](int i) { return chorus::trace::memory(chorus::trace_slot(net, i)).peak; }),
          .parameters_sha256 = fingerprint(net)};
}

/// The progress of a run, counted as in a checkpoint.
struct Position {
  chorus::Index epoch = 0;  ///< complete epochs
  chorus::Index batch = 0;  ///< complete batches of the next epoch
  chorus::Index step = 0;   ///< optimizer steps in total
};

/// Everything in a training run except training:
///
///   for (const int epoch : training.epochs()) {
///     for (auto& batch : training.batches(epoch)) {
///       ...                                        // zero_grad, forward, backward, step
///       training.note(loss.item(), samples);
///     }
///     training.end_epoch();
///   }
///   training.end();
///
/// `Loader` is a range of batches with size() and set_epoch(epoch), and skip(batches) if it resumes at a `from.batch`.
/// `summary(model)` makes the table that is printed first. All ranks make the same calls.
template <class Net, class Loader>
class Training {
  using Model = typename Net::model_type;

 public:
  Training(chorus::Run& run, Net& net, NamedOptimizer<Net>& optimizer, Loader& loader, const TrainingOptions& options,
           const Position& from = {}, const std::function<std::string(Model&)>& summary = {})
      : net_(net),
        optimizer_(optimizer),
        loader_(loader),
        options_(options),
        at_(from),
        talks_(run.is_main() && !options.quiet),
        metrics_(run.is_main() ? chorus::MetricsFiles{options.metrics, options.csv, options.tensorboard}
                               : chorus::MetricsFiles{}),
        progress_({.enabled = talks_,
                   .epochs = static_cast<int>(options.epochs),
                   .first_epoch = static_cast<int>(from.epoch)}),
        losses_(net, metrics_, progress_),
        early_stopping_(static_cast<int>(options.patience)) {
    losses_.start_at(from.step);
    tell_trace();
    const chorus::trace::PeakKept training_alone(chorus::trace_slot(net, 0));
    net.gathered([&](Model& model) {
      if (talks_) std::printf("%s\n", (summary ? summary(model) : chorus::nn::summary(model)).c_str());
    });
    if (!talks_) return;
    const chorus::Index least = samples_of_device(net, options, shares_of_batch(net) - 1),
                        most = samples_of_device(net, options, 0);
    if (options.canonical_shares > 0)
      std::printf("%td samples in %d canonical shares: each of %d devices has %td to %td\n\n", options.batch,
                  options.canonical_shares, net.devices(), least, most);
    else if (least != most)
      std::printf("%td samples on %d devices: each has %td or %td, and its gradient counts by them\n\n", options.batch,
                  shares_of_batch(net), least, most);
    std::fflush(stdout);
  }

  /// Calls `save(position)` after each epoch and, unless `every` is 0, every `every` steps.
  void save_with(std::function<void(const Position&)> save, chorus::Index every) {
    save_ = std::move(save);
    save_every_ = every;
  }

  /// The remaining epochs, up to the one that reaches --steps.
  auto epochs() {
    return Until{progress_.begin(), stopped_, [] {}};
  }

  /// The remaining batches of an epoch, up to the step that reaches --steps. Sets the learning rate before each.
  auto batches(int epoch) {
    start_ = Clock::now();
    epoch_ = epoch;
    loader_.set_epoch(epoch);
    if constexpr (requires { loader_.skip(at_.batch); }) loader_.skip(at_.batch);
    return Until{loader_.begin(), stopped_,
                 [this, epoch] { optimizer_.plain().set_lr(rate(options_, epoch, at_.step)); }};
  }

  /// A batch with mean loss `loss` over this rank's `samples` is done; and, if `ends_step`, its step.
  void note(double loss, chorus::Index samples, bool ends_step = true) {
    losses_.add(loss, samples, at_.batch, loader_.size(), ends_step);
    ++at_.batch;
    if (!ends_step) return;
    ++at_.step;
    if (save_every_ > 0 && at_.step % save_every_ == 0) save_(at_);
    stopped_ = options_.steps > 0 && at_.step >= options_.steps;
  }

  /// The epoch is over.
  void end_epoch() {
    const double loss = sum_up();
    metrics_.epoch(epoch_, loss, 0, seconds());
    if (talks_) std::printf("epoch %d: mean loss %.4f\n", epoch_ + 1, loss);
  }
  /// The same if `accuracy()` tests the model.
  template <class Accuracy>
  void end_epoch(const Accuracy& accuracy) {
    const double loss = sum_up();
    const double right = accuracy();  // in evaluation all ranks have the same model under every policy
    chorus::check(net_.same_on_all_ranks(fingerprint(net_)), "training: the ranks' parameters differ after epoch ",
                  epoch_, ": this is a bug");
    metrics_.epoch(epoch_, loss, right, seconds());
    if (talks_) std::printf("epoch %d: training loss %.4f, test accuracy %.2f %%\n", epoch_ + 1, loss, 100 * right);
    if (save_) save_(at_);
    if (!early_stopping_.stops(right)) return;
    stopped_ = true;
    if (talks_)
      std::printf("no better test accuracy than %.2f %% in the last %td epochs: stopped\n",
                  100 * early_stopping_.best(), options_.patience);
  }

  /// The run is over.
  void end() { metrics_.done(run_summary(net_, options_, samples_, training_seconds_)); }

 private:
  using Clock = std::chrono::steady_clock;

  /// A range that also ends when the loop's body sets `stopped`. Calls `prepare` before each element.
  template <class Inner, class Prepare>
  struct Until {
    Inner inner;
    const bool& stopped;
    Prepare prepare;

    Until& begin() { return *this; }
    std::default_sentinel_t end() const { return {}; }
    decltype(auto) operator*() {
      prepare();
      return *inner;
    }
    Until& operator++() {
      if (!stopped) ++inner;
      return *this;
    }
    bool operator==(std::default_sentinel_t end) const { return stopped || inner == end; }
  };
  template <class Inner, class Prepare>
  Until(Inner, const bool&, Prepare) -> Until<Inner, Prepare>;

  /// Notes facts in the trace for the advice.
  void tell_trace() const {
    auto* const trace = chorus::trace::step_counter();
    if (trace == nullptr) return;
    trace->note("batch", chorus::cat(options_.batch));
    trace->note("lr", chorus::cat(options_.lr));
    trace->note("optimizer", chorus::cat('"', options_.optimizer, '"'));
  }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  /// Ends the epoch's training, and returns its mean loss.
  double sum_up() {
    losses_.flush();
    samples_ += losses_.samples();
    const double mean = losses_.epoch_mean();
    training_seconds_ += seconds();
    const bool complete = !stopped_ || at_.batch >= loader_.size();
    if (complete) at_ = {.epoch = epoch_ + 1, .batch = 0, .step = at_.step};
    return mean;
  }

  Net& net_;
  NamedOptimizer<Net>& optimizer_;
  Loader& loader_;
  const TrainingOptions& options_;
  Position at_;
  bool talks_, stopped_ = false;
  chorus::MetricsLog metrics_;
  chorus::Progress progress_;
  StepLosses<Net> losses_;
  EarlyStopping early_stopping_;
  std::function<void(const Position&)> save_;
  chorus::Index save_every_ = 0;
  Clock::time_point start_{};
  int epoch_ = 0;
  double samples_ = 0, training_seconds_ = 0;
};

/// For programs that save only the weights, to --save. All ranks call it.
template <class Net>
void save_weights(Net& net, const TrainingOptions& options) {
  if (!options.save.empty()) chorus::io::save(net, options.save);
}
