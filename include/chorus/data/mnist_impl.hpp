#pragma once
/// Reads MNIST's files.

#include <string>
#include <utility>

#include <chorus/core/error.hpp>
#include <chorus/data/file.hpp>
#include <chorus/data/idx.hpp>
#include <chorus/data/mnist.hpp>

namespace chorus::data {

namespace detail {
/// The path of one of the files directly in `place`; empty if it is missing.
inline std::string mnist_file_in(const std::string& place, Split split, const char* suffix) {
  const std::string dashes = cat(split == Split::train ? "train" : "t10k", suffix);
  std::string dot = dashes;
  dot[dot.rfind("-idx")] = '.';
  const std::string names[] = {dashes, dot, dashes + ".gz", dot + ".gz"};
  std::string something;  // a folder without the file
  for (const auto& name : names) {
    const std::string path = cat(place, "/", name);
    if (!file_exists(path)) continue;
    if (!is_folder(path)) return path;
    for (const auto& inner : names)
      if (const std::string file = cat(path, "/", inner); file_exists(file) && !is_folder(file)) return file;
    if (something.empty()) something = path;
  }
  return something;
}
}  // namespace detail

CHORUS_INLINE std::string Mnist::find(const std::string& folder, Split split, const char* suffix) {
  // Images and labels come from one place, since another may hold another dataset's.
  for (const char* inside : {"", "/raw", "/MNIST/raw"}) {
    const std::string place = folder + inside;
    if (!detail::mnist_file_in(place, split, images).empty() || !detail::mnist_file_in(place, split, labels).empty())
      return detail::mnist_file_in(place, split, suffix);
  }
  return {};
}

CHORUS_INLINE ImageDataset Mnist::read(const std::string& folder, Split split) {
  require_folder("Mnist", folder);
  const auto require = [&](const char* suffix) {
    std::string path = find(folder, split, suffix);
    check<FileError>(!path.empty(), "Mnist: folder ", folder, " has no ", split == Split::train ? "train" : "t10k",
                     suffix, ", plain or .gz", list_folder(folder));
    return path;
  };
  const std::string image_path = require(images), label_path = require(labels);
  IdxArray pixels = read_idx(image_path, 3), classes = read_idx(label_path, 1);
  check<FileError>(pixels.sizes[0] == classes.sizes[0], "Mnist: ", image_path, " has ", pixels.sizes[0],
                   " images, but ", label_path, " has ", classes.sizes[0], " labels");
  for (std::size_t i = 0; i < classes.values.size(); ++i)
    check<FileError>(classes.values[i] < 10, "Mnist: ", label_path, ": label ", i, " is ", int{classes.values[i]},
                     ", expected 0 to 9");
  return {{1, pixels.sizes[1], pixels.sizes[2]},
          std::move(pixels.values),
          std::move(classes.values),
          10,
          {{0.1307f}, {0.3081f}}};
}

}  // namespace chorus::data
