/// Trains an image classifier under a parallel policy that is chosen at run time: the main example of chorus.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <chorus/data/open_images.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/parameters_hash.hpp>

#include "models.hpp"

namespace ch = chorus;

struct Options {
  std::string policy = "single", model = "toy", data = "synthetic", optimizer = "sgd", schedule = "none";
  std::optional<int> devices;
  ch::Index batch = 64, epochs = 5, train_images = 8000, test_images = 2000, steps = 0, save_every = 0;
  std::uint64_t seed = 1;
  double lr = 0.02, momentum = 0.9, weight_decay = 0, clip = 0;
  std::optional<double> timeout;
  int workers = 1;
  bool augment = false, quiet = false;
  std::string metrics, save, resume;
};

namespace {

/// The optimizer that the options name.
template <class Net>
auto make_optimizer(Net& net, const Options& options) -> std::unique_ptr<ch::optim::Optimizer<typename Net::device_type>> {
  using D = typename Net::device_type;
  if (options.optimizer == "adam")
    return std::make_unique<ch::optim::Adam<D>>(
        net.parameters(), ch::optim::AdamOptions{.lr = options.lr, .weight_decay = options.weight_decay});
  return std::make_unique<ch::optim::Sgd<D>>(
      net.parameters(),
      ch::optim::SgdOptions{.lr = options.lr, .momentum = options.momentum, .weight_decay = options.weight_decay});
}

double rate(const Options& options, int epoch) {
  if (options.schedule == "step") return ch::optim::StepDecay{.step_size = std::max(1, static_cast<int>(options.epochs) / 3)}(options.lr, epoch);
  if (options.schedule == "cosine") return ch::optim::CosineAnnealing{.t_max = static_cast<int>(options.epochs)}(options.lr, epoch);
  return options.lr;
}

/// The share of test images that the model names right, over all ranks.
template <class Net>
double accuracy(Net& net, const ch::data::ImageDataset& test, const Options& options) {
  const ch::NoGrad no_grad;
  net.eval();
  ch::data::DataLoader loader{test, net.sampler(test, {.shuffle = false}), {.batch = std::max<ch::Index>(options.batch, 256), .workers = options.workers}};
  double right_and_all[2] = {};
  for (auto& [images, labels] : loader) {
    const auto answers = ch::argmax(net(images), 1);
    for (ch::Index i = 0; i < labels.numel(); ++i) right_and_all[0] += answers(i) == labels(i) ? 1 : 0;
    right_and_all[1] += static_cast<double>(labels.numel());
  }
  net.train();
  net.sum(right_and_all);
  return right_and_all[1] == 0 ? 0 : right_and_all[0] / right_and_all[1];
}

/// Losses of steps on their way into the metrics file: each rank knows its share alone, so they are summed over the ranks,
/// many at a time.
template <class Net>
class StepLosses {
 public:
  StepLosses(Net& net, ch::MetricsLog& metrics, ch::Progress& progress) : net_(net), metrics_(metrics), progress_(progress) {}

