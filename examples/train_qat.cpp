/// Trains a ResNet in float, continues with the rounding of 8-bit integers, and converts it to an integer model: prints
/// accuracy, size and time of the three in one table. Under DistributedDataParallel the ranges of activations are the
/// global batch's, so the integers do not depend on the number of ranks, except through the rounding of gradients.
///   train_qat [--data DIR] [--devices 2] [--model resnet] [--width 16] [--epochs 3] [--qat-epochs 2] [--batch 64]
///             [--lr 0.05] [--load FILE] [--save FOLDER]
///   train_qat --int8 FOLDER/model.int8.safetensors [--data DIR] [--devices 2]
/// DIR: MNIST's or CIFAR-10's files; without it images are generated. Models: `resnet`, which is ResNet-18 for width
/// 64, and train_classifier's `toy`. `--load` loads a float model instead of training one: from train_classifier's
/// --save, or model.float.safetensors of an earlier run. `--save` keeps both models; without it nothing is written.
/// `--int8` evaluates an integer model, without training.
#include <algorithm>
#include <chorus/chorus.hpp>
#include <chorus/data/open_images.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/quantization/quantized.hpp>
#include <chorus/quantization/quantized_file.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "models.hpp"

namespace ch = chorus;

namespace {

/// One of the models, by name.
struct Model : ch::nn::Module {
  using device_type = ch::Cpu;
  using Any = std::variant<ch::nn::ResNet18<ch::Cpu>, ToyModel<ch::Cpu>>;
  Any any;

  explicit Model(Any model) : any{std::move(model)} {}
  auto forward(const auto& images) const {
    return std::visit([&](const auto& chosen) { return chosen.forward(images); }, any);
  }
  auto operator()(const auto& images) const { return forward(images); }
  void visit(ch::nn::Visitor& visitor) override {
    std::visit(
        [&](auto& chosen) {
          visitor.inner(chosen);
          chosen.visit(visitor);
        },
        any);
  }
  std::string describe() const override {
    return std::visit([](const auto& chosen) { return chosen.describe(); }, any);
  }
};
Model make_model(ch::Run& run, const ImageFacts& image) {
  const auto name = run.option("model", "resnet");
  const auto width = run.option("width", ch::Index{16});
  if (name == "toy") return Model{ToyModel<ch::Cpu>{image}};
  ch::check<ch::UsageError>(name == "resnet", "--model: expected resnet or toy, got '", ch::printable(name), "'");
  auto options = resnet_options(image);
  options.width = width;
  return Model{ch::nn::ResNet18<ch::Cpu>{options}};
}

using FloatNet = ch::DistributedDataParallel<Model>;  // or SingleDevice, DataParallel
using QatNet = ch::DistributedDataParallel<ch::nn::QuantizationAware<Model>>;

struct Options {
  ch::Index batch;
  double lr;
};

/// Calls `begin_epoch(epoch)` before each epoch.
template <class Net, class Begin>
void train(ch::Run& run, Net& net, const ch::data::ImageDataset& images, int epochs, const Options& options,
           const Begin& begin_epoch) {
  ch::data::DataLoader loader{images, net.sampler(images), {.batch = options.batch, .workers = 1}};
  ch::optim::Sgd optimizer{net.parameters(), {.lr = options.lr, .momentum = 0.9, .weight_decay = 1e-4}};
  for (const int epoch : ch::progress(run, epochs)) {
    begin_epoch(epoch);
    optimizer.set_lr(ch::optim::CosineAnnealing{.t_max = epochs}(options.lr, epoch));
    loader.set_epoch(epoch);
    for (auto& [batch, labels] : loader) {
      optimizer.zero_grad();
      ch::cross_entropy(net(batch), labels).backward();
      optimizer.step();
    }
  }
}

/// The percentage of images that `classify` classifies correctly, over all ranks.
template <class Net, class Classify>
double accuracy(Net& net, const ch::data::ImageDataset& images, Classify& classify) {
  const ch::NoGrad no_grad;
  ch::data::DataLoader loader{images, net.sampler(images, {.shuffle = false}), {.batch = 256, .workers = 1}};
  double right_and_all[2] = {};
  for (auto& [batch, labels] : loader) {
    const auto answers = ch::argmax(classify(batch), 1);
    for (ch::Index i = 0; i < labels.numel(); ++i) right_and_all[0] += answers(i) == labels(i) ? 1 : 0;
    right_and_all[1] += static_cast<double>(labels.numel());
  }
  net.sum(right_and_all);
  return 100 * right_and_all[0] / std::max(1.0, right_and_all[1]);
}

/// The median time of `classify` on one thread, in milliseconds.
template <class Classify>
double milliseconds(const ch::Tensor<float, 4>& images, const Classify& classify) {
  const ch::NoGrad no_grad;
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {
    const auto start = std::chrono::steady_clock::now();
    classify(images);
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + 7, times.end());
  return times[7];
}

ch::data::ImageDataset open(ch::Run& run, ch::data::Split split) {
  const auto folder = run.option("data", "synthetic");
  if (folder != "synthetic") return ch::data::open_images(folder, split);
  const bool trains = split == ch::data::Split::train;
  return ch::data::SyntheticImages{run.option(trains ? "train-images" : "test-images", ch::Index{trains ? 4000 : 1000}),
                                   1, split};
}

/// The folder of the models' files on rank 0: that of --save, or a temporary one.
class Files {
 public:
  explicit Files(std::string folder) : folder_(std::move(folder)), is_own_(folder_.empty()) {
    if (!is_own_) return;
    folder_ = (std::filesystem::temp_directory_path() / "train_qat_XXXXXX").string();
    ch::check<ch::FileError>(::mkdtemp(folder_.data()) != nullptr, "train_qat: cannot make a folder in ",
                             std::filesystem::temp_directory_path().string());
  }
  ~Files() {
    std::error_code ignored;
    if (is_own_) std::filesystem::remove_all(folder_, ignored);
  }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;
  std::string path(const char* name) const { return folder_ + "/" + name; }

