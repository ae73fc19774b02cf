#pragma once
/// Opens an image dataset by its folder.

#include <chorus/core/error.hpp>
#include <chorus/data/cifar10.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/file.hpp>
#include <chorus/data/mnist.hpp>
#include <string>

namespace chorus::data {

/// The dataset in `folder`: MNIST if one of its files for `split` exists, else CIFAR-10. Throws FileError with the
/// expected names if the folder has neither, and the errors of `Mnist` and `Cifar10`.
inline ImageDataset open_images(const std::string& folder, Split split = Split::train) {
  require_folder("open_images", folder);
  if (!Mnist::find(folder, split, Mnist::images).empty() || !Mnist::find(folder, split, Mnist::labels).empty())
    return Mnist(folder, split);
  if (!Cifar10::find(folder).empty()) return Cifar10(folder, split);
  const char* which = split == Split::train ? "train" : "t10k";
  fail<FileError>("open_images: folder ", folder, " holds no dataset that is known here; looked for MNIST (", which,
                  Mnist::images, " and ", which, Mnist::labels, ", plain or .gz) and CIFAR-10 (",
                  split == Split::train ? "data_batch_1.bin to data_batch_5.bin" : "test_batch.bin",
                  ", also in cifar-10-batches-bin)", list_folder(folder), Cifar10::advice(folder));
}

}  // namespace chorus::data
