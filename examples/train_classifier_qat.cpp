/// train_classifier --qat: training with the rounding of 8-bit integers, and the resulting integer model. A separate
/// file, because the other model type means that each policy is compiled once more.

#include <algorithm>
#include <chorus/io/load_model.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/quantization/quantized.hpp>
#include <chorus/quantization/quantized_file.hpp>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "accumulation.hpp"
#include "train_classifier.hpp"

namespace {

/// The models that have an integer form and compile quickly.
struct FloatModel : OneOf<ch::Cpu, ToyModel<ch::Cpu>, Mlp<ch::Cpu>, ch::nn::ResNet18<ch::Cpu>> {
  FloatModel(std::string_view name, const ImageFacts& image) : OneOf{make(name, image)} {}

 private:
  static decltype(OneOf::model) make(std::string_view name, const ImageFacts& image) {
    if (name == "toy") return ToyModel<ch::Cpu>{image};
    if (name == "mlp") return Mlp<ch::Cpu>{image};
    return ch::nn::ResNet18<ch::Cpu>(resnet_options(image));
  }
};
using Model = ch::nn::QuantizationAware<FloatModel>;

/// Loads the net from the file of --load, which may be a float model's, without ranges.
template <class Net>
void load(Net& net, const Options& options) {
  if (options.load.empty()) return;
  auto report = ch::io::load(net, options.load, {.strict = false});
  std::erase_if(report.missing, [](const std::string& name) { return name.starts_with("quantization."); });
  ch::check<ch::FileError>(report.complete(), "--load ", ch::printable(options.load), ": expected a file of --model ",
                           options.model, ", got other tensors: ", report);
}

/// The file for --int8: "model.int8.st" for "model.st". Empty if nothing is saved.
std::string integer_file(const Options& options) {
  const std::filesystem::path path = options.save;
  if (path.empty() || !options.int8) return "";
  return path.parent_path() / (path.stem().string() + ".int8" + path.extension().string());
}

/// The integer model: prints its accuracy next to its source's, and writes its file. All ranks call it.
template <class Net>
void make_integers(ch::Run& run, Net& net, const ch::data::ImageDataset& test, const Options& options) {
  const auto [channels, height, width] = test.image_shape();
  const auto image = ch::Tensor<float, 4>::zeros({1, channels, height, width});
  std::optional<ch::nn::QuantizedModel> integers;
  net.gathered([&](Model& model) { integers = ch::nn::quantized(model, image); });
  const auto file = integer_file(options);
  if (run.is_main() && !file.empty()) ch::io::save(*integers, file);

  const double in_integers = accuracy(net, test, options, *integers), rounded = accuracy(net, test, options, net);
  net.module().fake_quantize(false);
  const double in_float = accuracy(net, test, options, net);
  net.module().fake_quantize(true);
  if (!run.is_main()) return;
  std::printf("test accuracy: %.2f %% in float, %.2f %% with the rounding of 8 bits, %.2f %% in integers\n",
              100 * in_float, 100 * rounded, 100 * in_integers);
  if (!file.empty())
    std::printf("%s: %.2f MiB\n", ch::printable(file).c_str(),
                static_cast<double>(std::filesystem::file_size(file)) / (1 << 20));
}

template <class Net>
void train(ch::Run& run, const Options& options) {
  const auto train_set = open_dataset(options, ch::data::Split::train),
             test_set = open_dataset(options, ch::data::Split::test);
  const auto [channels, height, width] = train_set.image_shape();
  const ImageFacts images{channels, height, width, train_set.classes()};
  Net net = make_net<Net>(Model{FloatModel{options.model, images}}, run, options);
  load(net, options);
  NamedOptimizer optimizer{net, options};
  const Position start = resume(run, net, optimizer, options);
  ch::data::DataLoader loader{train_set, net.sampler(train_set), loading(options)};
  check_save(run, options);
  if (const auto file = integer_file(options); run.is_main() && !file.empty()) ch::io::AtomicFile{file};
  Training training{run, net, optimizer, loader, options, start};
  Accumulation accumulation{net, train_set.size(), options.batch, options.accumulate, start.batch};
  training.save_with([&](const Position& at) { save(net, optimizer, options, at); }, options.save_every);

  for (const int epoch : training.epochs()) {
    // In the last epoch the model trains with fixed ranges and statistics, which the integer model will have.
    const bool is_last = epoch > 0 && epoch + 1 == options.epochs;
    net.module().observe(!is_last);
    net.module().freeze_norms(is_last);
    for (auto& [batch, labels] : training.batches(epoch)) {
      const auto part = accumulation.next(optimizer);
      const auto loss = ch::cross_entropy(net(batch), labels);
      part.backward(loss);
      if (part.ends_step()) optimizer.step();
      training.note(loss.item(), labels.numel(), part.ends_step());
    }
    training.end_epoch([&] { return accuracy(net, test_set, options, net); });
  }
  training.end();
  if (options.int8) make_integers(run, net, test_set, options);
}

/// Prints which option --qat can't be combined with, if any; returns whether there is one.
bool is_refused(const Options& options) {
  const std::string_view policies[] = {"single", "dp", "ddp", "fsdp"};
  if (std::ranges::find(policies, options.policy) == std::end(policies)) {
    std::fprintf(stderr,
                 "train_classifier: --qat: expected --policy single, dp, ddp or fsdp, under which the ranges of "
                 "numbers are the whole batch's, got %s\n",
                 options.policy.c_str());
    return true;
  }
  if (options.model == "resnet50") {
    std::fprintf(stderr, "train_classifier: --qat: expected --model toy, mlp or resnet18, got %s\n",
                 options.model.c_str());
    return true;
  }
  if (options.canonical_shares == 0) return false;
  std::fprintf(stderr,
               "train_classifier: --qat: not with --canonical-shares, got %d: the shares of a batch are computed one "
               "after the other then, and its ranges are known with the last\n",
               options.canonical_shares);
  return true;
}

}  // namespace

int train_quantized(int argc, char** argv, const Options& options) {
  if (is_refused(options)) return 2;
  return launch<Model, ch::FullyShardedDataParallel<Model>>(
      argc, argv, options, [&]<class Net>(ch::Run& run) { train<Net>(run, options); });
}
