#pragma once
/// Reads CIFAR-10's files.

#include <chorus/core/error.hpp>
#include <chorus/data/cifar10.hpp>
#include <chorus/data/file.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace chorus::data {

CHORUS_INLINE std::string Cifar10::find(const std::string& folder) {
  const auto has_batches = [](const std::string& place) {
    return file_exists(place + "/data_batch_1.bin") || file_exists(place + "/test_batch.bin");
  };
  if (has_batches(folder)) return folder;
  const std::string inside = folder + "/cifar-10-batches-bin";
  return has_batches(inside) ? inside : std::string();
}

namespace detail {
/// Where to download the files.
inline constexpr const char* cifar10_source =
    "cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html, unpacked";
}  // namespace detail

CHORUS_INLINE std::string Cifar10::advice(const std::string& folder) {
  const auto has = [&](const char* name) { return file_exists(cat(folder, "/", name)); };
  for (const char* archive : {"cifar-10-binary.tar.gz", "cifar-10-binary.tar"})
    if (has(archive)) return cat("; unpack it: tar -xf ", folder, "/", archive, " -C ", folder);
  const char* form = has("cifar-10-batches-py") || has("cifar-10-python.tar.gz") || has("data_batch_1") ? "Python"
                     : has("cifar-10-batches-mat") || has("cifar-10-matlab.tar.gz") || has("data_batch_1.mat")
                         ? "Matlab"
                         : nullptr;
  if (form == nullptr) return {};
  return cat("; this is the ", form, " version of CIFAR-10: expected the binary version, ", detail::cifar10_source);
}

CHORUS_INLINE ImageDataset Cifar10::read(const std::string& folder, Split split) {
  check<FileError>(file_exists(folder), "Cifar10: no such folder: ", folder, "; CIFAR-10 is ", detail::cifar10_source);
  require_folder("Cifar10", folder);
  const std::string place = find(folder), other = advice(folder);
  check<FileError>(!place.empty(), "Cifar10: folder ", folder,
                   " (or cifar-10-batches-bin in it) lacks data_batch_1.bin and test_batch.bin",
                   other.empty() ? cat("; CIFAR-10 is ", detail::cifar10_source) : "", list_folder(folder), other);
  std::vector<std::uint8_t> pixels, labels;
  if (split == Split::test) {
    read_batch(place + "/test_batch.bin", pixels, labels);
  } else {
    for (const char digit : {'1', '2', '3', '4', '5'})
      read_batch(place + "/data_batch_" + digit + ".bin", pixels, labels);
  }
  return {{3, 32, 32},
          std::move(pixels),
          std::move(labels),
          10,
          {{0.4914f, 0.4822f, 0.4465f}, {0.2470f, 0.2435f, 0.2616f}}};
}

CHORUS_INLINE void Cifar10::read_batch(const std::string& path, std::vector<std::uint8_t>& pixels,
                                       std::vector<std::uint8_t>& labels) {
  InputFile file(path);
  constexpr std::size_t record_size = 1 + pixels_per_image;
  check<FileError>(file.size() != 0 && file.size() % record_size == 0, "Cifar10: ", path,
                   ": expected a whole number of ", record_size, "-byte records (a label and 3 x 32 x 32 pixels), got ",
                   file.size(), " bytes");
  const std::size_t first = labels.size(), last = first + file.size() / record_size;
  labels.resize(last);
  pixels.resize(last * pixels_per_image);
  for (std::size_t i = first; i < last; ++i) {
    const std::size_t got = file.read({&labels[i], 1}) + file.read({&pixels[i * pixels_per_image], pixels_per_image});
    check<FileError>(got == record_size, "Cifar10: ", path, ": cut short in record ", i - first);
    check<FileError>(labels[i] < 10, "Cifar10: ", path, ": the label of record ", i - first, " is ", int{labels[i]},
                     ", expected 0 to 9");
  }
}

}  // namespace chorus::data
