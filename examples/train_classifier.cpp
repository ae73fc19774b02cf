/// Trains an image classifier under a parallel policy that is chosen at run time: the main example of chorus.

#include <algorithm>
#include <chorus/data/open_images.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "models.hpp"
#include "training.hpp"

namespace ch = chorus;
using Model = Classifier<ch::Cpu>;

struct Options : TrainingOptions {
  std::string model = "toy", data = "synthetic", resume;
  ch::Index train_images = 8000, test_images = 2000, save_every = 0;
  int workers = 1;
  bool augment = false;
};

namespace {

/// The share of test images that the model names right, over all ranks.
template <class Net>
double accuracy(Net& net, const ch::data::ImageDataset& test, const Options& options) {
  const ch::NoGrad no_grad;
  net.eval();
  ch::data::DataLoader loader{test,
                              net.sampler(test, {.shuffle = false}),
                              {.batch = std::max<ch::Index>(options.batch, 256), .workers = options.workers}};
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

template <class Net>
void train(ch::Run& run, const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto dataset = [&](ch::data::Split split) -> ch::data::ImageDataset {
    if (options.data != "synthetic") return ch::data::open_images(options.data, split);
    return ch::data::SyntheticImages{split == ch::data::Split::train ? options.train_images : options.test_images,
                                     options.seed, split};
  };
  const auto train_set = dataset(ch::data::Split::train), test_set = dataset(ch::data::Split::test);
  const auto [channels, height, width] = train_set.image_shape();
  Net net{typename Net::model_type{options.model, ImageFacts{channels, height, width, train_set.classes()}}, run};
  auto optimizer = make_optimizer(net, options);
  ch::io::TrainingPosition position;
  auto resume = options.resume;
  if (resume == "auto") {  // what rank 0 finds counts for all
    double saved[] = {run.is_main() && !options.save.empty() && std::filesystem::exists(options.save) ? 1.0 : 0.0};
    net.sum(saved);
    resume = saved[0] > 0 ? options.save : "";
  }
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
  ch::Progress progress{{.enabled = run.is_main() && !options.quiet,
                         .epochs = static_cast<int>(options.epochs),
                         .first_epoch = static_cast<int>(position.epoch)}};
  StepLosses losses{net, metrics, progress};
  losses.start_at(position.step);
  const auto save = [&] {
    if (run.is_main() && !options.save.empty()) ch::io::save_checkpoint(net, *optimizer, position, options.save);
  };

  double training_seconds = 0, trained_samples = 0;
  bool stopped = false;
  for (const int epoch : progress) {
    const auto start = Clock::now();
    loader.set_epoch(epoch);
    loader.skip(position.batch);
    for (auto& [images, labels] : loader) {
      optimizer->set_lr(rate(options, epoch, position.step));
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
    ch::check(net.same_on_all_ranks(fingerprint(net.module())), "the ranks' parameters differ after epoch ", epoch,
              ": this is a bug");
    const double test_accuracy = accuracy(net, test_set, options);
    metrics.epoch(epoch, train_loss, test_accuracy, std::chrono::duration<double>(Clock::now() - start).count());
    if (run.is_main() && !options.quiet)
      std::printf("epoch %d: training loss %.4f, test accuracy %.2f %%\n", epoch + 1, train_loss, 100 * test_accuracy);
    save();
    if (options.steps > 0 && position.step >= options.steps) break;
  }
  metrics.done(run_summary(net, trained_samples, training_seconds));
}

constexpr const char* description =
    R"(Trains an image classifier. The same model and the same loop run under three policies:

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
  // At its full rate, early training multiplies differences: rounding errors of different policies would part their
  // ways.
  options.warmup = 300;
  CLI::App app{description, "train_classifier"};
  add_options(app, options);
  app.add_option("--model", options.model, "toy (LeNet's form), mlp (with dropout), resnet18 or resnet50")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(Model::names), std::end(Model::names))))
      ->capture_default_str();
  app.add_option("--data", options.data,
                 "'synthetic', or a folder with MNIST's IDX files (also .gz) or CIFAR-10's binary batches")
      ->capture_default_str();
  app.add_flag("--augment", options.augment, "shift and mirror training images");
  app.add_option("--train-images", options.train_images, "generated images for training")
      ->check(in_range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--test-images", options.test_images, "generated images for testing")
      ->check(in_range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--workers", options.workers, "threads that prepare batches; 0: none")
      ->check(in_range(0, 64))
      ->capture_default_str();
  app.add_option("--save", options.save, "checkpoint file, written after each epoch");
  app.add_option("--save-every", options.save_every, "write it every so many steps, too")
      ->check(in_range(ch::Index{0}));
  app.add_option("--resume", options.resume,
                 "checkpoint file to go on from, saved under any policy; auto: that of --save, once it is there");
  if (const auto status = parse(app, argc, argv, options)) return *status;
  return launch<Model>(argc, argv, options,
                       [&]<class Net>(std::type_identity<Net>, ch::Run& run) { train<Net>(run, options); });
}