 private:
  std::string folder_;
  bool is_own_;
};

/// Prints the accuracy of an integer model from a file, and does nothing else.
void evaluate(ch::Run& run, const std::string& file) {
  const auto int8 = ch::io::load_quantized(file);
  const auto test_set = open(run, ch::data::Split::test);
  const auto [channels, height, width] = test_set.image_shape();
  // The policy gives each rank its share of the images.
  FloatNet net{make_model(run, {channels, height, width, test_set.classes()}), run};
  const double right = accuracy(net, test_set, int8);
  if (run.rank() == 0) std::printf("int8             %7.2f %%\n", right);
}

void work(ch::Run& run) {
  if (const auto file = run.option("int8", ""); !file.empty()) return evaluate(run, file);
  const auto train_set = open(run, ch::data::Split::train), test_set = open(run, ch::data::Split::test);
  const auto [channels, height, width] = train_set.image_shape();
  const Options options{run.option("batch", ch::Index{64}), run.option("lr", 0.05)};
  const int epochs = run.option("epochs", 3), qat_epochs = run.option("qat-epochs", 2);
  const std::string save = run.option("save", ""), load = run.option("load", "");

  // 1. In float.
  FloatNet net{make_model(run, {channels, height, width, train_set.classes()}), run};
  if (load.empty())
    train(run, net, train_set, epochs, options, [](int) {});
  else
    ch::io::load(net, load);
  net.eval();
  const double float_accuracy = accuracy(net, test_set, net);

  // 2. Continue with the rounding of integers, at a tenth of the rate. At the end, ranges and statistics are fixed.
  QatNet qat{ch::nn::QuantizationAware<Model>{ch::nn::copy_of(net.module())}, run};
  train(run, qat, train_set, qat_epochs, {options.batch, options.lr / 10}, [&](int epoch) {
    if (epoch != qat_epochs - 1 || epoch == 0) return;
    qat.module().observe(false);
    qat.module().freeze_norms();
  });
  qat.eval();
  const double qat_accuracy = accuracy(qat, test_set, qat);

  // 3. In integers: every rank has the same model.
  const auto some = ch::Tensor<float, 4>::zeros({32, channels, height, width});
  const auto one = ch::Tensor<float, 4>::zeros({1, channels, height, width});
  const auto int8 = ch::nn::quantized(qat.module(), one);
  const double int8_accuracy = accuracy(qat, test_set, int8);

  if (run.rank() != 0) return;
  const Files files(save);
  const auto float_file = files.path("model.float.safetensors"), int8_file = files.path("model.int8.safetensors");
  ch::io::save(net.module(), float_file);
  ch::io::save(int8, int8_file);
  const auto mebibytes = [](const std::string& path) {
    return static_cast<double>(std::filesystem::file_size(path)) / (1 << 20);
  };
  const auto line = [&](const char* name, double right, double size, const auto& classify) {
    std::printf("%-16s %7.2f %%", name, right);
    if (size > 0)
      std::printf(" %8.2f MiB %9.3f ms %9.2f ms", size, milliseconds(one, classify), milliseconds(some, classify));
    std::printf("\n");
  };
  std::printf("\n%-16s %9s %12s %12s %12s\n", "", "accuracy", "file", "batch 1", "batch 32");
  line("float", float_accuracy, mebibytes(float_file), net.module());
  line("fake-quantised", qat_accuracy, 0, net.module());
  line("int8", int8_accuracy, mebibytes(int8_file), int8);
}

}  // namespace

int main(int argc, char** argv) {
  return ch::launch<QatNet>(argc, argv, [](ch::Run& run) { work(run); });
}
