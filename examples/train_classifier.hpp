#pragma once
/// Shared code of train_classifier's two files: options, images, accuracy, and the policy around a model.

#include <algorithm>
#include <chorus/data/open_images.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "checkpoints.hpp"
#include "models.hpp"
#include "training.hpp"

namespace ch = chorus;

struct Options : CheckpointOptions {
  std::string model = "toy", data = "synthetic";
  ch::Index train_images = 8000, test_images = 2000;
  int workers = 1;
  bool augment = false;
  std::optional<double> bucket_cap_mb{};
  bool qat = false, int8 = false;
  std::string load{};
};

/// The fraction of test images that `classify(images)` classifies correctly, over all ranks.
template <class Net, class Classify>
double accuracy(Net& net, const ch::data::ImageDataset& test, const Options& options, Classify& classify) {
  const ch::NoGrad no_grad;
  net.eval();
  ch::data::DataLoader loader{test,
                              net.sampler(test, {.shuffle = false}),
                              {.batch = std::max<ch::Index>(options.batch, 256), .workers = options.workers}};
  double right_and_all[2] = {};
  for (auto& [images, labels] : loader) {
    const auto answers = ch::argmax(classify(images), 1);
    for (ch::Index i = 0; i < labels.numel(); ++i) right_and_all[0] += answers(i) == labels(i) ? 1 : 0;
    right_and_all[1] += static_cast<double>(labels.numel());
  }
  net.train();
  net.sum(right_and_all);
  return right_and_all[1] == 0 ? 0 : right_and_all[0] / right_and_all[1];
}

inline ch::data::ImageDataset open_dataset(const Options& options, ch::data::Split split) {
  if (options.data != "synthetic") return ch::data::open_images(options.data, split);
  return ch::data::SyntheticImages{split == ch::data::Split::train ? options.train_images : options.test_images,
                                   options.seed, split};
}

inline ch::data::LoaderOptions loading(const Options& options) {
  ch::data::LoaderOptions loading{.batch = options.batch, .workers = options.workers};
  if (options.augment) loading.transforms = {ch::data::RandomCrop{4}, ch::data::RandomHorizontalFlip{}};
  return loading;
}

/// The policy around the model, with its options: DDP also has bucket sizes.
template <class Net>
Net make_net(typename Net::model_type model, ch::Run& run, const Options& options) {
  if constexpr (std::string_view(Net::name) == "ddp")
    return Net{model_for<Net>(std::move(model), options), run,
               ch::DistributedDataParallelOptions{.first_bucket_cap_mb = options.bucket_cap_mb,
                                                  .bucket_cap_mb = options.bucket_cap_mb}};
  else
    return net_around<Net>(std::move(model), run, options);
}

/// --qat: trains like train_classifier.cpp, with the rounding of integers. Returns main's status.
int train_quantized(int argc, char** argv, const Options& options);
