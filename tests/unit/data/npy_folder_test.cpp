#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/io/npy_folder.hpp>
#include <string>
#include <vector>

#include "files.hpp"

namespace npy_folder_test {

using chorus::FileError;
using chorus::Tensor;
using Folder = chorus::io::NpyFolder<float, 1>;

TEST_CASE("a folder of arrays; subfolders are classes") {
  const TestFolder place;
  const auto save = [&](const std::string& name, float value) {
    std::filesystem::create_directories((std::filesystem::path(place.path()) / name).parent_path());
    chorus::io::save_npy(place.path() + "/" + name, Tensor<float, 1>::full({2}, value));
  };
  CHECK(message_of<FileError>([&] { Folder(place.path()); }) ==
        "NpyFolder: expected .npy files in " + place.path() + " or in its subfolders, got none");
  save("dog/a.npy", 3);
  save("cat/b.npy", 2);
  save("cat/a.npy", 1);
  const Folder arrays(place.path());
  CHECK(arrays.classes() == std::vector<std::string>{"cat", "dog"});
  chorus::data::DataLoader loader{arrays, chorus::data::Sampler{3, {.shuffle = false}}, {.batch = 3}};
  auto& [x, labels] = *loader.begin();
  CHECK(x.to_vector() == std::vector<float>{1, 1, 2, 2, 3, 3});
  CHECK(labels.to_vector() == std::vector<std::int64_t>{0, 0, 1});
  CHECK(message_of<chorus::UsageError>([&] { arrays.get(3); }) == "NpyFolder: sample 3 is not in [0, 3)");

  save("c.npy", 4);
  CHECK(message_of<FileError>([&] { Folder(place.path()); })
            .starts_with("NpyFolder: " + place.path() + " has .npy files, and so has cat in it"));
  CHECK(Folder(place.path() + "/cat").size() == 2);
}

}  // namespace npy_folder_test
