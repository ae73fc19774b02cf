// Images a second out of a folder, to compare with images_torch.py, which writes that folder.
//   images FOLDER [WORKERS]
// Reads all files three times: decoded only; then as for training, RandomResizedCrop(224), flip and normalisation, in
// batches of 32. Best of three passes.
#include <algorithm>
#include <chorus/data/image_folder.hpp>
#include <chorus/data/loader.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace data = chorus::data;

/// The images per second of the fastest of three calls.
template <class Pass>
double rate(chorus::Index images, const Pass& pass) {
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pass();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(images) / seconds.count());
  }
  return best;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: images FOLDER [WORKERS]\n");
    return 2;
  }
  const int workers = argc > 2 ? std::atoi(argv[2]) : 0;
  const data::ImageFolder train(argv[1],
                                {.frame = data::RandomResizedCrop{224},
                                 .transforms = {data::RandomHorizontalFlip{},
                                                data::Normalize{{0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}}}});
  std::printf("decoded       %7.0f images/s\n", rate(train.size(), [&] {
                for (const auto& [path, label] : train.samples()) data::read_image(path);
              }));
  std::printf("for training  %7.0f images/s\n", rate(train.size(), [&] {
                data::DataLoader loader{train, data::Sampler{train.size()}, {.batch = 32, .workers = workers}};
                for (const auto& batch : loader) static_cast<void>(batch);
              }));
}
