#include <sys/stat.h>

#include <catch.hpp>
#include <cerrno>
#include <chorus/data/open_images.hpp>

#include "files.hpp"

namespace folders_test {

namespace data = chorus::data;
using data::Split;

template <class Action>
std::string error_of(Action action) {
  return message_of<chorus::FileError>(action);
}

void write_mnist(const TestFolder& folder, std::uint32_t images, std::uint32_t labels,
                 const std::string& part = "train") {
  folder.write(part + "-images-idx3-ubyte", idx({images, 28, 28}, counting(images * 784)));
  folder.write(part + "-labels-idx1-ubyte", idx({labels}, counting(labels, 9)));
}

/// Records with label i % 10 and pixels i, i + 1, ...
Bytes cifar_records(std::size_t count) {
  Bytes out;
  for (std::size_t i = 0; i < count; ++i) {
    out.push_back(static_cast<std::uint8_t>(i % 10));
    for (std::size_t p = 0; p < 3072; ++p) out.push_back(static_cast<std::uint8_t>(i + p));
  }
  return out;
}

TEST_CASE("MNIST is read from its folder") {
  const TestFolder folder;
  write_mnist(folder, 12, 12);
  write_mnist(folder, 3, 3, "t10k");
  const data::Mnist train(folder.path()), test(folder.path(), Split::test);
  CHECK(train.size() == 12);
  CHECK(test.size() == 3);
  CHECK(train.classes() == 10);
  CHECK(train.image_shape() == data::ImageShape{1, 28, 28});
  CHECK(train.normalization().mean == std::vector<float>{0.1307f});

  std::vector<float> image(784);
  CHECK(train.get(11, image) == 1);
  CHECK(image[0] == static_cast<float>(11 * 784 % 256) / 255.0f);
  CHECK_THROWS_AS(train.get(12, image), chorus::UsageError);
  CHECK_THROWS_AS(train.get(-1, image), chorus::UsageError);
  image.resize(783);
  CHECK_THROWS_AS(train.get(0, image), chorus::ShapeError);
}

TEST_CASE("MNIST is read under the names that people have") {
  const TestFolder folder;
  const std::string place = GENERATE("", "raw/", "MNIST/raw/"), dash = GENERATE("-", ".");
  const std::string images = "train-images" + dash + "idx3-ubyte", labels = "train-labels" + dash + "idx1-ubyte";
  SECTION("a file") {
    folder.write(place + images, idx({4, 28, 28}, counting(4 * 784)));
    folder.write(place + labels, idx({4}, counting(4)));
  }
  SECTION("a folder of its name") {
    folder.write(place + images + "/" + images, idx({4, 28, 28}, counting(4 * 784)));
    folder.write(place + labels + "/train-labels-idx1-ubyte", idx({4}, counting(4)));
  }
  CHECK(data::Mnist(folder.path()).size() == 4);
  CHECK(data::open_images(folder.path()).size() == 4);
}

TEST_CASE("MNIST's images and labels are of one place, and a file goes before an empty folder") {
  const TestFolder folder;
  folder.write("raw/train-images-idx3-ubyte", idx({4, 28, 28}, counting(4 * 784)));
  folder.write("raw/train-labels-idx1-ubyte", idx({4}, counting(4)));
  folder.write("train-images.idx3-ubyte", idx({3, 28, 28}, counting(3 * 784)));
  CHECK(error_of([&] { data::Mnist mnist(folder.path()); }) ==
        "Mnist: folder " + folder.path() +
            " has no train-labels-idx1-ubyte, plain or .gz; it holds raw/, train-images.idx3-ubyte");
  folder.write("train-labels.idx1-ubyte", idx({3}, counting(3)));
  std::filesystem::create_directory(folder.path() + "/train-images-idx3-ubyte");
  CHECK(data::Mnist(folder.path()).size() == 3);
}

TEST_CASE("a folder that has something else: the message says what, up to a bound") {
  const TestFolder folder;
  for (int i = 10; i < 22; ++i) folder.write("file" + std::to_string(i), counting(1));
  folder.write("a\nb/c", counting(1));
  const std::string list = "; it holds a\\x0ab/, file10, file11, file12, file13, file14, file15, file16 and 5 more";
  CHECK(error_of([&] { data::Mnist mnist(folder.path()); }).ends_with(list));
  CHECK(error_of([&] { data::Cifar10 cifar(folder.path()); }).ends_with(list));
  CHECK(error_of([&] { data::open_images(folder.path()); }).ends_with(list));
}

TEST_CASE("other forms of CIFAR-10 are known by name") {
  const auto error = [](const std::string& name) {
    const TestFolder folder;
    folder.write(name, counting(1));
    const auto message = error_of([&] { data::open_images(folder.path()); });
    CHECK(error_of([&] { data::Cifar10 cifar(folder.path()); }).ends_with(message.substr(message.rfind("; "))));
    return message;
  };
  const std::string binary =
      " version of CIFAR-10: expected the binary version, cifar-10-binary.tar.gz of "
      "https://www.cs.toronto.edu/~kriz/cifar.html, unpacked";
  CHECK(error("cifar-10-batches-py/data_batch_1")
            .ends_with("; it holds cifar-10-batches-py/; this is the Python" + binary));
  CHECK(error("data_batch_1").ends_with("; this is the Python" + binary));
  CHECK(error("cifar-10-python.tar.gz").ends_with("; this is the Python" + binary));
  CHECK(error("data_batch_1.mat").ends_with("; this is the Matlab" + binary));
  CHECK(error("cifar-10-binary.tar.gz").find("; unpack it: tar -xf /") != std::string::npos);
}

#if CHORUS_USE_ZLIB
TEST_CASE("MNIST's files may be compressed") {
  const TestFolder folder;
  folder.write("train-images-idx3-ubyte.gz", gzip(idx({4, 28, 28}, counting(4 * 784))));
  folder.write("train-labels-idx1-ubyte.gz", gzip(idx({4}, counting(4))));
  CHECK(data::open_images(folder.path()).size() == 4);
  const TestFolder dots;
  dots.write("raw/train-images.idx3-ubyte.gz", gzip(idx({4, 28, 28}, counting(4 * 784))));
  dots.write("raw/train-labels.idx1-ubyte.gz", gzip(idx({4}, counting(4))));
  CHECK(data::Mnist(dots.path()).size() == 4);
}
#endif

TEST_CASE("a wrong MNIST folder is refused") {
  const TestFolder folder;
  const auto open = [&] { data::Mnist mnist(folder.path()); };
  const std::string images = folder.path() + "/train-images-idx3-ubyte",
                    labels = folder.path() + "/train-labels-idx1-ubyte";
  CHECK(error_of(open) == "Mnist: folder " + folder.path() + " has no train-images-idx3-ubyte, plain or .gz");
  folder.write("train-images-idx3-ubyte", idx({2, 28, 28}, counting(2 * 784)));
  CHECK(error_of(open) == "Mnist: folder " + folder.path() +
                              " has no train-labels-idx1-ubyte, plain or .gz; it holds train-images-idx3-ubyte");
  folder.write("train-labels-idx1-ubyte", idx({3}, counting(3)));
  CHECK(error_of(open) == "Mnist: " + images + " has 2 images, but " + labels + " has 3 labels");
  folder.write("train-labels-idx1-ubyte", idx({2}, {9, 10}));
  CHECK(error_of(open) == "Mnist: " + labels + ": label 1 is 10, expected 0 to 9");
  folder.write("train-labels-idx1-ubyte", idx({2, 28, 28}, counting(2 * 784)));
  CHECK(error_of(open) == labels + ": wrong magic number: expected 2049 (bytes in 1 axes), got 2051");
}

TEST_CASE("CIFAR-10 is read from its folder or the archive's") {
  const std::string inside = GENERATE("", "cifar-10-batches-bin/");
  const TestFolder folder;
  for (const char* digit : {"1", "2", "3", "4", "5"})
    folder.write(inside + "data_batch_" + digit + ".bin", cifar_records(2));
  folder.write(inside + "test_batch.bin", cifar_records(3));
  const data::Cifar10 train(folder.path()), test(folder.path(), Split::test);
  CHECK(train.size() == 10);
  CHECK(test.size() == 3);
  CHECK(train.image_shape() == data::ImageShape{3, 32, 32});
  std::vector<float> image(3072);
  CHECK(train.get(9, image) == 1);
  CHECK(image[3071] == static_cast<float>(3072 % 256) / 255.0f);
  CHECK(data::open_images(folder.path(), Split::test).size() == 3);
}

TEST_CASE("a wrong CIFAR-10 folder is refused") {
  const TestFolder folder;
  const auto open = [&] { data::Cifar10 cifar(folder.path()); };
  const std::string first = folder.path() + "/data_batch_1.bin";
  const std::string source =
      "; CIFAR-10 is cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html, unpacked";
  CHECK(error_of(open) == "Cifar10: folder " + folder.path() +
                              " (or cifar-10-batches-bin in it) lacks data_batch_1.bin and test_batch.bin" + source);
  CHECK(error_of([&] { data::Cifar10 cifar(folder.path() + "/none"); }) ==
        "Cifar10: no such folder: " + folder.path() + "/none" + source);

  folder.write("data_batch_1.bin", cifar_records(2));
  CHECK(error_of(open) == folder.path() + "/data_batch_2.bin: No such file or directory");

  const std::string expected = "expected a whole number of 3073-byte records (a label and 3 x 32 x 32 pixels), got ";
  auto records = cifar_records(2);
  folder.write("data_batch_1.bin", std::span(records).first(6000));
  CHECK(error_of(open) == "Cifar10: " + first + ": " + expected + "6000 bytes");
  folder.write("data_batch_1.bin", {});
  CHECK(error_of(open) == "Cifar10: " + first + ": " + expected + "0 bytes");

  records[3073] = 10;
  folder.write("data_batch_1.bin", records);
  CHECK(error_of(open) == "Cifar10: " + first + ": the label of record 1 is 10, expected 0 to 9");
}

TEST_CASE("what is no file is refused, and nothing waits") {
  const TestFolder folder;
  const auto images = folder.path() + "/train-images-idx3-ubyte";
  folder.write("train-labels-idx1-ubyte", idx({2}, counting(2)));
  REQUIRE(::mkfifo(images.c_str(), 0600) == 0);  // opening it would wait for a writer
  CHECK(error_of([&] { data::Mnist mnist(folder.path()); }) == images + " is not a regular file");
  REQUIRE(::mkfifo((folder.path() + "/test_batch.bin").c_str(), 0600) == 0);
  CHECK(error_of([&] { data::Cifar10 cifar(folder.path(), Split::test); }) ==
        folder.path() + "/test_batch.bin is not a regular file");
  std::filesystem::remove(images);
  std::filesystem::create_directory(images);
  CHECK(error_of([&] { data::Mnist mnist(folder.path()); }) == images + " is not a regular file");
  std::filesystem::remove(images);
  std::filesystem::create_symlink(images, images);
  CHECK(error_of([&] { data::Mnist mnist(folder.path()); }) ==
        "Mnist: folder " + folder.path() +
            " has no train-images-idx3-ubyte, plain or .gz; it holds test_batch.bin, train-images-idx3-ubyte, "
            "train-labels-idx1-ubyte");
}

TEST_CASE("open_images says what it looked for") {
  const TestFolder folder;
  CHECK(error_of([&] { data::open_images(folder.path()); }) ==
        "open_images: folder " + folder.path() +
            " holds no dataset that is known here; looked for MNIST (train-images-idx3-ubyte and "
            "train-labels-idx1-ubyte, "
            "plain or .gz) and CIFAR-10 (data_batch_1.bin to data_batch_5.bin, also in cifar-10-batches-bin)");
  errno = 0;
  CHECK(error_of([&] { data::open_images(folder.path() + "/none"); }) ==
        "open_images: folder " + folder.path() + "/none: No such file or directory");
  const auto file = folder.write("file", counting(3));
  CHECK(error_of([&] { data::open_images(file); }) == "open_images: " + file + " is not a folder");

  write_mnist(folder, 2, 2);
  CHECK(data::open_images(folder.path()).size() == 2);
}

}  // namespace folders_test