  void add(double loss, ch::Index samples, ch::Index index, ch::Index batches) {
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
      progress_.step(loss, static_cast<ch::Index>(samples), places_[i].first, places_[i].second);
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
  ch::MetricsLog& metrics_;
  ch::Progress& progress_;
  std::vector<double> sums_;
  std::vector<std::pair<ch::Index, ch::Index>> places_;
  std::int64_t next_step_ = 0;
  double epoch_loss_ = 0, epoch_samples_ = 0;
};

/// What the run moved and held, for each device or rank.
template <class Net>
std::vector<std::uint64_t> per_device(Net& net, std::uint64_t (*measure)(int device, int rank)) {
  std::vector<double> values(static_cast<std::size_t>(net.devices()));
  if constexpr (Net::distributed) {
    const int rank = net.communicator().rank();
    values[static_cast<std::size_t>(rank)] = static_cast<double>(measure(0, rank));
    net.sum(values);
  } else {
    for (int i = 0; i < net.devices(); ++i) values[static_cast<std::size_t>(i)] = static_cast<double>(measure(i, i));
  }
  return {values.begin(), values.end()};
}

template <class Net>
void train(ch::Run& run, const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto dataset = [&](ch::data::Split split) -> ch::data::ImageDataset {
    if (options.data != "synthetic") return ch::data::open_images(options.data, split);
    return ch::data::SyntheticImages{split == ch::data::Split::train ? options.train_images : options.test_images, options.seed, split};
  };
  const auto train_set = dataset(ch::data::Split::train), test_set = dataset(ch::data::Split::test);
  const auto [channels, height, width] = train_set.image_shape();
  Net net{typename Net::model_type{ImageFacts{channels, height, width, train_set.classes()}}, run};
  auto optimizer = make_optimizer(net, options);
  ch::io::TrainingPosition position;
  const bool go_on = options.resume == "auto" && !options.save.empty() && std::filesystem::exists(options.save);
  const std::string resume = options.resume != "auto" ? options.resume : go_on ? options.save : "";
  if (!resume.empty()) position = ch::io::load_checkpoint(net, *optimizer, resume);

  ch::data::LoaderOptions loading{.batch = options.batch, .workers = options.workers};
  if (options.augment) loading.transforms = {ch::data::RandomCrop{4}, ch::data::RandomHorizontalFlip{}};
  ch::data::DataLoader loader{train_set, net.sampler(train_set), loading};

  // Files are opened when all else is known to be right: a mistake leaves old ones as they were.
  if (run.is_main() && !options.save.empty()) ch::io::AtomicFile{options.save};  // throws now, not after an epoch
  ch::MetricsLog metrics{run.is_main() ? options.metrics : std::string()};
  if (run.is_main() && !options.quiet) {
    std::printf("%s\n", ch::nn::summary(net.module()).c_str());
    std::fflush(stdout);
  }
  ch::Progress progress{{.enabled = run.is_main() && !options.quiet, .epochs = static_cast<int>(options.epochs), .first_epoch = static_cast<int>(position.epoch)}};
  StepLosses losses{net, metrics, progress};
  losses.start_at(position.step);
  const auto save = [&] {
    if (run.is_main() && !options.save.empty()) ch::io::save_checkpoint(net, *optimizer, position, options.save);
  };

  double training_seconds = 0, trained_samples = 0;
  std::string hash = ch::io::parameters_sha256(net.module());
  bool stopped = false;
  for (const int epoch : progress) {
    const auto start = Clock::now();
    optimizer->set_lr(rate(options, epoch));
    loader.set_epoch(epoch);
    loader.skip(position.batch);
    for (auto& [images, labels] : loader) {
      optimizer->zero_grad();
      const auto loss = ch::cross_entropy(net(images), labels);
      loss.backward();
      if (options.clip > 0) ch::optim::clip_grad_norm(net.parameters(), options.clip);
      optimizer->step();
      losses.add(loss.item(), labels.numel(), position.batch, loader.size());
      ++position.batch;
      ++position.step;
      if (options.save_every > 0 && position.step % options.save_every == 0) save();
      if (options.steps > 0 && position.step >= options.steps) {
        stopped = position.batch < loader.size();
        break;
      }
    }
    losses.flush();
    trained_samples += losses.samples();
    const double train_loss = losses.epoch_mean();
    training_seconds += std::chrono::duration<double>(Clock::now() - start).count();
    if (!stopped) position = {.epoch = epoch + 1, .batch = 0, .step = position.step};
    hash = ch::io::parameters_sha256(net.module());
    ch::check(net.same_on_all_ranks(hash), "the ranks' parameters differ after epoch ", epoch, ": this is a bug");
    const double test_accuracy = accuracy(net, test_set, options);
    metrics.epoch(epoch, train_loss, test_accuracy, std::chrono::duration<double>(Clock::now() - start).count());
    if (run.is_main() && !options.quiet) std::printf("epoch %d: training loss %.4f, test accuracy %.2f %%\n", epoch + 1, train_loss, 100 * test_accuracy);
    save();
    if (options.steps > 0 && position.step >= options.steps) break;
  }
  metrics.done({.policy = Net::name,
                .devices = net.devices(),
                .samples_per_second = training_seconds > 0 ? trained_samples / training_seconds : 0,
                .bytes_sent_per_device = per_device(net, [](int, int rank) { return ch::trace::bytes_sent(rank); }),
                .peak_memory_bytes_per_device = per_device(net, [](int device, int) { return std::uint64_t{ch::trace::memory(device).peak}; }),
                .parameters_sha256 = hash});
}

template <template <class> class Model>
int launch(int argc, char** argv, const Options& options) {
  ch::LaunchOptions launching{.devices = options.devices,
                                    .seed = options.seed,
                                    .timeout = {}};
  if (options.timeout) launching.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(*options.timeout * 1000));
  const auto with = [&]<class Net>(std::type_identity<Net>) {
    return ch::launch<Net>(argc, argv, launching, [&](ch::Run& run) { train<Net>(run, options); });
  };
  if (options.policy == "dp") return with(std::type_identity<ch::DataParallel<Model<ch::Cpu>>>{});
  if (options.policy == "ddp") return with(std::type_identity<ch::DistributedDataParallel<Model<ch::Cpu>>>{});
  return with(std::type_identity<ch::SingleDevice<Model<ch::Cpu>>>{});
}

constexpr const char* description = R"(Trains an image classifier. The same model and the same loop run under three policies:

  single  one device
  dp      DataParallel: one process, several devices. Each batch is scattered to copies of the model,
          outputs are gathered, gradients are summed to the first device, the step is made there.
  ddp     DistributedDataParallel: one process per device. Gradients are averaged over all processes
          while backward runs; every process makes the same step.

With the same seed and the same --batch, which is the whole batch of all devices together, all three
take the same steps, up to rounding.

  train_classifier                                          one device, generated images
  train_classifier --policy ddp --devices 2                 starts two processes
  train_classifier --policy dp --devices 3 --data DIR       DIR: MNIST's or CIFAR-10's files
  torchrun --nproc-per-node 2 --no-python train_classifier --policy ddp
  mpirun -np 2 train_classifier --policy ddp                joins processes that others have started)";

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{description, "train_classifier"};
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // so that a script's options can be overridden
  app.add_option("--policy", options.policy, "single, dp or ddp")->check(CLI::IsMember({"single", "dp", "ddp"}))->capture_default_str();
  app.add_option("--devices", options.devices, "devices; under ddp, processes (default: 2 for dp and ddp)")->check(CLI::Range(1, 64));
  app.add_option("--model", options.model, "toy (LeNet's form) or mlp (with dropout)")->check(CLI::IsMember({"toy", "mlp"}))->capture_default_str();
  app.add_option("--data", options.data, "'synthetic', or a folder with MNIST's IDX files (also .gz) or CIFAR-10's binary batches")->capture_default_str();
  app.add_option("--batch", options.batch, "samples in a batch, over all devices")->check(CLI::Range(1, 1 << 24))->capture_default_str();
  app.add_option("--epochs", options.epochs, "passes over the data")->check(CLI::Range(0, 1 << 20))->capture_default_str();
  app.add_option("--seed", options.seed, "seed of everything random")->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "sgd or adam")->check(CLI::IsMember({"sgd", "adam"}))->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--momentum", options.momentum, "sgd's momentum")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay, "weight decay")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--schedule", options.schedule, "none, step (a tenth after each third of the run) or cosine")->check(CLI::IsMember({"none", "step", "cosine"}))->capture_default_str();
  app.add_option("--clip", options.clip, "largest norm of the gradient; 0: any")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_flag("--augment", options.augment, "shift and mirror training images");
  app.add_option("--train-images", options.train_images, "generated images for training")->check(CLI::Range(1, 1 << 24))->capture_default_str();
  app.add_option("--test-images", options.test_images, "generated images for testing")->check(CLI::Range(1, 1 << 24))->capture_default_str();
  app.add_option("--workers", options.workers, "threads that prepare batches; 0: none")->check(CLI::Range(0, 64))->capture_default_str();
  app.add_option("--metrics", options.metrics, "file for the run's numbers, as JSON lines");
  app.add_option("--save", options.save, "checkpoint file, written after each epoch");
  app.add_option("--save-every", options.save_every, "write it every so many steps, too")->check(CLI::NonNegativeNumber);
  app.add_option("--resume", options.resume, "checkpoint file to go on from, saved under any policy; auto: that of --save, once it is there");
  app.add_option("--steps", options.steps, "stop after so many steps in all; 0: don't")->check(CLI::NonNegativeNumber);
  app.add_option("--timeout", options.timeout, "seconds that a process waits for another one (default: CHORUS_TIMEOUT, else 60)")->check(CLI::Range(0.001, 1e6));
  app.add_flag("--quiet", options.quiet, "no progress, no summary");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (options.policy == "single" && options.devices.value_or(1) != 1) {
    std::fprintf(stderr, "train_classifier: --policy single has one device, got --devices %d: choose dp or ddp\n", *options.devices);
    return 2;
  }
  return options.model == "mlp" ? launch<Mlp>(argc, argv, options) : launch<ToyModel>(argc, argv, options);
}
